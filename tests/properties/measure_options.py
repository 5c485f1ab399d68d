"""What Megatron makes of options that do not work as on a GPT model, as a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_nemotron3.launch import parser
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.launch.make_options import with_effect
from tests.properties import step
from tests.properties.measure import outcome
from tests.properties.step import Case

#: Values that are read, where the type does not say one.
_VALUES = {"moe-layer-freq": "2", "linear-attention-freq": "2"}
_OTHER = {"int": "7", "float": "0.7", "text": "x"}
#: Options that a run of one rank without Transformer Engine cannot have, because Megatron asks for more.
_WITH_MORE = (
    *("defer-embedding-wgrad-compute", "experimental-attention-variant", "hybrid-context-parallel"),
    *("heterogeneous-layers-config-encoded-json", "heterogeneous-layers-config-path"),
    *("log-max-attention-logit", "multi-latent-attention", "qk-clip"),
    "norm-epsilon",  # changes the other norms
)


def words(names: Iterable[str]) -> tuple[str, ...]:
    """Options with values that are not their defaults."""
    found: list[str] = []
    for name in names:
        row = parser.table()["options"][name]
        choices = [choice for choice in row.get("choices", ()) if choice != row.get("default")]
        value = _VALUES.get(name) or (choices or [_OTHER.get(row["type"], "")])[0]
        count = int(row["nargs"]) if row.get("nargs", "").isdecimal() else 1
        found += [f"--{name}", *([] if row["type"] == "switch" else [value] * count)]
    return tuple(found)


def of_this_megatron(effect: str) -> list[str]:
    """Options with an effect that megatron-core 0.19's parser has without more packages."""
    rows = parser.table()["options"]
    return [
        name
        for name in with_effect(effect)
        if "package" not in rows[name] and "0.19" in rows[name].get("versions", ["0.19"])
    ]


def refused(case: Case) -> str:
    """The run with all options that are refused, and a packed row under the mask that is not read."""
    names = [name for name in of_this_megatron("refused") if name not in _WITH_MORE]
    assert outcome(replace(case, extra=words(names))) == outcome(replace(case, extra=()))
    masked, alone, ends = run_distributed(_in_a_model, 1, replace(case, extra=()))[0]
    assert masked == 0 < alone
    return (
        f"trains the same with {len(names)} such options together; under the mask of --reset-attention-mask "
        "the logits of a second document do not change, and are not those of this document alone; "
        f"--qk-clip and --defer-embedding-wgrad-compute end in {' and '.join(ends)}"
    )


def _in_a_model(case: Case) -> tuple[float, float, list[str]]:
    """How far the mask moves the logits of a second document, and how far they are from those of it alone.

    And what clipping queries, and an output layer that waits with its gradient, end in.
    """
    import torch
    from megatron.core.optimizer.qk_clip import clip_qk

    def differences(chunks: list[Any], _: Any) -> tuple[float, float, list[str]]:
        model = step.loop.unwrap_model(chunks[0]).eval()
        tokens = torch.arange(1, 9)[None]
        places = torch.arange(4).repeat(2)[None]
        mask = torch.ones(8, 8).tril()
        mask[4:, :4] = 0
        with torch.no_grad():
            plain = model(tokens, places, None)[:, 4:]
            masked = model(tokens, places, (mask < 0.5)[None, None])[:, 4:]
            alone = model(tokens[:, 4:], places[:, 4:], None)
        ends = []
        model.config.defer_embedding_wgrad_compute = True
        wrapped = SimpleNamespace(module=SimpleNamespace(module=model))  # as DDP and Float16Module wrap it
        for attempt in (lambda: clip_qk([wrapped]), lambda: model(tokens, places, None)):
            with pytest.raises(AttributeError, match=r"self_attention|append") as ended:
                attempt()
            ends.append(ended.type.__name__)
        return float((masked - plain).abs().max()), float((alone - plain).abs().max()), ends

    with step.rules_off():
        found: tuple[float, float, list[str]] = step.train_step(case, differences)
    return found


def unused(case: Case) -> str:
    """The run with all options that are unused."""
    names = of_this_megatron("unused")
    assert outcome(replace(case, extra=words(names))) == outcome(replace(case, extra=()))
    return f"trains the same with all {len(names)} such options together"


def forced(case: Case) -> str:
    """The run with and without the option."""
    assert outcome(case).loss != outcome(replace(case, extra=())).loss
    return "experts are drawn at random, and the loss is another one"


def microbatches(case: Case) -> str:
    """The gradient of the same sequences in micro-batches of one and of two."""
    found = {}
    for how in ("aux_loss", "seq_aux_loss"):
        extra = ("--moe-router-load-balancing-type", how, *case.extra[2:])
        sizes = [replace(case.schedule, micro_batch_size=size) for size in (1, 2)]
        norms = [outcome(replace(case, extra=extra, schedule=size)).grad_norm for size in sizes]
        found[how] = abs(norms[0] / norms[1] - 1)
    assert found["aux_loss"] > 1e-3 > 1e-5 > found["seq_aux_loss"], found
    return "the gradient depends on --micro-batch-size; with seq_aux_loss it does not"


def biases(case: Case) -> str:
    """The bias of a router after a step."""
    still, moved = run_distributed(_biases, 1, [case, replace(case, extra=())])[0]
    return f"of 4 biases a step moves {still}, and {moved} at the model's rate"


def _biases(cases: list[Case]) -> list[int]:
    def moved(chunks: list[Any], _: Any) -> int:
        found = [b for name, b in chunks[0].named_buffers() if name.endswith("expert_bias")]
        return sum(int((bias != 0).sum()) for bias in found)

    with step.rules_off():
        return [step.train_step(case, moved) for case in cases]

"""What `nemotron3 run` says about options of a script, and about routers that are frozen."""

from __future__ import annotations

import pytest

from megatron_nemotron3 import run
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from tests.support.models import build_hybrid


def said_of(*words: str) -> list[str]:
    from megatron_nemotron3.specs import nemotron3_torch_stack_spec

    said: list[str] = []
    run.verify_options(["pretrain_data", *words], nemotron3_torch_stack_spec, said.append)
    return said


def test_options_of_a_script(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--bf16", "--kv-lora-rank", "8", "--moe-router-force-load-balancing", "--optimizer=muon"]
    kinds = [line.split(": ")[:2] for line in said_of(*words)]
    assert kinds == [
        ["warning", "--moe-router-force-load-balancing"],
        ["note", "--kv-lora-rank"],
        ["note", "--optimizer muon"],
    ]
    with pytest.raises(SystemExit) as stopped:
        said_of(*words, "--reset-attention-mask")
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and "--reset-attention-mask: the documents of a row" in error
    assert error.count("\n") == 1


def lines_of_a_frozen_model() -> list[list[str]]:
    """What is said of a model as it is, with frozen weights, and with frozen biases, too."""
    import torch

    from megatron_nemotron3.layers.frozen import freeze_biases, name_moving_biases
    from megatron_nemotron3.specs import nemotron3_torch_stack_spec

    initialize()
    found = []
    for weights, biases in ((False, False), (True, False), (True, True)):
        model = build_hybrid("ME", nemotron3_torch_stack_spec, moe_router_enable_expert_bias=True)
        model.decoder.requires_grad_(not weights)
        if biases:
            freeze_biases(model)
        said: list[str] = []
        name_moving_biases(said.append)
        tokens = torch.arange(8)[None]
        model(tokens, tokens, None)
        found.append(said)
    return found


def test_frozen_routers_whose_biases_move() -> None:
    trained, frozen, whole = run_distributed(lines_of_a_frozen_model, 1)[0]
    assert trained == whole == []
    assert len(frozen) == 1 and frozen[0].startswith("warning: 1 routers are frozen, but the biases")

"""A recording is the same in any layout, and what the checkpoint computes; and of what engines return."""

from __future__ import annotations

import base64
import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.proof.bisect.engine import of_sglang, of_vllm, sequence
from megatron_nemotron3.proof.bisect.recompute import Recomputation
from megatron_nemotron3.proof.bisect.recording import Recording, check, check_model, read
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.tensors import Tensors
from megatron_nemotron3.proof.certify.world import TrainingRun, initial_weights
from tests.parallel.case import Case
from tests.parallel.layouts import CASES

_L = ParallelLayout
CASE: Case = replace(CASES["super"], steps=1, micro_batch_size=2, sequences=4)
PACKED: dict[str, Any] = {"documents": (13, 22, 9), "padded": (16, 24, 16), "micro_batch_size": 1}
HIDDEN = (0, 3, 7)

#: Name -> layout, changes of the case, whether it is in the short suite.
ROWS: dict[str, tuple[ParallelLayout, dict[str, Any], bool]] = {
    "TP2 SP PP2": (_L(tp=2, pp=2), {}, True),
    "CP2, packed": (_L(cp=2), PACKED, True),
    "PP2 VPP2": (_L(pp=2, vpp=2), {}, False),
    "EP2 DP2": (_L(dp=2, ep=2), {}, False),
    "CP2, logits": (_L(cp=2), {"labels": False}, False),
    "PP2 DP2, packed": (_L(pp=2, dp=2), PACKED, False),
}


def recorded(case: Case, weights: Tensors, folder: str) -> Recording:
    """What all ranks record in one step."""
    run_distributed(_record, case.layout.world_size, case, weights, folder, apart=True)
    return read(f"{folder}/trainer.pt")


def _record(case: Case, weights: Tensors, folder: str) -> None:
    from megatron_nemotron3.post_training import compress
    from megatron_nemotron3.proof.bisect.record import Recorder, unwrapped

    run = TrainingRun(case, weights)
    for chunk in run.chunks:
        chunk.eval()
    with Recorder(run.chunks, vocab_size=case.config.vocab_size, routing=True, hidden=HIDDEN) as recorder:
        run.forward_backward(0)
    recorder.write(f"{folder}/trainer.pt")
    if case.layout.world_size == 1:
        compress.save(unwrapped(run.chunks[0]), case.config, Path(folder) / "checkpoint")


@pytest.fixture(scope="module")
def weights() -> Tensors:
    return initial_weights(CASE)


@pytest.fixture(scope="module")
def alone(weights: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def of(packed: bool) -> tuple[Recording, Path]:
        folder = tmp_path_factory.mktemp("alone")
        return recorded(replace(CASE, **(PACKED if packed else {})), weights, str(folder)), folder

    return of


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_one_process_is_its_checkpoint(alone: Any, packed: bool) -> None:
    recording, folder = alone(packed)
    check_model(recording, CASE.config)
    assert [len(s.ids) for s in recording.sequences] == ([13, 22, 9] if packed else [64]) * 4
    model = Recomputation.open(folder / "checkpoint")
    for s in recording.sequences[:3]:
        assert s.hidden.keys() == set(HIDDEN) and s.routing.keys() == {1, 4, 6}
        assert s.mtp_logprobs.keys() == {1, 2}
        ids = s.ids.unsqueeze(0)
        x = model.embed(ids)
        for step in model.run(x):
            x = step.stream
            if step.layer in s.hidden:
                close(s.hidden[step.layer], x[0])
            if step.routing:
                assert torch.equal(step.routing.chosen[0].sort(-1).values.int(), s.routing[step.layer])
        close(s.logprobs, model.logprobs(x, ids)[0])
        for depth, found in model.mtp_logprobs(x, ids).items():
            close(s.mtp_logprobs[depth], found[0])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if row[-1] else pytest.mark.full) for n, row in ROWS.items()]
)
def test_any_layout_is_one_process(alone: Any, weights: Tensors, name: str, tmp_path: Path) -> None:
    layout, changes, _ = ROWS[name]
    expected, _ = alone(bool(changes.get("documents")))
    found = recorded(replace(CASE, **changes).at(layout), weights, str(tmp_path))
    assert (found.system, found.dtype) == ("megatron", "float32")
    close([vars(s) for s in found.sequences], [vars(s) for s in expected.sequences])


def test_prompts_lengths_and_hooks() -> None:
    run_distributed(_options, 1, apart=True)


def _options() -> None:
    import megatron_nemotron3 as n3
    from megatron_nemotron3.proof.bisect.record import Recorder
    from megatron_nemotron3.proof.certify.ranks import initialize

    initialize()
    model = n3.build_model(CASE.config, precision="bf16", backend="torch").eval()
    ids = torch.randint(128, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(12).expand(2, -1)
    with torch.no_grad(), Recorder(model, vocab_size=100, hidden=[2], name="small") as recorder:
        logits = model(ids, positions, None)
    with torch.no_grad():
        model(ids, positions, None)  # behind the block: not recorded
    found = recorder.recording(prompts=[0, 5], lengths=[12, 9])
    check(found)
    assert (found.name if hasattr(found, "name") else found.model) == "small" and found.dtype == "bfloat16"
    expected = logits[..., :100].float().log_softmax(-1)
    for row, (start, stop) in enumerate([(1, 12), (5, 9)]):
        s = found.sequences[row]
        taken = expected[row, start - 1 : stop - 1].gather(-1, ids[row, start:stop, None].clamp(max=99))[:, 0]
        known = ids[row, start:stop] < 100
        assert torch.allclose(s.logprobs[known], taken[known], atol=1e-4) and known.sum() > 2
        assert torch.equal(s.ids, ids[row, :stop]) and s.hidden[2].shape == (stop, CASE.config.hidden_size)
        assert {depth: len(v) for depth, v in s.mtp_logprobs.items()} == {
            depth: stop - max(start, 1 + depth) for depth in (1, 2)
        }
    for options in ({"prompts": [1]}, {"lengths": [1, 2, 3]}):
        with pytest.raises(ValueError, match=r"[13] (prompts|lengths) for 2 recorded sequences"):
            recorder.recording(**options)
    with pytest.raises(ValueError, match="hidden: layer 8: the model has 8 layers, numbered from 0"):
        Recorder(model, hidden=[8])
    with Recorder(model) as nothing:
        pass
    with pytest.raises(ValueError, match="there is no sequence"):
        check(nothing.recording())


PATTERN = "MEM*E"
IDS, LOGPROBS = [5, 6, 7, 8], [None, -1.0, -2.0, -3.0]
EXPERTS = torch.arange(3 * 2 * 2).view(3, 2, 2)


def test_what_vllm_returns() -> None:
    entries = [
        None if value is None else {i: SimpleNamespace(logprob=value)} for i, value in zip(IDS, LOGPROBS)
    ]
    done = SimpleNamespace(token_ids=IDS[3:], logprobs=entries[3:], routed_experts=EXPERTS.numpy())
    output = SimpleNamespace(prompt_token_ids=IDS[:3], prompt_logprobs=entries[:3], outputs=[done])
    expect(of_vllm(output, PATTERN))
    output.prompt_logprobs = None
    with pytest.raises(ValueError, match="no prompt_logprobs: ask for"):
        of_vllm(output)
    output.prompt_logprobs = [None, {9: SimpleNamespace(logprob=-1.0)}, entries[2]]
    with pytest.raises(ValueError, match="token 1 has no log-probability of its own"):
        of_vllm(output)


def test_what_sglang_returns() -> None:
    tokens = [(value, token, None) for token, value in zip(IDS, LOGPROBS)]
    packed = base64.b64encode(EXPERTS.int().numpy().tobytes()).decode()
    meta = {"input_token_logprobs": tokens[:3], "output_token_logprobs": tokens[3:], "routed_experts": packed}
    expect(of_sglang({"meta_info": meta}, PATTERN, topk=2))
    with pytest.raises(ValueError, match="12 numbers; 4 or 3 tokens with top-3 in 2 E layers, or all 5"):
        of_sglang({"meta_info": meta}, PATTERN, topk=3)
    with pytest.raises(ValueError, match="no input_token_logprobs"):
        of_sglang({"meta_info": {}})


def expect(found: Any) -> None:
    check(Recording("engine", "bfloat16", [found]))
    assert found.ids.tolist() == IDS and found.first == 1 and found.logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert found.routing.keys() == {1, 4}
    assert found.routing[1].tolist() == [*EXPERTS[:, 0].tolist(), [-1, -1]]
    assert found.routing[4].tolist() == [*EXPERTS[:, 1].tolist(), [-1, -1]]


def test_plain_numbers() -> None:
    every = torch.zeros(4, 5, 2, dtype=torch.uint8)
    every[:, 4] = 7
    found = sequence(IDS, [None, None, -2.0, -3.0], experts=every, pattern=PATTERN)
    assert found.prompt == 2 and found.logprobs.tolist() == [-2.0, -3.0]
    assert found.routing[1].unique().tolist() == [0] and found.routing[4].unique().tolist() == [7]
    assert sequence(IDS, LOGPROBS, prompt=3).logprobs.tolist() == [-3.0]
    for arguments, message in (
        ((IDS, LOGPROBS[1:]), "3 log-probabilities for 4 tokens"),
        (
            (IDS, LOGPROBS, every[:, :3]),
            r"experts \[4, 3, 2\]: \[up to 4 tokens, 2 E layers or all 5, topk\]",
        ),
    ):
        ids, values, *experts = arguments
        with pytest.raises(ValueError, match=message):
            sequence(ids, values, experts=experts[0] if experts else None, pattern=PATTERN)
    with pytest.raises(ValueError, match="need the pattern"):
        sequence(IDS, LOGPROBS, experts=every)

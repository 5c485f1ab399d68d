"""The recomputation against transformers and the decoding engine, and its changes against edited files."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.process_tree import watch
from megatron_nemotron3.inference.generate.decode import read_weights
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.mtp import MTP
from megatron_nemotron3.models import get
from megatron_nemotron3.proof.bisect.recompute import Recomputation, Steps
from megatron_nemotron3.proof.bisect.recording import Recording, Sequence, write
from tests.support import engines
from tests.support import sparse_checkpoints as sparse
from tests.support.checkpoint_pair import InMemory
from tests.support.hf_folders import write_hf
from tests.support.model_mapping import unclamped

CONFIG = get("super-tiny").but(pattern="M-*EM", vocab_size=300, dense_ffn_hidden_size=128)
#: More than a chunk of the scan.
TOKENS = 140


def folder(path: Path, change: Callable[[dict[str, Tensor]], Any] = lambda t: None) -> Path:
    values = engines.tensors(CONFIG, seed=1)
    change(values)
    write_hf(path, CONFIG, values=values, dtype="float32")
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("recompute") / "hf")


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(CONFIG.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def whole(place: Path, ids: Tensor, **options: Any) -> tuple[list[Any], Tensor]:
    model = Recomputation.open(place, **options)
    steps = list(model.run(model.embed(ids)))
    return steps, model.logprobs(steps[-1].stream, ids)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=2e-4)


def test_streams_routing_and_logprobs_are_those_of_transformers(place: Path, ids: Tensor) -> None:
    transformers = pytest.importorskip("transformers")
    model = unclamped(transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval())
    seen: dict[str, Tensor] = {}
    gate = model.model.layers[3].mixer.gate
    gate.register_forward_hook(lambda module, args, out: seen.update(experts=out[2]))
    with torch.no_grad():
        found = model(ids, output_hidden_states=True, use_cache=False)
    steps, logprobs = whole(place, ids)
    expected = found.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    close(logprobs, expected)
    for step, stream in zip(steps, found.hidden_states[1:]):
        if step.layer + 1 < len(steps):  # the last of transformers' is after the final norm
            close(step.stream, stream)
    mine = steps[3].routing.chosen.flatten(0, 1)
    assert torch.equal(mine.sort(-1).values, seen["experts"].view(mine.shape).sort(-1).values)
    assert [step.routing is not None for step in steps] == [False, False, False, True, False]


def test_mtp_is_that_of_the_engine(place: Path, ids: Tensor) -> None:
    config = CONFIG.but(mtp_num_layers=2)
    source = InMemory(engines.tensors(CONFIG, seed=1), place)
    engine = Engine(read_weights(source, config), max_context=engines.CONTEXT)  # type: ignore[arg-type]
    model = Recomputation.open(place, config)
    *_, last = model.run(model.embed(ids))
    found = model.mtp_logprobs(last.stream, ids)
    assert found.keys() == {1, 2}
    hidden, mtp = engine.forward(ids, engine.new_state(2)).hidden, MTP(engine, 2)
    for depth in found:
        tokens, n = ids[:, depth:], TOKENS - depth
        hidden = mtp.forward(depth, hidden[:, :n], tokens).hidden
        expected = engine.logits(hidden[:, :-1]).log_softmax(-1)
        close(found[depth], expected.gather(-1, ids[:, depth + 1 :, None]).squeeze(-1))


def test_rows_in_groups_and_a_restart_change_nothing(place: Path, ids: Tensor) -> None:
    steps, logprobs = whole(place, ids)
    model = Recomputation.open(place, tokens=1)
    again = list(model.run(steps[1].stream, first=2))
    assert [step.layer for step in again] == [2, 3, 4]
    close(model.logprobs(again[-1].stream, ids), logprobs)


def permute(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].flip(0).contiguous()

    return change


def swap_experts(tensors: dict[str, Tensor]) -> None:
    for part in ("up_proj", "down_proj"):
        a, b = (f"backbone.layers.3.mixer.experts.{e}.{part}.weight" for e in (0, 5))
        tensors[a], tensors[b] = tensors[b], tensors[a]


#: Prefixes of two experts in each other's place.
SWAPPED = {
    f"backbone.layers.3.mixer.experts.{a}.": f"backbone.layers.3.mixer.experts.{b}."
    for a, b in ((0, 5), (5, 0))
}


def of_weight(end: str) -> Steps:
    return {"weight": lambda plain, name: plain(name).flip(0) if name.endswith(end) else plain(name)}


def of_matrix(end: str) -> Steps:
    return {
        "linear": lambda plain, x, name: plain(x, name).flip(-1) if name.endswith(end) else plain(x, name)
    }


@pytest.mark.parametrize(
    ("number", "steps", "edit"),
    [
        (0, of_weight("mixer.D"), permute("backbone.layers.0.mixer.D")),
        (2, of_matrix("mixer.o_proj.weight"), permute("backbone.layers.2.mixer.o_proj.weight")),
        (3, {"mlp": lambda plain, name, u: plain(SWAPPED.get(name, name), u)}, swap_experts),
        (
            3,
            {"ranking": lambda plain, scores, bias: plain(scores, bias.flip(0))},
            permute("backbone.layers.3.mixer.gate.e_score_correction_bias"),
        ),
    ],
    ids=["weight", "band", "experts", "step"],
)
def test_a_change_is_an_edited_checkpoint(
    place: Path, ids: Tensor, tmp_path: Path, number: int, steps: Steps, edit: Any
) -> None:
    streams, plain = whole(place, ids)
    _, expected = whole(folder(tmp_path / "hf", edit), ids)
    assert (expected - plain).abs().max() > 0.01
    model = Recomputation.open(place)
    before = streams[number - 1].stream if number else model.embed(ids)
    *_, last = model.run(before, first=number, changes={number: steps})
    assert torch.equal(model.logprobs(last.stream, ids), expected)
    *_, last = model.run(before, first=number)
    assert torch.equal(model.logprobs(last.stream, ids), plain)


#: One layer of each kind of Super, whose 512 experts are 5.6 GB, and its output layer.
MEMORY = """
import sys
from pathlib import Path
import torch
from benchmarks.process_tree import proc_bytes
from megatron_nemotron3.proof.bisect.recompute import Recomputation
from megatron_nemotron3.models import get
from megatron_nemotron3.checkpoints.convert import inventory
from megatron_nemotron3.checkpoints.convert.views import Converted
from tests.support.synthetic_checkpoint import Synthetic
config = get("super").but(name="cut", pattern="M*E")
source = Converted(Synthetic(config, Path(".")), inventory.mappings(config), to_hf=True)
model = Recomputation(source, config)
ids = torch.randint(config.vocab_size, (1, int(sys.argv[1])), generator=torch.Generator().manual_seed(0))
*_, last = model.run(model.embed(ids))
assert model.logprobs(last.stream, ids).isfinite().all()
print(proc_bytes("self/status")["VmHWM"] / 2**30)
"""


@pytest.mark.full
def test_memory_of_the_command_at_the_real_widths_of_super(tmp_path: Path) -> None:
    """One layer of each kind and the tables are 8 GB of zeros, so that all tokens are as likely."""
    config = get("super").but(pattern="M*E", mtp_pattern=None, mtp_num_layers=0)
    sparse.write_hf(tmp_path / "hf", config)
    ids = torch.arange(100, 164)
    hidden = {layer: torch.zeros(len(ids), config.hidden_size) for layer in range(3)}
    one = Sequence(ids, 0, torch.full((63,), -math.log(config.vocab_size)), {}, hidden)
    write(tmp_path / "both.pt", Recording("zeros", "float32", [one]))
    both = str(tmp_path / "both.pt")
    used = watch(
        [
            *(sys.executable, "-m", "megatron_nemotron3", "bisect", str(tmp_path / "hf")),
            *("--trainer", both, "--engine", both),
        ],
        environment={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
    )
    assert used.returncode == 0 and "neither deviates" in used.output, used.output[-2000:]
    # Files are mapped, so the size of the process has their pages, too.
    assert used.anonymous < 1.5 * 2**30, used


@pytest.mark.full
def test_memory_at_the_real_widths_of_super() -> None:
    """Seen: 0.82 GiB with 1,024 tokens."""
    command, root = [sys.executable, "-c", MEMORY, "64"], Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 1.2

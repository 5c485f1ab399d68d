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
from megatron_nemotron3.proof.bisect.recompute import STEPS, Change, Recomputation
from megatron_nemotron3.proof.bisect.recording import Recording, Sequence, write
from tests.support import engines
from tests.support import sparse_checkpoints as sparse
from tests.support.checkpoint_pair import InMemory
from tests.support.hf_folders import write_hf

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
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
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
    mine = torch.cat([r.experts for r in steps[3].routing])
    assert torch.equal(mine.sort(-1).values, seen["experts"].view(mine.shape).sort(-1).values)
    assert {step.layer: len(step.routing) for step in steps} == {0: 0, 1: 0, 2: 0, 3: 2, 4: 0}


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


@pytest.mark.parametrize(
    ("number", "change", "edit"),
    [
        (0, Change(weights={"mixer.D": lambda w: w.flip(0)}), permute("backbone.layers.0.mixer.D")),
        (
            2,
            Change(weights={"self_attention.linear_proj.weight": lambda w: w.flip(0)}),
            permute("backbone.layers.2.mixer.o_proj.weight"),
        ),
        (3, Change(experts={0: 5, 5: 0}), swap_experts),
        (
            3,
            Change(steps={"ranking": lambda original, scores, bias: original(scores, bias.flip(0))}),
            permute("backbone.layers.3.mixer.gate.e_score_correction_bias"),
        ),
    ],
    ids=["weight", "band", "experts", "step"],
)
def test_a_change_is_an_edited_checkpoint(
    place: Path, ids: Tensor, tmp_path: Path, number: int, change: Change, edit: Any
) -> None:
    steps, plain = whole(place, ids)
    _, expected = whole(folder(tmp_path / "hf", edit), ids)
    assert (expected - plain).abs().max() > 0.01
    model = Recomputation.open(place)
    before = steps[number - 1].stream if number else model.embed(ids)
    *_, last = model.run(before, first=number, changes={number: change})
    assert torch.equal(model.logprobs(last.stream, ids), expected)
    *_, last = model.run(before, first=number)
    assert torch.equal(model.logprobs(last.stream, ids), plain)


def test_given_experts_are_used(place: Path, ids: Tensor) -> None:
    steps, _ = whole(place, ids)
    model, before = Recomputation.open(place), steps[2].stream
    own = torch.stack([r.experts for r in steps[3].routing])
    assert torch.equal(model.layer(3, before, experts=own).update, steps[3].update)
    other = own.clone()
    other[0, 7, -1] = min(set(range(CONFIG.num_moe_experts or 0)) - set(own[0, 7].tolist()))
    other[1, 9] = -1
    moved = (model.layer(3, before, experts=other).update != steps[3].update).any(-1)
    assert moved.nonzero().tolist() == [[0, 7]]
    scores = steps[3].routing[0].scores.sort(-1, descending=True).values
    k = own.shape[-1]
    assert torch.equal(steps[3].routing[0].margin, scores[:, k - 1] - scores[:, k])


@pytest.mark.parametrize("step", STEPS)
def test_every_step_can_be_replaced(place: Path, ids: Tensor, step: str) -> None:
    called = []

    def note(original: Callable[..., Any], *args: Any) -> Any:
        called.append(step)
        return original(*args)

    model, change = Recomputation.open(place), Change(steps={step: note})
    *_, last = model.run(model.embed(ids[:, :9]), changes=dict.fromkeys(range(5), change))
    model.logprobs(last.stream, ids[:, :9], change)
    assert called


def test_unknown_names(place: Path, ids: Tensor) -> None:
    model = Recomputation.open(place)
    x = model.embed(ids)
    with pytest.raises(ValueError, match=r"there is no step 'rope': use one of layer, "):
        model.layer(0, x, Change(steps={"rope": lambda original: original}))
    with pytest.raises(ValueError, match=r"no tensor decoder\.layers\.0\.mixer\.E"):
        model.layer(0, x, Change(weights={"mixer.E": lambda w: w}))
    with pytest.raises(ValueError, match=r"mixer\.D: changed from \[16\] to \[15\]"):
        model.layer(0, x, Change(weights={"mixer.D": lambda w: w[1:]}))


def test_a_megatron_folder(tmp_path: Path, place: Path, ids: Tensor) -> None:
    from megatron_nemotron3.checkpoints.convert.conversion import FromHfOptions, convert_from_hf

    convert_from_hf(place, tmp_path / "megatron", FromHfOptions(model=CONFIG))
    _, expected = whole(place, ids)
    _, found = whole(tmp_path / "megatron", ids)
    assert torch.equal(found, expected)


#: One layer of each kind of Super, whose 512 experts are 5.6 GB, and its output layer.
MEMORY = """
import resource, sys
from pathlib import Path
import torch
from benchmarks.process_tree import watch
from megatron_nemotron3.proof.bisect.recompute import Recomputation
from megatron_nemotron3.models import get
from tests.support.synthetic_checkpoint import Synthetic
config = get("super").but(name="cut", pattern="M*E")
model = Recomputation(Synthetic(config, Path(".")), config)
ids = torch.randint(config.vocab_size, (1, int(sys.argv[1])), generator=torch.Generator().manual_seed(0))
*_, last = model.run(model.embed(ids))
assert model.logprobs(last.stream, ids).isfinite().all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
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
            *(sys.executable, "-m", "megatron_nemotron3", "bisect", "--checkpoint", str(tmp_path / "hf")),
            *("--trainer", both, "--engine", both),
        ],
        environment={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
    )
    assert used.returncode == 0 and "neither deviates" in used.output, used.output[-2000:]
    assert used.rss < 1.5 * 2**30, used.rss


@pytest.mark.full
def test_memory_at_the_real_widths_of_super() -> None:
    """Seen: 0.82 GiB with 1,024 tokens."""
    command, root = [sys.executable, "-c", MEMORY, "64"], Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 1.2

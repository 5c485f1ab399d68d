"""Layer by layer, the check computes the logits of the whole models of our torch spec and transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.checkpoints import open_hugging_face, open_megatron
from megatron_nemotron3.checkpoints.convert.conversion import (
    FromHfOptions,
    ToHfOptions,
    convert_from_hf,
    convert_to_hf,
)
from megatron_nemotron3.checkpoints.convert.logits.compare import LogitsCheckOptions, check_logits
from megatron_nemotron3.checkpoints.convert.logits.report import LogitsReport
from megatron_nemotron3.models import get
from tests.support.checkpoint_pair import Pair, pair
from tests.support.checkpoint_writer import write
from tests.support.model_mapping import to_transformers
from tests.support.parity import oracle, weights_of, without_mtp

pytest.importorskip("transformers")

#: More than one chunk of 128, and not a multiple of one.
TOKENS, SEED = 200, 5
ATOL = 1e-4
#: Seeds of weights without near ties in routing, which a whole model resolves in its own way.
SEEDS = {"super": 9, "ultra": 22, "nano": 24, "nemotron-h-8b": 10, "puzzle": 1}


class Run:
    """A model, its check, and the logits that the check computed."""

    def __init__(self, name: str, folder: Path) -> None:
        self.pair: Pair = pair(get(f"{name}-tiny"), folder, SEEDS[name], padded=8)
        self.lines: list[str] = []
        self.ours: dict[str, list[Tensor]] = {}
        self.theirs: dict[str, list[Tensor]] = {}
        self.report: LogitsReport = check_logits(
            self.pair.megatron,
            self.pair.hf,
            self.pair.config,
            LogitsCheckOptions(TOKENS, seed=SEED, echo=self.lines.append, on_logits=self.keep),
        )
        vocabulary, generator = self.pair.config.vocab_size, torch.Generator().manual_seed(SEED)
        self.ids = torch.randint(vocabulary, (TOKENS,), generator=generator).unsqueeze(0)

    def keep(self, name: str, start: int, ours: Tensor, theirs: Tensor) -> None:
        self.ours.setdefault(name, []).append(ours.clone())
        self.theirs.setdefault(name, []).append(theirs.clone())

    def logits(self, name: str = "logits") -> tuple[Tensor, Tensor]:
        return torch.cat(self.ours[name], 1), torch.cat(self.theirs[name], 1)


@pytest.fixture(
    scope="module",
    params=[n if n in ("super", "nemotron-h-8b") else pytest.param(n, marks=pytest.mark.full) for n in SEEDS],
)
def run(world: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(request.param, tmp_path_factory.mktemp("hf"))


def test_both_sides_compute_the_same(run: Run) -> None:
    report = run.report
    assert report.passed, report.problems
    assert run.lines[-1] == "both sides compute the same"
    config = run.pair.config
    assert sum("decoder.layers." in layer.name for layer in report.layers) == config.num_layers
    assert any("MTP: transformers has none" in line for line in run.lines) == config.has_mtp
    assert [logits.name for logits in report.logits][1:] == ["logits of MTP depth 1"] * config.has_mtp
    assert max(layer.difference for layer in report.layers) < 1e-5  # ten times below what is tolerated
    for logits in report.logits:
        assert logits.tolerance == ATOL  # the floor has not raised it
        assert logits.scale > 0.3  # not a comparison of zeros
        assert logits.same_top1 == logits.tokens
        assert 0 < logits.floor < ATOL


def test_logits_are_those_of_our_whole_model(run: Run) -> None:
    """Also MTP's: the output layer computes them before the model's own. (The loss then overwrites them.)"""
    seen: list[Tensor] = []
    model, s = run.pair.model, TOKENS
    hook = model.output_layer.register_forward_hook(lambda module, args, out: seen.append(out[0].clone()))
    with torch.no_grad():
        logits = model(run.ids, torch.arange(s).unsqueeze(0), None, labels=run.ids)
        plain = model(run.ids, torch.arange(s).unsqueeze(0), None)
    hook.remove()
    assert logits.shape == (1, s)  # losses: with labels the MTP depths pass the output layer, too
    torch.testing.assert_close(run.logits()[0], plain[0], rtol=0, atol=ATOL)
    if run.pair.config.has_mtp:
        mtp = seen[0].transpose(0, 1)[0, :-1]  # the last token's successor is not known
        torch.testing.assert_close(run.logits("logits of MTP depth 1")[0], mtp, rtol=0, atol=ATOL)


def test_logits_are_those_of_transformers_whole_model(run: Run) -> None:
    weights = to_transformers(
        {name: t for name, t in weights_of(run.pair.model).items() if not name.startswith("mtp.")},
        run.pair.config,
    )
    theirs = oracle(without_mtp(run.pair.config), weights)
    with torch.no_grad():
        expected = theirs(run.ids).logits[0]
    torch.testing.assert_close(run.logits()[1], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(run.logits()[0], expected, rtol=0, atol=ATOL)


def test_padding_rows_are_never_read(run: Run) -> None:
    """Megatron's tables have 8 more rows here, of random numbers."""
    name, config = "output_layer.weight", run.pair.config
    assert run.pair.megatron.content[name].shape[0] == config.vocab_size + 8
    assert run.logits()[0].shape == (TOKENS, config.vocab_size)


pytest.importorskip("transformers")

CONFIG = get("super-tiny").but(pattern="M-*E", vocab_size=300, dense_ffn_hidden_size=128)
QUIET = LogitsCheckOptions(140, echo=lambda line: None)


@pytest.mark.filterwarnings("ignore")
def test_conversions_there_and_back(world: None, tmp_path: Path) -> None:
    made = pair(CONFIG, tmp_path, seed=4, padded=20)
    keep = ("expert_bias", "e_score_correction_bias")
    tensors = {n: t if n.endswith(keep) else t.bfloat16() for n, t in made.megatron.content.items()}
    folders = [write(tmp_path / "megatron", tensors, iteration=1), tmp_path / "hf", tmp_path / "back"]
    convert_to_hf(folders[0], folders[1], ToHfOptions(config=CONFIG, workers=1))
    convert_from_hf(folders[1], folders[2], FromHfOptions(config=CONFIG, workers=1))
    hf = open_hugging_face(folders[1], model=CONFIG)
    for folder in (folders[0], folders[2]):
        opened = open_megatron(folder, model=CONFIG)
        report = check_logits(opened.weights, hf.weights, opened.config, QUIET)
        assert report.passed, report.problems
        assert torch.tensor([logits.scale for logits in report.logits]).min() > 0.3


@pytest.mark.full
@pytest.mark.parametrize("words", [("150",), ("4", "whole")], ids=" ".join)
def test_memory_at_the_real_widths_of_super(words: tuple[str, ...]) -> None:
    """One layer of each kind and the MTP block, or all 88 layers; an E layer's 512 experts (5.6 GB) are never
    all loaded.

    Seen: 1.4 GiB. transformers' own block of one such layer would take 11.3 GB in FP32.
    """
    command = [sys.executable, "-m", "tests.support.synthetic_checkpoint", "super", *words]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["passed"]
    assert result["peak"] < result["bound"] < 2.5 * 2**30

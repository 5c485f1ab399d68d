"""`nemotron3 prune`: from a checkpoint to a smaller one, in both formats; what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3.cli import main
from megatron_nemotron3.common import output
from megatron_nemotron3.launch import Launch, ParallelLayout
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.models.command import model as own_model
from megatron_nemotron3.post_training.compress.scores import Scores
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.tensors import Tensors, gather, pieces
from tests.post_training.compress.silence import random_scores
from tests.post_training.compress.test_cut import EVERYTHING
from tests.post_training.compress.test_importance import write
from tests.support.hf_folders import write_tokenizer
from tests.support.loaded_weights import same, written

Capture = pytest.CaptureFixture[str]

SUPER = tiny(get("super"))
WORDS = [f"{name}={size}" for name, size in EVERYTHING["super"].items()]
MEASURE = ["--sample-tokens", "512", "--seq-length", "64", "--device", "cpu"]


def write_data(prefix: Path) -> None:
    """A Megatron data set of random tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    data = IndexedDatasetBuilder(f"{prefix}.bin")
    made = torch.Generator().manual_seed(5)
    for _ in range(4):
        data.add_document(torch.randint(0, 2048, (300,), generator=made), [300])
    data.finalize(f"{prefix}.idx")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, its scores (of nothing measured) and data."""
    folder = tmp_path_factory.mktemp("prune")
    run_distributed(write, 1, folder / "model", SUPER)
    random_scores(SUPER).save(folder / "scores")
    write_data(folder / "data")
    return folder


def test_measure_then_cut(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """One command measures and cuts; its scores cut the Hugging Face form to the same weights."""
    monkeypatch.setattr(output, "INTERVAL", 0.0)
    words = ["prune", str(place / "model"), "--data-path", str(place / "data"), *MEASURE]
    words += ["--scores", str(tmp_path / "s"), "--sizes", *WORDS, "--output", str(tmp_path / "out"), "--json"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "measure: 256 of 512 tokens, " in printed.err
    said = json.loads(printed.out)
    assert said["tokens"] == 512 and said["parameters"] < said["parameters_before"] and said["loss"] > 1
    assert Scores.load(tmp_path / "s", SUPER).tokens == 512
    config = own_model(str(tmp_path / "out" / "model.json"))
    assert {name: getattr(config, name) for name in EVERYTHING["super"]} == EVERYTHING["super"]
    assert config.name.endswith("-pruned-tiny") and config.full_pattern.count("/") == 2
    assert main(["check", str(tmp_path / "out")]) == 0

    assert main(["convert", "to-hf", str(place / "model"), str(tmp_path / "hf")]) == 0
    kept = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(kept | {"eos_token_id": 11}))
    (tmp_path / "hf/generation_config.json").write_text("{}")
    words = ["prune", str(tmp_path / "hf"), "--scores", str(tmp_path / "s"), "--sizes", *WORDS]
    assert main([*words, "--dry-run"]) == 0
    assert not (tmp_path / "out-hf").exists()
    assert main([*words, "--output", str(tmp_path / "out-hf")]) == 0
    assert main(["convert", "verify", str(tmp_path / "out"), str(tmp_path / "out-hf")]) == 0
    new = json.loads((tmp_path / "out-hf/config.json").read_text())
    assert (new["eos_token_id"], new["hidden_size"], new["num_hidden_layers"]) == (11, 96, 10)
    assert (tmp_path / "out-hf/generation_config.json").exists()


@pytest.mark.full
def test_the_source_of_a_cut_checkpoint_is_kept(place: Path, tmp_path: Path) -> None:
    """As a training keeps it: its Hugging Face form has the keys and files of the folder it comes from."""
    hf, m, cut, back = (tmp_path / name for name in ("hf", "m", "cut", "back"))
    assert main(["convert", "to-hf", str(place / "model"), str(hf)]) == 0
    kept = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(kept | {"eos_token_id": 11, "use_cache": True}))
    (hf / "generation_config.json").write_text("{}")
    assert main(["convert", "from-hf", str(hf), str(m)]) == 0
    words = ["prune", str(m), "--scores", str(place / "scores"), "--sizes", *WORDS, "--output", str(cut)]
    assert main(words) == 0 and main(["convert", "to-hf", str(cut), str(back)]) == 0
    found = json.loads((back / "config.json").read_text())
    assert (found["eos_token_id"], found["use_cache"], found["hidden_size"]) == (11, True, 96)
    assert (back / "generation_config.json").read_text() == "{}"


def test_a_layer_of_its_own_kind(place: Path, tmp_path: Path) -> None:
    """Expert widths by layer become a model with such layers, in both formats."""
    words = ["prune", str(place / "model"), "--scores", str(place / "scores")]
    assert (
        main([*words, "--sizes", "moe_ffn_hidden_size=96,64,32,48,96", "--output", str(tmp_path / "a")]) == 0
    )
    config = own_model(str(tmp_path / "a/model.json"))
    assert config.moe_layers == ((96, 6), (64, 6), (32, 6), (48, 6), (96, 6))
    assert main(["convert", "to-hf", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert main(["convert", "verify", str(tmp_path / "a"), str(tmp_path / "b")]) == 0


def load_strictly(folder: Path, launch: Launch) -> Any:
    """Load a pruned checkpoint into Megatron's model with strictness raise_all."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from megatron_nemotron3.train.build import build

    model = build(launch)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = {"model": model.sharded_state_dict(metadata={"dp_cp_group": group})}
    found = dist_checkpointing.load(state, str(folder / "release"), strict=StrictHandling.RAISE_ALL)
    model.load_state_dict(found["model"])
    return model


def loaded(folder: Path, layout: ParallelLayout) -> Any:
    """Load a pruned checkpoint: this rank's pieces."""
    config = own_model(str(folder / "model.json"))
    return pieces(
        [load_strictly(folder, Launch.of(config, layout=layout, precision="fp32", backend="torch"))]
    )


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(tp=2, ep=2),
        pytest.param(ParallelLayout(tp=2, pp=2, ep=2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_megatron_loads_it(place: Path, tmp_path: Path, layout: ParallelLayout) -> None:
    """Strictly, with MTP, in other layouts: every tensor arrives."""
    words = ["prune", str(place / "model"), "--scores", str(place / "scores"), "--sizes", *WORDS]
    # TP 2 divides the heads of each KV group.
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    found: Tensors = gather(run_distributed(loaded, layout.world_size, tmp_path / "out", layout))
    same(written(tmp_path / "out"), found, own_model(str(tmp_path / "out/model.json")))


@pytest.mark.full
def test_torchrun(place: Path, tmp_path: Path) -> None:
    """Two processes measure what one measures."""
    for ranks, more in (("1", []), ("2", ["--tp", "2", "--ep", "2"])):
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "-m"]
        words += ["megatron_nemotron3", "prune", str(place / "model"), "--data-path", str(place / "data")]
        words += [*MEASURE, *more, "--scores", str(tmp_path / ranks)]
        env = {**os.environ, "PYTHONPATH": os.getcwd()}
        done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (Scores.load(tmp_path / ranks, SUPER).values for ranks in "12")
    for key, value in one.items():
        torch.testing.assert_close(torch.from_numpy(two[key]), torch.from_numpy(value), rtol=2e-5, atol=1e-6)


BAD = [
    ([], "give --text PATH"),
    (["--scores", "missing"], "nothing to do"),
    (["--scores", "missing", "--sizes", "hidden_size=96"], "--sizes needs --output"),
    (["--scores", "missing", "--output", "new"], "--output needs --sizes"),
    (["--scores", "missing", "--sizes", "hidden_size=96", "--output", "new"], "missing"),
    (["--scores", "scores", "--sizes", "num_layers=13", "--output", "new"], "has 12, give 1 to 12"),
    (["--scores", "scores", "--sizes", "hidden_size=96", "--output", "model"], "it exists"),
    (["--scores", "data.idx", "--sizes", "hidden_size=96", "--output", "new"], "data.idx"),
    (
        ["--scores", "scores", "--output", "new", "--sizes", "num_layers=10", "moe_router_topk=1,2"],
        "prune the depth first",
    ),
    (["--text", "nothing.txt", "--scores", "new"], "nothing.txt does not exist"),
    (["--data-path", "nothing", "--scores", "new"], "there is no nothing.bin"),
    (["--data-path", "data", "--scores", "no/new"], "mkdir -p"),
    (
        ["--data-path", "data", "--scores", "new", "--tp", "2"],
        "need a multiple of 2 ranks, torchrun started 1",
    ),
    (["--data-path", "data", "--scores", "new", "--sample-tokens", "1"], "give 2 or more"),
    (["--data-path", "data", "--scores", "new", "--seq-length", "4096"], "--seq-length 4096"),
    (["--data-path", "data", "--scores", "new", "--ep", "5"], "raise DP to a multiple of 5"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=lambda value: " ".join(value)[:40])
def test_bad_input(
    place: Path,
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """One line, exit status 2, before any work, and nothing written."""
    monkeypatch.chdir(place)
    before = sorted(os.listdir())
    assert main(["prune", "model", *words]) == 2
    error = capsys.readouterr().err
    error = error[error.index("nemotron3 prune: ") :].strip()
    assert said in error and len(error.splitlines()) <= 1 + error.count("  - ")
    assert sorted(os.listdir()) == before


def test_a_missing_package(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """It is said before the model is built, and nothing is written."""
    write_tokenizer(tmp_path)
    (tmp_path / "text.txt").write_text("some text " * 500)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    words = ["prune", str(place / "model"), "--text", str(tmp_path / "text.txt"), *MEASURE]
    words += ["--scores", str(tmp_path / "s"), "--tokenizer", str(tmp_path)]
    assert main(words) == 2
    assert "package tokenizers is not installed: pip install" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()

"""Pruning and distillation through nvidia-modelopt: kept parts are the right ones and exact.

Most tests need the package (`pip install nvidia-modelopt==0.47.0`) and are skipped without it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_nemotron3 import build_model, compression
from megatron_nemotron3.certify.ranks import run_distributed
from megatron_nemotron3.compression import minitron
from megatron_nemotron3.compression.plugin import TESTED
from megatron_nemotron3.models import Nemotron3Config, get, tiny

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "compress_minitron.py"
needs_modelopt = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None,
    reason=f"nvidia-modelopt is not installed: pip install nvidia-modelopt=={TESTED}",
)


def small(name: str, **changes: Any) -> Nemotron3Config:
    """The tiny form of a model, without MTP unless asked for."""
    return tiny(get(name)).but(**({"mtp_pattern": None, "mtp_num_layers": 0} | changes))


SUPER, DENSE = small("super"), small("nano-4b")
WITH_MTP = tiny(get("super"))
#: Family -> every dimension it has, made smaller.
EVERYTHING = {
    "super": {
        "hidden_size": 96,
        "num_layers": 10,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "num_attention_heads": 4,
        "num_moe_experts": 24,
        "moe_ffn_hidden_size": 64,
        "moe_shared_expert_intermediate_size": 128,
    },
    "nano-4b": {
        "hidden_size": 96,
        "num_layers": 10,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "num_attention_heads": 4,
        "ffn_hidden_size": 320,
    },
}
CONFIGS = {"super": SUPER, "nano-4b": DENSE}
#: Dimension -> the field of the config that changes with it, where the name is another.
FIELDS = {"ffn_hidden_size": "dense_ffn_hidden_size", "num_layers": "pattern"}
ONE_BY_ONE = [(name, d, new) for name, sizes in EVERYTHING.items() for d, new in sizes.items()]


def tokens(seed: int = 0) -> torch.Tensor:
    """[2, 130]: longer than one chunk of the scan."""
    return torch.randint(0, 2048, (2, 130), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: torch.nn.Module, seed: int = 0) -> torch.Tensor:
    """[b, s, v] in evaluation mode."""
    model.eval()
    batch = tokens(seed)
    result: torch.Tensor = model(batch, torch.arange(batch.shape[1]).expand(2, -1), None)
    return result


def calibrate(model: torch.nn.Module) -> None:
    """Two batches to measure importance on."""
    for seed in (1, 2):
        logits(model, seed)


def build(config: Nemotron3Config) -> torch.nn.Module:
    """A model in FP32 on the torch spec."""
    torch.manual_seed(1)
    return build_model(config, precision="fp32", backend="torch")


def cut(
    config: Nemotron3Config,
    sizes: dict[str, int],
    prepare: Callable[[torch.nn.Module], None] = lambda model: None,
) -> dict[str, Any]:
    """Prune a model: logits and weights before, config, logits and weights after."""
    model = build(config)
    with torch.no_grad():
        prepare(model)
    before = {name: t.clone() for name, t in model.state_dict().items() if t is not None}
    result: dict[str, Any] = {"logits": logits(model), "before": before}
    pruned, weights = compression.prune(model, config, sizes, calibrate)
    student = build(pruned)
    compression.load(student, weights)
    return result | {"config": pruned, "pruned": logits(student), "weights": dict(student.state_dict())}


def test_dimensions_are_modelopts_and_all_have_a_field() -> None:
    for dimension in compression.DIMENSIONS:
        assert any(compression.size(config, dimension) for config in (SUPER, DENSE)), dimension
    if importlib.util.find_spec("modelopt") is not None:
        from megatron_nemotron3.compression.plugin import load_plugin

        load_plugin()
        from modelopt.torch.prune.plugins.mcore_minitron import SUPPORTED_HPARAMS

        assert set(compression.DIMENSIONS) == SUPPORTED_HPARAMS


@needs_modelopt
@pytest.mark.parametrize(("name", "dimension", "new"), ONE_BY_ONE, ids=lambda value: str(value))
def test_one_dimension(name: str, dimension: str, new: int) -> None:
    """The result is a model of the config with that one number changed."""
    (result,) = run_distributed(cut, 1, CONFIGS[name], {dimension: new})
    pruned = result["config"]
    assert compression.size(pruned, dimension) == new
    config, field = CONFIGS[name], FIELDS.get(dimension, dimension)
    same = {"name": config.name, "title": config.title, field: getattr(config, field)}
    assert pruned.but(**same) == config
    assert result["pruned"].isfinite().all()
    assert not torch.equal(result["pruned"], result["logits"])


@needs_modelopt
@pytest.mark.parametrize("name", EVERYTHING)
def test_ranking_alone_changes_nothing(name: str) -> None:
    """Pruning to the present sizes sorts by importance: the weights change, the function does not."""
    sizes = {dimension: _old(name, dimension) for dimension in EVERYTHING[name]}
    # Where a smaller size is no choice, modelopt does not sort.
    steps = dict.fromkeys(minitron._DIVISORS, 2)
    with mock.patch.object(minitron, "_granularity", lambda *sizes: steps):
        (result,) = run_distributed(cut, 1, CONFIGS[name], sizes)
    assert result["config"].pattern == CONFIGS[name].pattern
    moved = [key for key, t in result["weights"].items() if t is not None and t.dim() == 2]
    assert moved
    assert not [key for key in moved if torch.equal(result["weights"][key], result["before"][key])][:3]
    torch.testing.assert_close(result["pruned"], result["logits"], rtol=0, atol=2e-5)


def silence_dense(model: torch.nn.Module) -> None:
    """Two of five FFN channels, others in each layer, give zero."""
    for number, layer in enumerate(model.decoder.layers):
        if hasattr(layer, "mlp") and hasattr(layer.mlp, "linear_fc1"):
            layer.mlp.linear_fc1.weight[(torch.arange(512) + number) % 5 < 2] = 0


def silence_experts(model: torch.nn.Module) -> None:
    """Eight of 32 experts, others in each layer, are never chosen; shared channels give zero."""
    for number, layer in enumerate(model.decoder.layers):
        if hasattr(layer, "mlp") and hasattr(layer.mlp, "router"):
            layer.mlp.router.expert_bias[(torch.arange(32) + number) % 4 == 0] = -10.0
            layer.mlp.shared_experts.linear_fc1.weight[(torch.arange(192) + number) % 3 == 0] = 0


@needs_modelopt
@pytest.mark.parametrize(
    ("name", "sizes", "silence"),
    [
        ("nano-4b", {"ffn_hidden_size": 308}, silence_dense),
        ("super", {"num_moe_experts": 24, "moe_shared_expert_intermediate_size": 128}, silence_experts),
    ],
)
def test_what_does_nothing_goes_first(
    name: str, sizes: dict[str, int], silence: Callable[[torch.nn.Module], None]
) -> None:
    """Which parts are silent differs by layer; without them the logits are the same."""
    (result,) = run_distributed(cut, 1, CONFIGS[name], sizes, silence)
    torch.testing.assert_close(result["pruned"], result["logits"], rtol=0, atol=2e-5)


def quiet_heads(model: torch.nn.Module) -> None:
    """One of the two Mamba heads of each group is quiet, the first of odd ones; two layers do little."""
    for layer in model.decoder.layers:
        if hasattr(layer, "mixer"):
            heads = torch.tensor([2 * group + (group % 2 == 0) for group in range(8)])
            rows = 256 + (heads[:, None] * 16 + torch.arange(16)).flatten()  # x follows z [256]
            layer.mixer.in_proj.weight[rows] *= 1e-3
    for number in (5, 8):  # an M and a -
        layer = model.decoder.layers[number - 1]
        (layer.mixer.out_proj if hasattr(layer, "mixer") else layer.mlp.linear_fc2).weight.mul_(1e-2)


@needs_modelopt
def test_heads_stay_in_their_groups_and_idle_layers_go() -> None:
    config = DENSE.but(pattern="M-M*M-M-M-")
    (result,) = run_distributed(cut, 1, config, {"mamba_num_heads": 8, "num_layers": 8}, quiet_heads)
    assert result["config"].pattern == "M-M*-MM-"
    kept = torch.tensor([2 * group + (group % 2) for group in range(8)])  # the loud one of every group
    first = "decoder.layers.0.mixer."
    for name in ("A_log", "D", "dt_bias"):
        assert torch.equal(result["weights"][first + name], result["before"][first + name][kept])
    rows = (kept[:, None] * 16 + torch.arange(16)).flatten()
    old, new = result["before"][first + "in_proj.weight"], result["weights"][first + "in_proj.weight"]
    wanted = torch.cat([old[:256][rows], old[256:512][rows], old[512:768], old[768:][kept]])
    assert torch.equal(new, wanted)  # z, x, (B, C), dt


def prune_with_mtp() -> tuple[Any, ...]:
    """Mamba heads and depth of a model with MTP: the block is carried over."""
    model = build(WITH_MTP)
    before = {
        name: t.clone() for name, t in model.state_dict().items() if name.startswith("mtp.") and t is not None
    }
    pruned, weights = compression.prune(model, WITH_MTP, {"mamba_num_heads": 8, "num_layers": 10}, calibrate)
    student = build(pruned)
    compression.load(student, weights)
    after = student.state_dict()
    return pruned, before, {name: after[name] for name in before}


@needs_modelopt
def test_mtp_block_is_carried_over() -> None:
    ((pruned, before, after),) = run_distributed(prune_with_mtp, 1)
    assert (pruned.mtp_pattern, pruned.mtp_num_layers, len(pruned.pattern)) == ("*E", 2, 10)
    assert len(before) > 50
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def distill_step() -> dict[str, Any]:
    """A student that differs from its teacher: its loss, the definition's, and the gradients."""
    teacher, student = build(DENSE), build(DENSE.but(hidden_size=96, pattern="M-*-"))
    batch = tokens()
    positions = torch.arange(129).expand(2, -1)
    own, taught = logits(student)[:, :-1], logits(teacher)[:, :-1]
    names = set(student.state_dict())
    model = compression.distillation_model(student, teacher)
    model.train()
    loss = compression.distillation_loss(
        model, model(batch[:, :-1], positions, None, labels=batch[:, 1:].contiguous())
    )
    loss.backward()
    defined = torch.nn.functional.kl_div(
        own.log_softmax(-1), taught.log_softmax(-1), reduction="none", log_target=True
    )
    return {
        "loss": loss.item(),
        "defined": defined.sum(-1).mean().item(),
        "teacher": [p.grad is None for p in teacher.parameters()],
        "student": [p.grad is not None for n, p in model.named_parameters() if n in names],
        "names": (names, set(model.state_dict())),
    }


@needs_modelopt
def test_distillation_loss_is_the_divergence_from_the_teacher() -> None:
    (result,) = run_distributed(distill_step, 1)
    assert result["loss"] > 0.01
    assert result["loss"] == pytest.approx(result["defined"], rel=1e-5)
    assert all(result["teacher"]) and all(result["student"]) and len(result["student"]) > 15
    assert result["names"][0] == result["names"][1]


def prune_and_save(folder: Path, name: str) -> None:
    """A checkpoint of a pruned model; pruning again with its scores does not measure again."""
    config, sizes, scores = CONFIGS[name], EVERYTHING[name], str(folder / "scores")
    first, weights = compression.prune(build(config), config, sizes, calibrate, scores=scores)
    student = build(first)
    compression.load(student, weights)
    compression.save(student, first, folder / "megatron")
    called: list[Any] = []
    second, _ = compression.prune(build(config), config, sizes, called.append, scores=scores)
    assert not called and second == first


@needs_modelopt
@pytest.mark.full
@pytest.mark.parametrize("name", EVERYTHING)
def test_pruned_checkpoint_becomes_a_hugging_face_folder(name: str, tmp_path: Path) -> None:
    run_distributed(prune_and_save, 1, tmp_path, name, apart=True, children=True)
    words = ["convert", "to-hf", str(tmp_path / "megatron"), str(tmp_path / "hf"), "--check-logits", "150"]
    done = _run([sys.executable, "-m", "megatron_nemotron3", *words])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "both sides compute the same" in done.stdout
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (written["hidden_size"], written["num_hidden_layers"], written["mamba_num_heads"]) == (96, 10, 8)


@needs_modelopt
@pytest.mark.full
def test_example_runs(tmp_path: Path) -> None:
    words = ["--teacher-steps", "12", "--steps", "4", "--layers", "10", "--output", str(tmp_path)]
    done = _run([sys.executable, str(EXAMPLE), *words])
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == [
        "| model",
        "| teacher, 12 steps",
        "| pruned",
        "| distilled",
        "| trained",
        "| from scratch",
    ]
    assert all(3 < float(row[1]) < 9 for row in rows[1:])


#: Run by TE_PYTHON: modelopt cuts TE's layers, which it knows, and ours from the same scores.
CUT_BOTH = """
import sys; sys.path += {paths!r}
import os, tempfile, torch
from tests import test_compression as t
from megatron_nemotron3.certify.ranks import run_distributed

def without_te_variables(build, config, backend):
    built = build(config, precision="bf16", backend=backend)
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]
    return built

def both(name):
    config, sizes = t.CONFIGS[name], t.EVERYTHING[name]
    ours, te = (without_te_variables(t.build_model, config, b) for b in ("torch", "te"))
    t.compression.load(te, ours.state_dict())
    folder = tempfile.mkdtemp()
    results = [t.compression.prune(m, config, sizes, t.calibrate, scores=folder) for m in (ours, te)]
    assert results[0][0] == results[1][0]
    a, b = ({{n: v for n, v in w.items() if isinstance(v, torch.Tensor) and "_extra_state" not in n}}
            for _, w in results)
    assert set(a) == set(b), set(a) ^ set(b)
    assert all(torch.equal(a[n], b[n]) for n in a)
    return type(te.decoder.layers[0].mixer.in_proj).__name__, len(a)

for name in t.CONFIGS:
    print("RESULT", *run_distributed(both, 1, name)[0])
"""


@needs_modelopt
@pytest.mark.te
@pytest.mark.skipif(
    not os.environ.get("TE_PYTHON"),
    reason="TE_PYTHON does not name the interpreter of an environment with TransformerEngine",
)
def test_cut_is_that_of_te_layers(tmp_path: Path) -> None:
    """From the same weights and scores, modelopt's TE classes and ours give the same tensors, bit by bit."""
    python = Path(os.environ["TE_PYTHON"])
    script = tmp_path / "cut.py"
    # This interpreter's packages come last: TE's torch is the one TE was built for.
    own = [path for path in sys.path if path.endswith("site-packages")] or [sysconfig.get_path("purelib")]
    script.write_text(CUT_BOTH.format(paths=own))
    setup = python.parents[1] / "te_env.sh"
    source = f". '{setup}'; " if setup.exists() else ""
    done = _run(["bash", "-c", f"{source}exec '{python}' -W ignore '{script}'"])
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert [name for name, _ in found] == ["TELayerNormColumnParallelLinear"] * 2
    assert all(int(number) > 50 for _, number in found)


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def _old(name: str, dimension: str) -> int:
    old = compression.size(CONFIGS[name], dimension)
    assert old is not None
    return old

"""The stack on real TransformerEngine modules, built on a CPU: opt-in, `TE_PYTHON=/path/to/bin/python`.

That interpreter needs megatron-core, TransformerEngine, mamba-ssm and causal-conv1d importable, not a GPU:
TE is constructed here and computes nothing. A `te_env.sh` in the folder above its `bin/` is sourced first;
without one the current environment (`LD_LIBRARY_PATH`) has to do.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN: dict[str, Any] = json.loads((ROOT / "tests" / "golden" / "stock_te_models.json").read_text())
MODULE = "megatron_nemotron3.specs"
#: Who -> the words after `--spec`.
SPECS = {
    "te": [MODULE, "nemotron3_te_stack_spec"],
    "torch": [MODULE, "nemotron3_torch_stack_spec"],
    "stock": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
}

pytestmark = [
    pytest.mark.te,
    pytest.mark.skipif(
        not os.environ.get("TE_PYTHON"),
        reason="TE_PYTHON does not name the interpreter of an environment with TransformerEngine",
    ),
]

#: Run by TE_PYTHON: every golden model from each spec; then a training step of the torch stack beside TE.
DESCRIBE = f"""
import json, logging, warnings
warnings.simplefilter("ignore"); logging.disable(logging.WARNING)
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.support.models import GOLDEN_LAYOUTS, GOLDEN_MODELS, describe_golden_model
from megatron_nemotron3.layers.backend import te_problem

models = {{}}
for layout, (world, sizes) in GOLDEN_LAYOUTS.items():
    for model in GOLDEN_MODELS:
        if model + layout + ("_rank0" if layout else "") not in {list(GOLDEN)!r}:
            continue
        for who, spec in {SPECS!r}.items():
            ranks = run_distributed(describe_golden_model, world, model, sizes, *spec)
            for rank, described in enumerate(ranks):
                models[f"{{who}} {{model}}{{layout}}" + (f"_rank{{rank}}" if layout else "")] = described
print("RESULT", json.dumps({{"te_problem": te_problem(), "models": models}}))
"""

#: Run by TE_PYTHON: TE is importable, and the torch stack trains on the CPU all the same.
TRAIN = """
import json, logging, warnings
warnings.simplefilter("ignore"); logging.disable(logging.WARNING)
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from tests.support.models import build_hybrid

def train(bf16, distributed):
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron_nemotron3.specs import nemotron3_torch_stack_spec

    initialize()
    dtype = {"bf16": bf16, "params_dtype": torch.bfloat16 if bf16 else torch.float32}
    model = build_hybrid("ME*-", nemotron3_torch_stack_spec, moe_latent_size=32, **dtype)
    config = model.config
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    model = DistributedDataParallel(config, ddp, Float16Module(config, model) if bf16 else model)
    options = OptimizerConfig(lr=1e-3, clip_grad=1.0, use_distributed_optimizer=distributed, **dtype)
    optimizer = get_megatron_optimizer(options, [model])
    tokens = torch.randint(0, 256, (2, 32))
    losses = []
    for _ in range(4):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        positions = torch.arange(32).expand(2, -1)
        loss = model(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        losses.append(loss.item())
    return losses

runs = {
    f"bf16={bf16} distributed={distributed}": run_distributed(train, 1, bf16, distributed)[0]
    for bf16 in (False, True)
    for distributed in (False, True)
}
print("RESULT", json.dumps(runs))
"""


def run_with_te(code: str) -> Any:
    """The output of `code` after RESULT in the TE environment."""
    python = os.environ["TE_PYTHON"]
    te_env = Path(python).absolute().parents[1] / "te_env.sh"  # not resolve(): a venv's python is a link
    source = f". {shlex.quote(str(te_env))}; " if te_env.is_file() else ""
    done = subprocess.run(
        ["bash", "-c", f'{source}exec "$@"', "bash", python, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and len(results) == 1, f"{done.stdout}\n{done.stderr}"
    return json.loads(results[0].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """`who model` -> parameters, checkpoint, final_norm, from the TE environment."""
    result = run_with_te(DESCRIBE)
    assert result["te_problem"] is None
    models: dict[str, Any] = result["models"]
    assert set(models) == {f"{who} {model}" for who in SPECS for model in GOLDEN}
    return models


def without_extra_state(checkpoint: dict[str, Any]) -> list[tuple[str, Any]]:
    """Tensors in order."""
    return [(key, value) for key, value in checkpoint.items() if not key.endswith("_extra_state")]


@pytest.mark.parametrize("model", GOLDEN)
@pytest.mark.parametrize("who", ["te", "stock"])
def test_te_models_are_the_golden_ones(who: str, model: str, described: dict[str, Any]) -> None:
    """Names, shapes, keys, chunks, `_extra_state` and order; "stock" shows that the comparison is fair."""
    built, golden = described[f"{who} {model}"], GOLDEN[model]
    for part in ("parameters", "checkpoint"):
        assert list(built[part].items()) == list(golden[part].items())


@pytest.mark.parametrize("model", GOLDEN)
def test_final_norm(model: str, described: dict[str, Any]) -> None:
    norms = {who: described[f"{who} {model}"]["final_norm"] for who in SPECS}
    assert norms["te"].startswith("transformer_engine.") and norms["te"].endswith("RMSNorm")
    assert norms["te"] == norms["stock"]
    assert norms["torch"] == "megatron_nemotron3.layers.norm.RMSNorm"  # also where TE is installed


@pytest.mark.parametrize("model", GOLDEN)
def test_torch_stack_has_the_te_stacks_keys(model: str, described: dict[str, Any]) -> None:
    torch_, te = described[f"torch {model}"], described[f"te {model}"]
    assert list(torch_["parameters"].items()) == list(te["parameters"].items())
    assert without_extra_state(torch_["checkpoint"]) == without_extra_state(te["checkpoint"])
    assert set(torch_["checkpoint"]) == set(te["checkpoint"])


#: Run by TE_PYTHON: checkpoints from each spec into the other.
INTERCHANGE = f"""
import json, logging, warnings
warnings.simplefilter("ignore"); logging.disable(logging.WARNING)
from tests.support.te_interchange import exchange

specs = {SPECS!r}
print("RESULT", json.dumps({{f"{{a}} to {{b}}": exchange(specs[a], specs[b]) for a, b in [
    ("torch", "stock"), ("stock", "torch"), ("torch", "te"), ("te", "torch")
]}}))
"""


def test_checkpoints_move_between_the_specs() -> None:
    """With strictness `raise_all`: no missing or unexpected keys, and all weights are bitwise equal."""
    pairs = run_with_te(INTERCHANGE)
    tensors = len(without_extra_state(GOLDEN["super_like"]["checkpoint"]))
    assert len(pairs) == 4
    for pair, layouts in pairs.items():
        assert len(layouts) == 4 and set(layouts.values()) == {tensors}, (pair, layouts)


def test_decoder_is_our_stack(described: dict[str, Any]) -> None:
    decoders = {who: described[f"{who} super_like"]["decoder"] for who in SPECS}
    ours = "megatron_nemotron3.layers.stack.Nemotron3Stack"
    stock = "megatron.core.models.hybrid.hybrid_block.HybridStack"
    assert decoders == {"te": ours, "torch": ours, "stock": stock}


def test_torch_stack_trains_on_a_cpu_where_te_is_installed() -> None:
    """Megatron prefers TE's optimizer, norm and router kernels wherever TE is importable."""
    runs = run_with_te(TRAIN)
    assert len(runs) == 4
    for name, losses in runs.items():
        assert losses[-1] < losses[0] - 0.3, (name, losses)

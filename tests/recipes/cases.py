"""Every recipe with the variables it needs, as DRY_RUN=1 prints it in an environment of its own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RECIPES = ROOT / "recipes"
GOLDEN = ROOT / "tests" / "golden" / "recipes"
#: What recipes ask for before anything else.
BASIC = {"DATA_PATH": "/data/text", "TOKENIZER": "/data/tokenizer", "LOAD": "/data/before"}


@dataclass(frozen=True)
class Case:
    """A recipe and variables."""

    model: str
    recipe: str
    #: What tells it from other cases of the recipe; "" for the plain one.
    variant: str = ""
    nodes: int = 1
    variables: dict[str, str] = field(default_factory=dict)
    #: `--schedule` of `nemotron3 flags`.
    phase: str = "none"

    @property
    def name(self) -> str:
        """As in the golden file's."""
        return f"{self.model}-{self.recipe}" + (f"-{self.variant}" if self.variant else "")

    @property
    def script(self) -> Path:
        """The file."""
        return RECIPES / self.model / f"{self.recipe}.sh"

    @property
    def world_size(self) -> int:
        """Ranks it launches."""
        return 1 if self.recipe == "debug_cpu" else 8 * self.nodes


def _of(model: str, pretrain: int, long: int, sft: int) -> list[Case]:
    """The recipes every model has; numbers of nodes of 8 GPUs."""
    steps = {} if model == "ultra" else {"STEPS": "100"}
    batch = {} if model == "ultra" else {"STEPS": "10", "GBS": "6144"}
    tuning = {"nano": {"LR_DECAY_STYLE": "constant"}, "super": {"STEPS": "5000"}, "ultra": {}}[model]
    return [
        Case(model, "pretrain", nodes=pretrain, phase="published"),
        Case(model, "nvfp4", nodes=pretrain, phase="published"),
        Case(model, "proxy", nodes=8, phase="published"),
        Case(model, "proxy", "tiny", variables={"TINY": "1"}),
        Case(
            model,
            "long_context",
            nodes=long,
            variables={} if model == "super" else steps,
            phase="long-context",
        ),
        Case(model, "long_context", "4k", 16, {"PHASE": "4k", **batch}, "long-context-4k"),
        Case(model, "sft", nodes=sft, variables=tuning, phase="sft"),
        Case(model, "debug_cpu"),
    ]


CASES = [
    *_of("nano", 384, 32, 4),
    *_of("super", 384, 16, 8),
    Case("super", "long_context", "2", 16, {"PHASE": "2", "STEPS": "500"}, "long-context-2"),
    Case("super", "sft", "2", 8, {"PHASE": "2", "STEPS": "500"}, "sft-2"),
    *_of("ultra", 768, 64, 24),
    Case("ultra", "sft", "2", 24, {"PHASE": "2"}, "sft-2"),
    Case("super", "boost", nodes=8, variables={"LR": "1e-5"}),
    Case("ultra", "boost", nodes=24, variables={"LR": "1e-5"}),
    Case("super", "proxy", "gb200", 8, {"GPU": "gb200"}, "published"),
]


def run(
    script: Path, variables: dict[str, str], path: str = "", timeout: float = 240, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a recipe with nothing of this process's environment but where programs are.

    Args:
        path: a folder of programs that come before all others.
        folder: where it is run.
    """
    places = [*([path] if path else []), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {
        "PATH": os.pathsep.join(places),
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    return subprocess.run(
        ["bash", str(script)], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout
    )


def command(case: Case) -> list[str]:
    """The words of the command it prints; a problem is an AssertionError with what it said."""
    variables = {"DRY_RUN": "1", **BASIC, **case.variables}
    if case.recipe != "debug_cpu":
        variables |= {"NNODES": str(case.nodes), "MASTER_ADDR": "node0"}
    done = run(case.script, variables)
    assert done.returncode == 0, f"{case.name}: {done.stderr}"
    assert done.stdout.count("\n") == 1, done.stdout
    return shlex.split(done.stdout)


def commands(cases: list[Case]) -> dict[str, list[str]]:
    """The commands of cases, by name."""
    with ThreadPoolExecutor(4) as pool:
        return dict(zip([case.name for case in cases], pool.map(command, cases), strict=True))


def golden_text(words: list[str]) -> str:
    """A command as the golden file has it: an option a line, folders of this machine by name."""
    lines: list[str] = []
    for word in words:
        word = word.replace(str(ROOT), "$ROOT").replace(f"kernels-{os.getuid()}/", "kernels-$UID/")
        starts = word.startswith("--") or word in ("python3", "-m") or (word[:1].isupper() and "=" in word)
        if starts or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines) + "\n"


def arguments(words: list[str]) -> list[str]:
    """What Megatron's parser sees: the words behind the script."""
    return words[next(i for i, word in enumerate(words) if word.endswith(".py")) + 1 :]

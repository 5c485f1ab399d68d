"""The number of ranks of a launch script: options of torchrun, srun and sbatch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megatron_nemotron3.launch.flag import from_first_option, parse

#: Options of sbatch in a script's comments, and the short forms of srun.
_SBATCH = re.compile(r"^#SBATCH[ \t]+(.+)$", re.MULTILINE)
_SHORT = {"-N": "--nodes", "-n": "--ntasks"}
#: Option of sbatch -> variables in which Slurm gives its value to the script.
_SLURM = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
}


def sbatch_options(text: str) -> dict[str, tuple[str, ...]]:
    """Return the options of sbatch in a script's comments."""
    return launcher_options(" ".join(_SBATCH.findall(text)).split())


def slurm_variables(job: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the variables that Slurm sets in a script with these options."""
    return {name: words[0] for option, words in job.items() for name in _SLURM.get(option, ()) if words}


def launcher_options(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return options of torchrun, srun and sbatch, in the spelling with dashes."""
    apart = [part for word in words for part in re.sub(r"^(-[Nn])(\d+)$", r"\1 \2", word).split(" ")]
    long = [_SHORT.get(word, word) for word in apart]
    return {flag.name.replace("_", "-"): flag.values for flag in parse(from_first_option(long))}


def ranks_of(launcher: Mapping[str, tuple[str, ...]], variable: str) -> int | None:
    """Return the number of ranks of a launch."""

    def number(name: str, default: int | None = None) -> int | None:
        words = launcher.get(name)
        return default if words is None else _count("".join(words[:1]))

    per_node, tasks = number("--nproc-per-node"), number("--ntasks-per-node")
    if "--nproc-per-node" in launcher:
        nodes = number("--nnodes", number("--nodes", 1))
    else:
        per_node, nodes = tasks, number("--nodes", 1)
        if per_node is None and "--ntasks" in launcher:
            return number("--ntasks")
    return per_node * nodes if per_node and nodes else _count(variable)


def _count(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdecimal() else None

"""Every NEMOTRON3_* environment variable: one table, and one reader.

The text of a variable is parsed by the part of the package that it configures, which passes its parser to
`EnvironmentSetting`. `SWITCHES` generates the table in docs/environment.md; a test finds names that it lacks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

MONITOR = "NEMOTRON3_MONITOR"
EMULATE = "NEMOTRON3_EMULATE"
LOG_PRECISION = "NEMOTRON3_LOG_PRECISION"
GPU_KERNELS = "NEMOTRON3_GPU_KERNELS"
LORA = "NEMOTRON3_LORA"
BOOST = "NEMOTRON3_BOOST"
DISTILL = "NEMOTRON3_DISTILL"
SFT_MEAN = "NEMOTRON3_SFT_MEAN"
CONVERSATIONS = "NEMOTRON3_CONVERSATIONS"
LOGITS_FOLDER = "NEMOTRON3_LOGITS_FOLDER"
LOGITS_TEACHER = "NEMOTRON3_LOGITS_TEACHER"
SCRIPT = "NEMOTRON3_SCRIPT"
CONTROL = "NEMOTRON3_CONTROL"
PARENT = "NEMOTRON3_PARENT"
LOCK = "NEMOTRON3_LOCK"
TRUST_CHECKPOINT = "NEMOTRON3_TRUST_CHECKPOINT"


class Switch(NamedTuple):
    """A row of the table.

    values: its possible texts. default: the meaning of an unset or empty one.
    setters: options and commands that set it in the processes that they start.
    page: the page of docs/ that explains it; "" for a variable that only this package sets.
    """

    purpose: str
    values: str
    default: str
    setters: str
    page: str = ""


SWITCHES = {
    MONITOR: Switch(
        "interval of the stability monitors",
        "iterations; 0: off",
        "the log interval, at least 10",
        "`--monitor` of `train`; `run` has the same option",
        "monitor.md",
    ),
    EMULATE: Switch(
        "emulated NVFP4 or MXFP8 training",
        "`nvfp4`, `mxfp8` or a recipe of packed weights, then switches such as `,rht=0`; 0: off",
        "off",
        "`--emulate` of `train`; `--nemotron3-emulate` of `run` says the same",
        "nvfp4.md",
    ),
    LOG_PRECISION: Switch(
        "measured quantization errors",
        "iterations, then optionally `:FOLDER`; 0: off",
        "off",
        "`--log-precision` of `train`",
        "nvfp4.md",
    ),
    GPU_KERNELS: Switch(
        "kernels of the torch backend on CUDA",
        "1: also those of emulated training; 0: plain torch",
        "torch's grouped product and packed attention, mamba-ssm's scan and causal-conv1d's convolution "
        "where they are installed",
        "nothing",
        "nvfp4.md",
    ),
    LORA: Switch(
        "LoRA training",
        "`base=FOLDER,dim=16,alpha=32,targets=…`; 1: the defaults",
        "all weights are trained",
        "`finetune`",
        "training.md",
    ),
    BOOST: Switch(
        "training of the MTP heads alone",
        "`loss=kl,temperature=2,mix=1,…`; 1: the defaults",
        "all weights are trained",
        "`train boost`",
        "post_training.md",
    ),
    DISTILL: Switch(
        "distillation",
        "one line per teacher: `kind=kl,…,teacher=FOLDER`; 0: off",
        "off",
        "`--teacher` of `train`; `--nemotron3-teacher` of `run` says the same",
        "post_training.md",
    ),
    SFT_MEAN: Switch(
        "what the loss of fine-tuning is averaged over",
        "`tokens` or `conversations`",
        "tokens",
        "`--mean` of `train`",
        "training.md",
    ),
    CONVERSATIONS: Switch(
        "conversation format, and chat template variables",
        'a JSON list of two strings, such as `["sharegpt", ""]`',
        "detected per row, and none",
        "`--format` and `--chat-template-kwargs` of `train`, `distill logits` and `finetune`",
        "training.md",
    ),
    TRUST_CHECKPOINT: Switch(
        "loading of checkpoints with objects outside the allow-list, which may run code",
        "1: allowed; 0: refused",
        "refused",
        "`--trust-checkpoint` of `train`, `run`, `distill logits` and `train boost`",
        "checkpoints.md",
    ),
    LOGITS_FOLDER: Switch("output folder of the teacher's logits", "a path", "", "`distill logits`"),
    LOGITS_TEACHER: Switch("checkpoint of the teacher", "a path", "", "`distill logits`"),
    SCRIPT: Switch("script that a spawned process belongs to", "a path", "", "`run`"),
    CONTROL: Switch("standard input is the control pipe of the ranks", "1", "", "`train`"),
    PARENT: Switch("process whose end ends a child of a rank", "a process id", "the parent", "each rank"),
    LOCK: Switch("key of the folder lock that the ranks share", "a string", "", "`train`"),
}

T = TypeVar("T")


class EnvironmentSetting(Generic[T]):
    """A setting that a process receives in an environment variable, or a caller sets by a `with` block.

    The variable is read once, when `current` is first called. What changes it later has no effect. A `with`
    block applies to all threads, because autograd runs backward on a GPU in threads of its own.

    Args:
        name: the environment variable, of `SWITCHES`.
        parse: turns its text into a value; "" if it is not set. Raises ValueError for text without meaning.
        once: False: the variable is read each time, because a command sets it in its own process.
    """

    def __init__(self, name: str, parse: Callable[[str], T], *, once: bool = True) -> None:
        if name not in SWITCHES:
            raise KeyError(name)
        self.name, self._parse, self._once = name, parse, once
        self._overrides: list[T] = []

    def read(self, environment: Mapping[str, str] = os.environ) -> T:
        """The variable's value now: for entry points, which refuse bad text early."""
        return self._parse(environment.get(self.name, ""))

    @cached_property
    def _of_process(self) -> T:
        return self.read()

    def current(self) -> T:
        """Value of the innermost `using` block, else of the environment."""
        if self._overrides:
            return self._overrides[-1]
        return self._of_process if self._once else self.read()

    @contextmanager
    def using(self, value: T) -> Iterator[None]:
        """Override the environment inside a `with` block."""
        self._overrides.append(value)
        try:
            yield
        finally:
            self._overrides.pop()


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set a variable inside the block; "" takes it away."""
    before = os.environ.pop(name, None)
    if value:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def megatron_options() -> Any:
    """The parsed options of a Megatron training script; None in any other process."""
    # Looked up, not imported: a training script has imported it and parsed its options before it builds.
    global_vars = sys.modules.get("megatron.training.global_vars")
    try:
        return global_vars.get_args() if global_vars is not None else None
    except AssertionError:  # no options were parsed
        return None

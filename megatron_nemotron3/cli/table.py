"""The commands of `nemotron3`, in the order of its help, and parsers with the texts of this table."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_nemotron3.common.parser import OptionParser


class Command(NamedTuple):
    """One line of the help.

    module: below this package; its `register(commands)` calls `commands.add_parser(name)`, adds the options
        and sets `run`, a function from the options to the exit status. It is imported when the command is
        used, so that the others start without it.
    purpose: a phrase without a full stop, also the first line of the command's own help.
    arguments: those of the example, which runs next to a finished `runs/demo`; a test runs it.
    """

    name: str
    module: str
    purpose: str
    arguments: str

    @property
    def example(self) -> str:
        """A command line, with `nemotron3`."""
        return f"nemotron3 {self.name} {self.arguments}".rstrip()


_COMMANDS = (
    Command("show", "cli.show", "print the sizes of a model, or of a checkpoint's", "super"),
    Command("flags", "launch.command", "print Megatron's options for a model", "super --gpu h100"),
    Command(
        "explain",
        "launch.command",
        "show where every option comes from, and what was published",
        "super --tp 2 --ep 8 --dp 4",
    ),
    Command(
        "precision",
        "precision.command",
        "show the format of every linear layer, or write the precision file",
        "super",
    ),
    Command("doctor", "cli.doctor", "check whether this environment can train", ""),
    Command(
        "plan",
        "launch.plan.command",
        "find the fastest layouts of a model on a number of GPUs",
        "nano --gpus 16 --gpu h100",
    ),
    Command(
        "search",
        "post_training.compress.search_command",
        "find the smaller forms of a model that meet a budget and lose least",
        "super --budget params=75B --vary moe_ffn_hidden_size=1280,1792,2688",
    ),
    Command(
        "certify",
        "proof.certify.command",
        "prove on a CPU that a launch computes what one process computes",
        "super --tp 2 --pp 4 --ep 8 --dp 4",
    ),
    Command(
        "boundary",
        "boundary.command",
        "show which rows travel between the layouts of two modules",
        "--from tp=2,dp=2 --to tp=4",
    ),
    Command(
        "refit",
        "inference.refit.command",
        "plan which weights a trainer's ranks send to an inference engine's",
        "super --from tp=2,ep=8,pp=4 --to tp=8",
    ),
    Command(
        "recipe",
        "cli.recipes",
        "list, print or copy the launch scripts of every model and phase",
        "super pretrain",
    ),
    Command(
        "train",
        "train.command",
        "prepare text, train with Megatron's loop, and report",
        "super --tiny --steps 100",
    ),
    Command(
        "run",
        "run",
        "run a stock Megatron script, on CPU if there is no GPU",
        'pretrain_hybrid.py "${ARGS[@]}"',
    ),
    Command(
        "finetune",
        "post_training.finetune.command",
        "fine-tune a Hugging Face folder on conversations, into a Hugging Face folder",
        "demo-hf --conversations chats.jsonl --output tuned",
    ),
    Command(
        "boost",
        "post_training.boost.command",
        "train the MTP heads of a finished model, so that more drafts are accepted",
        "runs/demo --output runs/boosted",
    ),
    Command(
        "report",
        "cli.report",
        "write losses, monitors, precision and versions of a run to one HTML file",
        "runs/demo",
    ),
    Command(
        "logits",
        "post_training.distill.logits_command",
        "store a teacher's most probable tokens for the rows of a data set",
        "runs/demo --output demo-logits --samples 8 --topk 16",
    ),
    Command("watch", "train.monitor.watch", "plot the monitored series of a run", "runs/demo"),
    Command("check", "checkpoints.check", "check that a checkpoint is complete and undamaged", "runs/demo"),
    Command(
        "convert",
        "checkpoints.convert.command",
        "convert a checkpoint between Megatron and Hugging Face",
        "to-hf runs/demo demo-hf",
    ),
    Command(
        "prune",
        "post_training.compress.command",
        "measure what matters least in a checkpoint, and cut it to smaller sizes",
        "runs/demo --text README.md --sizes mamba_num_heads=8 --output pruned",
    ),
    Command(
        "verify",
        "checkpoints.convert.command",
        "compare two checkpoints tensor by tensor",
        "runs/demo demo-hf",
    ),
    Command(
        "xtoken",
        "post_training.xtoken.command",
        "write and inspect the projection between two tokenizers' vocabularies",
        "runs/demo runs/demo",
    ),
    Command(
        "generate",
        "inference.generate.command",
        "continue prompts with a checkpoint's model",
        '--checkpoint runs/demo --prompt "def main"',
    ),
    Command("chat", "inference.generate.chat", "talk to a checkpoint's model in the terminal", "runs/demo"),
    Command(
        "bisect",
        "proof.bisect.command",
        "say which of a trainer and an engine deviates from their checkpoint, where, and why",
        "--checkpoint runs/demo --trainer trainer.pt --engine engine.pt",
    ),
    Command(
        "evaluate",
        "inference.generate.evaluate_command",
        "measure the loss on other text by MTP depth, and how many drafts are accepted",
        "--checkpoint runs/demo --text README.md",
    ),
)
#: Every command by name.
COMMANDS: dict[str, Command] = {command.name: command for command in _COMMANDS}

#: Examples of the two directions of `convert`.
DIRECTIONS = {
    "convert to-hf": "nemotron3 convert to-hf runs/demo demo-hf",
    "convert from-hf": "nemotron3 convert from-hf demo-hf demo-megatron",
}


class CommandParser(OptionParser):
    """A parser with the example of its command."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        name = self.prog.partition(" ")[2]  # "" for `nemotron3` itself
        self.example = DIRECTIONS.get(name) or (COMMANDS[name].example if name in COMMANDS else "")


class Commands:
    """The argument of every `register`: adds parsers with the texts of the table."""

    def __init__(self, action: Any) -> None:
        self._action = action

    def add_parser(self, name: str, **settings: Any) -> CommandParser:
        command = COMMANDS[name]
        purpose = command.purpose[0].upper() + command.purpose[1:] + "."
        settings = {"description": purpose, **settings, "help": command.purpose}
        return self._action.add_parser(name, **settings)

    def add_name(self, name: str) -> None:
        """Add the name of a command that is not used, for the help."""
        self._action.add_parser(name, help=COMMANDS[name].purpose, add_help=False)

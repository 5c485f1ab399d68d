"""The commands of `nemotron3`, in the order of its help, and parsers with the texts of this table."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_nemotron3.common.parser import OptionParser, hint

#: The variable in which a shell asks for completion.
COMPLETION = "_ARGCOMPLETE"


class Command(NamedTuple):
    """One line of the help.

    name: one word; two for a command of another one ("plan boundary"). The other one may do something itself
        ("plan"), and then takes no argument that is such a word.
    module: below this package; its `register(commands)` calls `commands.add_parser(name)`, adds the options
        and sets `run`, a function from the options to the exit status. It is imported when the command is
        used, so that the others start without it. "": the command is only a group of others.
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
        return f"nemotron3 {self.name} {self.arguments}".rstrip() if self.module else ""

    @property
    def below(self) -> list[Command]:
        """The commands of this one."""
        return [other for name, other in COMMANDS.items() if name.startswith(f"{self.name} ")]

    @property
    def words_below(self) -> list[str]:
        """The second words of the commands of this one."""
        return [other.name.partition(" ")[2] for other in self.below]

    @property
    def help(self) -> str:
        """The purpose, and the words of the commands below."""
        words = ", ".join(self.words_below)
        return self.purpose + (f" ({'also: ' * bool(self.module)}{words})" if words else "")


_COMMANDS = (
    Command("show", "cli.show", "print the sizes of a model or of a checkpoint", "super"),
    Command("flags", "launch.command", "print Megatron's options for a model", "super --gpu h100"),
    Command(
        "explain",
        "launch.command",
        "show the origin of every option, and compare a launch with the published one",
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
        "plan boundary",
        "boundary.command",
        "show the rows exchanged between the layouts of two modules",
        "--from tp=2,dp=2 --to tp=4",
    ),
    Command(
        "plan refit",
        "inference.refit.command",
        "plan the weight transfer from a trainer to an inference engine",
        "super --from tp=2,ep=8,pp=4 --to tp=8",
    ),
    Command(
        "certify",
        "proof.certify.command",
        "prove on a CPU that a launch computes what one process computes",
        "super --tp 2 --pp 4 --ep 8 --dp 4",
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
        "train boost",
        "post_training.boost.command",
        "train the MTP heads of a finished model, so that more drafts are accepted",
        "runs/demo --output runs/boosted",
    ),
    Command(
        "run",
        "run",
        "run a stock Megatron script, on a CPU if there is no GPU",
        'pretrain_hybrid.py "${ARGS[@]}"',
    ),
    Command(
        "finetune",
        "post_training.finetune.command",
        "fine-tune a Hugging Face checkpoint on conversations",
        "demo-hf --conversations chats.jsonl --output tuned",
    ),
    Command(
        "report",
        "cli.report",
        "write losses, monitors, precision and versions of a run to one HTML file",
        "runs/demo",
    ),
    Command("report monitors", "train.monitor.watch", "plot the monitored series of a run", "runs/demo"),
    Command("distill", "", "prepare a distillation", ""),
    Command(
        "distill logits",
        "post_training.distill.logits_command",
        "store the logits of a teacher for the rows of a data set",
        "runs/demo --output demo-logits --samples 8 --topk 16",
    ),
    Command(
        "distill projection",
        "post_training.xtoken.command",
        "write and inspect the projection between two tokenizers' vocabularies",
        "runs/demo runs/demo",
    ),
    Command("check", "checkpoints.check", "check that a checkpoint is complete and undamaged", "runs/demo"),
    Command("convert", "", "convert a checkpoint between Megatron and Hugging Face", ""),
    Command(
        "convert to-hf",
        "checkpoints.convert.command",
        "convert a Megatron checkpoint to a Hugging Face folder",
        "runs/demo demo-hf",
    ),
    Command(
        "convert from-hf",
        "checkpoints.convert.command",
        "convert a Hugging Face folder to a Megatron checkpoint",
        "demo-hf demo-megatron",
    ),
    Command(
        "convert verify",
        "checkpoints.convert.command",
        "compare two checkpoints tensor by tensor",
        "runs/demo demo-hf",
    ),
    Command(
        "prune",
        "post_training.compress.command",
        "prune a checkpoint to smaller sizes by measured importance",
        "runs/demo --text README.md --sizes mamba_num_heads=8 --output pruned",
    ),
    Command(
        "prune search",
        "post_training.compress.search_command",
        "search for smaller variants of a model within a budget",
        "super --budget params=75B --vary moe_ffn_hidden_size=1280,1792,2688",
    ),
    Command(
        "generate",
        "inference.generate.command",
        "generate text with the model of a checkpoint",
        'runs/demo --prompt "def main"',
    ),
    Command("chat", "inference.generate.chat", "chat with the model of a checkpoint", "runs/demo"),
    Command(
        "bisect",
        "proof.bisect.command",
        "find out whether a trainer or an inference engine deviates from the checkpoint, and where",
        "runs/demo --trainer trainer.pt --engine engine.pt",
    ),
    Command(
        "evaluate",
        "inference.generate.evaluate_command",
        "measure the validation loss of each MTP depth, and the acceptance of drafts",
        "runs/demo --text README.md",
    ),
)
#: Every command by name.
COMMANDS: dict[str, Command] = {command.name: command for command in _COMMANDS}

#: Words for commands, and for earlier ones: what they are here, with a note in brackets.
SYNONYMS = {
    "compare": "convert verify",
    "diff": "convert verify",
    "download": "convert from-hf (it takes the id of a repository)",
    "eval": "evaluate",
    "export": "convert to-hf",
    "import": "convert from-hf",
    "infer": "generate",
    "info": "show",
    "lora": "finetune (--lora)",
    "monitor": "report monitors",
    "mtp": "train boost",
    "pretrain": "train",
    "serve": "convert to-hf (inference engines serve its folder)",
    "sft": "finetune",
    "validate": "check",
    "watch": "report monitors",
    "xtoken": "distill projection",
    **{name.partition(" ")[2]: name for name in COMMANDS if " " in name},
}


def command_of(words: Sequence[str]) -> str:
    """Return the name of the command that a command line begins with, or ""."""
    names = (" ".join(words[:2]), *words[:1])
    return next((name for name in names if name in COMMANDS), "")


class CommandParser(OptionParser):
    """A parser with the example of its command, and the commands below it."""

    command_words = SYNONYMS

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._command = COMMANDS.get(self.prog.partition(" ")[2])  # None for `nemotron3` itself
        self.example = self._command.example if self._command is not None else ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if args and self._command is not None and self._subparsers is None:
            self._refuse_misspelt(args[0], self._command.words_below)
        return super().parse_known_args(args, namespace)

    def _refuse_misspelt(self, word: str, below: Sequence[str]) -> None:
        """Refuse what is nearly a command below this one, and no file: so it is no argument either."""
        if not below or word.startswith("-") or "/" in word or os.path.lexists(word):
            return
        if near := hint(word, self.commands_below(below)):
            self.refuse_command(word, near)

    def format_help(self) -> str:
        text = super().format_help()
        if self._command is None or not self._command.module or not self._command.below:
            return text
        listed = self._get_formatter()
        listed.start_section("commands")
        for other in self._command.below:
            listed.add_argument(argparse.Action([], other.name, metavar=other.name, help=other.purpose))
        listed.end_section()
        return f"{text}\n{listed.format_help()}"


class Commands:
    """The argument of every `register`: adds parsers with the texts of the table."""

    def __init__(self, action: Any) -> None:
        #: What adds parsers below a command; "" for `nemotron3` itself.
        self._actions = {"": action}

    def add(self, name: str) -> None:
        """Add a command with its options, or a group with the names of its commands."""
        command = COMMANDS[name]
        if command.module:
            importlib.import_module(f"megatron_nemotron3.{command.module}").register(self)
            if command.below and COMPLETION in os.environ:
                self._offer_below(command)
        else:
            self._below(name)

    def _offer_below(self, command: Command) -> None:
        """Let a shell complete the words of the commands below where the first argument stands."""
        from argcomplete.completers import FilesCompleter

        files, actions = FilesCompleter(), self._actions[""].choices[command.name]._actions
        first = next(action for action in actions if not action.option_strings)
        first.completer = lambda **given: [*command.words_below, *files(**given)]

    def add_names(self) -> None:
        """Add the names of the commands that are not used, for the help."""
        for name, command in COMMANDS.items():
            group, _, word = name.rpartition(" ")
            if group in self._actions and word not in self._actions[group].choices:
                self._actions[group].add_parser(word, help=command.help, add_help=False)

    def add_parser(self, name: str, **settings: Any) -> CommandParser:
        command = COMMANDS[name]
        group, _, word = name.rpartition(" ")
        settings = {"description": _sentence(command.purpose), **settings, "help": command.help}
        parser: CommandParser = self._below(group).add_parser(word, **settings)
        return parser

    def _below(self, group: str) -> Any:
        """What adds parsers below a command."""
        if group not in self._actions:
            command = COMMANDS[group]
            parser = self._actions[""].add_parser(
                group, description=_sentence(command.purpose), help=command.help
            )
            words = "|".join(command.words_below)
            self._actions[group] = parser.add_subparsers(
                title="commands", required=True, metavar=words, parser_class=CommandParser
            )
        return self._actions[group]


def _sentence(purpose: str) -> str:
    return purpose[0].upper() + purpose[1:] + "."

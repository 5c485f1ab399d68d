"""The parsers of the commands, with the texts of the table."""

from __future__ import annotations

from typing import Any

from megatron_nemotron3.cli.table import COMMANDS, DIRECTIONS
from megatron_nemotron3.common import options


class CommandParser(options.OptionParser):
    """A parser with the example of its command."""

    @property
    def example(self) -> str:
        """Return the example in the table; "" for the parser of `nemotron3` itself."""
        name = self.prog.partition(" ")[2]
        return DIRECTIONS.get(name) or (COMMANDS[name].example if name in COMMANDS else "")


class Commands:
    """What `register` of a module gets: adds a parser with the texts of the table."""

    def __init__(self, action: Any) -> None:
        self._action = action

    def add_parser(self, name: str, **settings: Any) -> CommandParser:
        """Return the new parser of a command of the table; `settings` as argparse takes them."""
        command = COMMANDS[name]
        purpose = command.purpose[0].upper() + command.purpose[1:] + "."
        settings = {"description": purpose, **settings, "help": command.purpose}
        parser: CommandParser = self._action.add_parser(name, **settings)
        return parser

    def add_name(self, name: str) -> None:
        """Add the name of a command that is not going to be used."""
        self._action.add_parser(name, help=COMMANDS[name].purpose, add_help=False)

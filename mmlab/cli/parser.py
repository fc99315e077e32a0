"""The parser of `mmlab`, made from the functions in `mmlab.cli.commands`: their parameters are the arguments."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import fields
from inspect import Parameter, signature
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from mmlab import __version__
from mmlab.cli.commands import COMMANDS, bench_io, compare, plan
from mmlab.errors import OptionError, check_numbers


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)  # else `--image` would pass as short for `--images`

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of `mmlab`; its result has `command` (a function), `json`, and the function's arguments."""
    parser = _Parser(prog="mmlab", description="Plan, price and train image-text batches. Begin with: plan.")
    parser.add_argument("--version", action="version", version=f"mmlab {__version__}")
    _add_commands(parser, COMMANDS)
    return parser


def call(options: argparse.Namespace) -> Any:
    """Call the parsed command and return its result.

    Raises:
        OptionError: several ranks of this machine would measure at once, and slow each other down.
    """
    values = dict(vars(options))
    run = values.pop("command")
    if run in (compare, plan, bench_io) and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise OptionError("this command measures in one process: start it once, without torchrun")
    if "json" not in signature(run).parameters:
        del values["json"]
    check_numbers(values, "--")
    return run(**values)


def _add_commands(parser: argparse.ArgumentParser, commands: Mapping[str, Any]) -> None:
    """Add commands by name; a pair of a help text and commands is a group."""
    level = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run in commands.items():
        text, group = run if isinstance(run, tuple) else (run.__doc__, {})
        command = level.add_parser(name, help=text, description=text)
        if group:
            _add_commands(command, group)
            continue
        command.set_defaults(command=run, json=False)  # no parameter of a command is called `command`
        hints = get_type_hints(run, include_extras=True)
        if "json" not in hints and hints["return"] is not NoReturn:
            command.add_argument("--json", action="store_true", help="print one JSON document, not text")
        for parameter in signature(run).parameters.values():
            if parameter.kind is Parameter.VAR_KEYWORD:
                kind = get_args(hints[parameter.name])[1]
                inside = get_type_hints(kind, include_extras=True)
                for option in fields(kind):
                    _add(command, f"--{option.name}", inside[option.name], option.default)
            else:
                dashes = "--" if parameter.kind is Parameter.KEYWORD_ONLY else ""
                _add(command, f"{dashes}{parameter.name}", hints[parameter.name], parameter.default)


def _add(command: argparse.ArgumentParser, name: str, hint: Any, default: Any) -> None:
    """Add a flag, or a positional argument if the name has no dashes.

    Args:
        hint: `Annotated[type, help]`.
    """
    kind, text = get_args(hint)
    required = default is Parameter.empty
    kinds = {part for part in get_args(kind) or [kind] if part is not NoneType}
    details: dict[str, Any] = {"help": text}
    if not required:
        details["default"] = default
        if default not in (None, ()) and default is not False:  # 0 is a default to show, and equals False
            details["help"] += f" (default: {default})"
    if get_origin(kind) is Literal:
        details["choices"] = get_args(kind)
    elif get_origin(kind) is tuple:
        details |= {"action": "append", "default": []}
    elif kinds == {bool}:
        details["action"] = "store_true"
    else:
        readers = {int: int, float: float, str: _not_empty}
        details["type"] = next((read for plain, read in readers.items() if plain in kinds), shares)
    if name.startswith("--"):
        command.add_argument(name.replace("_", "-"), required=required, **details)
    else:
        command.add_argument(name, nargs=None if required else "?", **details)


def _not_empty(given: str) -> str:
    if not given:  # an unset variable of the shell; as a path, it would be the current folder
        raise argparse.ArgumentTypeError("it is empty")
    return given


def shares(text: str) -> dict[str, float]:
    """Shares by name.

    >>> shares("image-text=0.7,text-only=0.3")
    {'image-text': 0.7, 'text-only': 0.3}
    """
    pairs = (part.partition("=") for part in text.split(","))
    return {name.strip(): float(share) for name, _, share in pairs}

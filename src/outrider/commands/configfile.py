"""Settings of servers in a TOML file: `--config FILE`, and what `outrider config` checks and shows.

A section is a command and its keys are the command's options by their own names, so types, ranges
and defaults stand in one place: where the option is declared. What the command line says wins.
"""

from __future__ import annotations

import difflib
import inspect
import re
import stat
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Union, get_args, get_origin

import typer

from outrider.commands.errors import USAGE_ERROR, CommandError, describe

NOT_IN_FILES: Final = frozenset({"_config", "until_eof"})
"""Options of a start, not of a server."""
SECRETS: Final = ("token-file", "api-key-file", "tls-key")
"""Keys whose files others should not read."""

Command = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One key of a section."""

    name: str
    """As in the file and, behind --, on the command line."""
    parameter: str
    kind: type
    many: bool
    """A list of values."""
    default: Any
    """None where there is none; REQUIRED where one must be given."""

    def fits(self, value: object) -> bool:
        """The value has the key's TOML type."""
        if self.many:
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        if self.kind is float:
            return isinstance(value, int | float) and not isinstance(value, bool)
        if self.kind in (bool, int):
            return type(value) is self.kind
        return isinstance(value, str)

    @property
    def wants(self) -> str:
        words = {bool: "true or false", int: "a whole number", float: "a number"}
        return "a list of strings" if self.many else words.get(self.kind, "a string")


REQUIRED: Final = inspect.Parameter.empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something in a file that is not right."""

    line: int | None
    text: str
    serious: bool = True
    """The file cannot be used; otherwise it is a warning."""

    def __str__(self) -> str:
        return self.text if self.line is None else f"line {self.line}: {self.text}"


def settings(command: Command) -> dict[str, Setting]:
    """The keys of a command's section, by name."""
    found = (
        _setting(parameter)
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name not in NOT_IN_FILES
    )
    return {setting.name: setting for setting in found}


def _setting(parameter: inspect.Parameter) -> Setting:
    kind = parameter.annotation
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (part for part in get_args(kind) if part is not types.NoneType)
    many = get_origin(kind) is list
    return Setting(
        name=parameter.name.replace("_", "-"),
        parameter=parameter.name,
        kind=get_args(kind)[0] if many else kind,
        many=many,
        default=parameter.default,
    )


def faults(path: Path, sections: Mapping[str, Command]) -> list[Fault]:
    """Everything that is wrong with a file, in its order. Raises OSError."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return [Fault(line=None, text=f"not TOML: {error}")]
    text = path.read_text(encoding="utf-8")
    made: list[Fault] = []
    for name, values in found.items():
        line = _line(text, name, None)
        if name not in sections:
            made.append(Fault(line=line, text=f"no section [{name}]{_nearest(name, sections)}"))
        elif not isinstance(values, dict):
            made.append(Fault(line=line, text=f"[{name}] is a section, not a value"))
        else:
            made += _section_faults(path, text, name, values, sections[name])
    return sorted(made, key=lambda fault: fault.line or 0)


def _section_faults(
    path: Path, text: str, section: str, values: Mapping[str, Any], command: Command
) -> Iterator[Fault]:
    known = settings(command)
    for name, value in values.items():
        line = _line(text, section, name)
        setting = known.get(name)
        if setting is None:
            yield Fault(line=line, text=f"[{section}] has no {name}{_nearest(name, known)}")
        elif not setting.fits(value):
            yield Fault(line=line, text=f"{name} is {setting.wants}")
        else:
            said = _refusal(command, setting, _placed(setting, value, path.parent))
            if said is not None:
                yield Fault(line=line, text=said)
            elif name in SECRETS and _open_to_others(path.parent / value):
                words = f"{name}: others can read {value}: chmod 600 {value}"
                yield Fault(line=line, text=words, serious=False)


def _refusal(command: Command, setting: Setting, value: Any) -> str | None:
    """What the option itself says against the value."""
    app = typer.Typer(add_completion=False)
    app.command()(command)
    made = typer.main.get_command(app)
    (option,) = (p for p in made.params if p.name == setting.parameter)
    try:
        option.process_value(typer.Context(made), value)
    except USAGE_ERROR as error:
        shown = describe(error)
        assert shown is not None, "a usage error has a line"
        said = shown[0].removeprefix(f"Invalid value for '--{setting.name}': ").rstrip(".")
        return f"{setting.name}: {said}"
    return None


def load(path: Path, section: str, command: Command) -> dict[str, Any]:
    """What a file sets for a command, by parameter: as typer takes it for defaults. Paths are
    relative to the file. Raises CommandError for the first serious fault, OSError."""
    serious = [fault for fault in faults(path, {section: command}) if fault.serious]
    # Other commands' sections are theirs to check.
    own = [fault for fault in serious if "no section [" not in fault.text]
    if own:
        raise CommandError(f"--config: {path} {own[0]}")
    values = tomllib.loads(path.read_text(encoding="utf-8")).get(section, {})
    known = settings(command)
    return {
        known[name].parameter: _placed(known[name], value, path.parent)
        for name, value in values.items()
    }


def _placed(setting: Setting, value: Any, folder: Path) -> Any:
    return str(folder / value) if setting.kind is Path else value


def _nearest(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
    return f": did you mean {near[0]}?" if near else f": there is {', '.join(known)}"


def _line(text: str, section: str, key: str | None) -> int | None:
    """Where a section begins or a key of it stands; None where it is written otherwise."""
    current = None
    for number, line in enumerate(text.splitlines(), start=1):
        head = re.match(r"\s*\[\s*\"?([^\]\"]+?)\"?\s*\]", line)
        word = re.match(r"\s*\"?([\w-]+)", line)
        if head:
            current = head[1]
        if key is None and section in (current, word and word[1]):
            return number
        if key is not None and current == section and word and word[1] == key:
            return number
    return None


def _open_to_others(path: Path) -> bool:
    return path.exists() and bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


# -- for the commands ----------------------------------------------------------------------------


def _taken(context: typer.Context, file: Path | None) -> Path | None:
    """Before any other option is looked at: its defaults are the file's."""
    if file is not None and context.info_name is not None:
        command = context.command.callback
        assert command is not None, "a command runs something"
        command = getattr(command, "__wrapped__", command)
        context.default_map = load(file, str(context.command.name), command)
    return file


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        is_eager=True,
        callback=_taken,
        help="Take options from this TOML file, section by the command's name; those given here "
        "win. outrider config check FILE looks it over.",
        show_default=False,
    ),
]

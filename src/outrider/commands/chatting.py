"""A conversation in the terminal: messages, settings, commands, and what is shown of an answer.

Reads no keys and knows no model: lines come in by `take`, answers come from a voice.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.commands.demotable import COLOURS, legend
from outrider.commands.errors import CommandError
from outrider.commands.linkline import LinkLine
from outrider.commands.voices import Voice
from outrider.core.tokens import Origin
from outrider.runtime.contact import Contact

SAMPLING: Final = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
MAKING: Final = (
    *("objective", "schedule", "controller", "draft_length", "window", "growth"),
    *("verify", "rule", "threshold", "budget"),
)
"""Of the request's `outrider` object."""
SETTINGS: Final = (*SAMPLING, *MAKING, "system")
CUES: Final = {
    Origin.DRAFT: "",
    Origin.CORRECTION: " underline",
    Origin.BONUS: " bold",
    Origin.TARGET: " dim",
    Origin.RELAXED: " italic",
    Origin.TRUNCATED: " underline bold",
}
"""Beside the colour, for eyes that tell colours apart badly."""
COMMANDS: Final = {
    "/set": "show the settings",
    "/set NAME VALUE": "change one from the next message on; without VALUE: as it was at first",
    "/stats": "what the last answer and this chat took",
    "/compare NAME=VALUE ...": "answer the last message again so, with the same seed",
    "/legend": "who wrote the last answer's tokens, by colour",
    "/new": "forget the conversation",
    "/help": "this list",
    "/quit": "leave; so does Ctrl-C or Ctrl-D where nothing is being answered",
}
DEFAULTS: Final[Mapping[str, Any]] = {"temperature": 0.7, "max_tokens": 256}
"""As `outrider generate`."""
_UNSAFE: Final = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
"""Characters by which a model's text could steer a terminal."""


@dataclass(slots=True)
class Turn:
    """One answer, as far as it came."""

    body: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    ways: list[float] = field(default_factory=list)
    """Seconds of round trips."""
    account: Mapping[str, Any] | None = None


class Chat:
    """See the module docstring."""

    def __init__(
        self, voice: Voice, model: str, out: Console, *, settings: Mapping[str, Any] | None = None
    ) -> None:
        self._voice = voice
        self._model = model
        self._out = out
        self._first = {**DEFAULTS, **(settings or {})}
        self.settings: dict[str, Any] = dict(self._first)
        self.messages: list[dict[str, str]] = []
        self.turns: list[Turn] = []
        for name in self._first:
            _known(name)
        self._voice.check(self._body(self._first, [{"role": "user", "content": "?"}]))

    async def take(self, line: str) -> bool:
        """A message or a command; False: leave. What is wrong is said, never raised."""
        text = line.strip()
        if not text:
            return True
        try:
            if not text.startswith("/"):
                await self._message(text)
                return True
            return await self._command(*text.split(maxsplit=1))
        except CommandError as error:
            self._say(f"error: {error}", "red")
        return True

    # ---------------------------------------------------------------- commands

    async def _command(self, name: str, rest: str = "") -> bool:
        match name:
            case "/quit" | "/exit":
                return False
            case "/set":
                self._set(rest)
            case "/stats":
                self._stats()
            case "/compare":
                await self._compare(rest)
            case "/legend":
                self._legend()
            case "/new":
                self.messages, self.turns = [], []
                self._say("A new chat.", "dim")
            case "/help":
                self._help()
            case _:
                raise CommandError(f"no command {name}; /help lists them")
        return True

    def _set(self, rest: str) -> None:
        name, _, value = rest.strip().partition(" ")
        if not name:
            for known, chosen in self.settings.items():
                self._say(f"{known} {chosen}")
            others = ", ".join(known for known in SETTINGS if known not in self.settings)
            self._say(f"not set: {others}", "dim")
            return
        changed = _changed(self.settings, {name: _valued(name, value)}, self._first)
        self._voice.check(self._body(changed, [{"role": "user", "content": "?"}]))
        self.settings = changed

    async def _compare(self, rest: str) -> None:
        if not self.turns:
            raise CommandError("there is no answer yet to compare with: ask something first")
        wished = dict(_pair(item) for item in rest.split())
        if not wished:
            raise CommandError("give what is to be different, as in /compare schedule=cloud-only")
        before = self.turns[-1]
        settings = _changed(self.settings, wished, self._first)
        settings["seed"] = before.body["seed"]
        question = [m for m in before.body["messages"] if m["role"] != "system"]
        body = self._body(settings, question)
        self._voice.check(body)
        turn = await self._answer(body)
        self._say(_verdict(before.ids, turn.ids), "bold")

    def _legend(self) -> None:
        if not self.turns:
            raise CommandError("there is no answer yet: ask something first")
        self._out.print(legend(self.turns[-1].origins, coloured=self._coloured))

    def _help(self) -> None:
        table = Table.grid(padding=(0, 2))
        for name, meaning in COMMANDS.items():
            table.add_row(Text(name), Text(meaning, style="dim"))
        self._out.print(table)
        self._say(f"settings: {', '.join(SETTINGS)} (docs/api.md)", "dim")

    def _stats(self) -> None:
        known = [turn for turn in self.turns if turn.account]
        if not known:
            raise CommandError("there is no whole answer yet: ask something first")
        table = Table.grid(padding=(0, 2))
        table.add_row("", Text("last answer", style="bold"), Text("this chat", style="bold"))
        columns = [stats(known[-1:]), stats(known)]
        for name in columns[0]:
            table.add_row(Text(name, style="dim"), *(column[name] for column in columns))
        self._out.print(table)

    # ---------------------------------------------------------------- messages

    async def _message(self, text: str) -> None:
        settings = {"seed": secrets.randbelow(2**32), **self.settings}
        body = self._body(settings, [*self.messages, {"role": "user", "content": text}])
        turn = await self._answer(body)
        if not turn.ids:
            return
        self.turns.append(turn)
        self.messages.append({"role": "user", "content": text})
        self.messages.append({"role": "assistant", "content": "".join(turn.text)})

    async def _answer(self, body: dict[str, Any]) -> Turn:
        """Ask and show; Ctrl-C stops it, and what came stays."""
        turn = Turn(body=body)
        work = asyncio.ensure_future(self._stream(turn))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, work.cancel)
        note = ""
        try:
            await work
        except asyncio.CancelledError:
            if not work.cancelled():
                raise
            note = " · stopped"
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            if turn.ids:
                self._out.print()
        turn.account = self._voice.account
        self._say(_line(turn) + note, "dim")
        return turn

    async def _stream(self, turn: Turn) -> None:
        with LinkLine() as line:
            line.wait()
            await self._show_all(turn, line)

    async def _show_all(self, turn: Turn, line: LinkLine) -> None:
        async with aclosing(self._voice.ask(turn.body)) as parts:  # type: ignore[type-var]
            async for part in parts:
                if isinstance(part, Contact):
                    line.show(part, within=bool(turn.text) and not turn.text[-1].endswith("\n"))
                    continue
                line.clear()
                turn.ids += part.ids
                turn.text += part.pieces
                turn.origins += part.origins
                turn.ways += [] if part.network_s is None else [part.network_s]
                for piece, origin in zip(part.pieces, part.origins, strict=True):
                    self._show(piece, origin)

    def _body(
        self, settings: Mapping[str, Any], messages: Sequence[Mapping[str, str]]
    ) -> dict[str, Any]:
        system = str(settings.get("system", ""))
        head = [{"role": "system", "content": system}] if system else []
        body: dict[str, Any] = {"model": self._model, "messages": [*head, *messages]}
        body |= {name: settings[name] for name in SAMPLING if name in settings}
        making = {name: settings[name] for name in MAKING if name in settings}
        return body | ({"outrider": making} if making else {})

    # ---------------------------------------------------------------- showing

    @property
    def _coloured(self) -> bool:
        return self._out.is_terminal and not self._out.no_color

    def _show(self, piece: str, origin: Origin) -> None:
        style = COLOURS[origin] + CUES[origin] if self._out.is_terminal else ""
        text = piece.translate(_UNSAFE) if self._out.is_terminal else piece
        self._out.print(Text(text, style=style), end="", soft_wrap=True)

    def _say(self, text: str, style: str = "") -> None:
        self._out.print(Text(text, style=style), soft_wrap=True)


def parsed(value: str) -> Any:
    """A setting's value: a number where it is one, else text; None: nothing was given."""
    if not value.strip():
        return None
    try:
        number = json.loads(value)
    except ValueError:
        return value.strip()
    return number if isinstance(number, int | float) else value.strip()


def _pair(item: str) -> tuple[str, Any]:
    name, equals, value = item.partition("=")
    if not equals:
        raise CommandError(f"{item!r} is not NAME=VALUE, as in schedule=cloud-only")
    return name, _valued(name, value)


def _valued(name: str, value: str) -> Any:
    """As `parsed`; a system prompt is text even where it looks like a number."""
    return (value.strip() or None) if name == "system" else parsed(value)


def settings_of(items: Sequence[str]) -> dict[str, Any]:
    """--set NAME=VALUE, each. Raises CommandError."""
    pairs = dict(_pair(item) for item in items)
    for name in pairs:
        _known(name)
    return {name: value for name, value in pairs.items() if value is not None}


def _known(name: str) -> None:
    if name not in SETTINGS:
        raise CommandError(f"no setting {name!r}; there are {', '.join(SETTINGS)}")


def _changed(
    settings: Mapping[str, Any], wished: Mapping[str, Any], first: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings with what is wished; None puts one back as it was at first."""
    changed = dict(settings)
    for name, value in wished.items():
        _known(name)
        value = first.get(name) if value is None else value
        if value is None:
            changed.pop(name, None)
        else:
            changed[name] = value
    return changed


def _verdict(one: Sequence[int], other: Sequence[int]) -> str:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"different from token {place + 1} on"
    if len(one) != len(other):
        return f"identical for {min(len(one), len(other))} tokens, where one ends"
    return f"identical: {len(one)} tokens"


def _line(turn: Turn) -> str:
    """One line under an answer."""
    if not turn.account:
        return f"{len(turn.ids)} tokens · seed {turn.body['seed']}"
    found = stats([turn])
    parts = [f"{found['tokens']} tokens"]
    if found["guesses accepted"] != "-":
        parts.append(f"{found['guesses accepted']} of guesses accepted")
    parts.append(f"{found['target calls a token']} target calls a token")
    if found["ms a token"] != "-":
        parts.append(f"{found['ms a token']} ms a token")
    return " · ".join((*parts, f"seed {turn.body['seed']}"))


def stats(turns: Sequence[Turn]) -> dict[str, str]:
    """What these answers took together, by name. Each has an account."""
    accounts = [turn.account for turn in turns if turn.account]

    def total(name: str) -> float:
        return float(sum(account[name] or 0 for account in accounts))

    tokens, drafted = total("completion_tokens"), total("drafted")
    paces = [
        (account["timing"]["tpot_s"], account["completion_tokens"])
        for account in accounts
        if account["timing"]["tpot_s"] is not None
    ]
    ways = sorted(way for turn in turns for way in turn.ways)
    relaxed = sum(turn.origins.count(Origin.RELAXED) for turn in turns)
    weight = sum(count for _, count in paces)

    def each(value: float, digits: int) -> str:
        return f"{value / tokens:.{digits}f}" if tokens else "-"

    return {
        "tokens": f"{tokens:.0f}",
        "guesses accepted": f"{total('accepted') / drafted:.0%}" if drafted else "-",
        "target calls a token": each(total("rounds"), 2),
        "ms a token": f"{1e3 * sum(s * n for s, n in paces) / weight:.0f}" if weight else "-",
        "round trip, ms (median)": f"{1e3 * ways[len(ways) // 2]:.1f}" if ways else "-",
        "bytes up a token": each(total("bytes_up"), 0),
        "bytes down a token": each(total("bytes_down"), 0),
        "relaxed tokens": str(relaxed),
    }

"""`outrider doctor --cloud`: can this verifier be used from here, and how far away is it?"""

from __future__ import annotations

import asyncio
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.markup import escape

from outrider.commands import console, specs
from outrider.commands.errors import FAILED
from outrider.commands.remote import bearer_token, must_resolve

if TYPE_CHECKING:
    from outrider.runtime.probe import Probe

CLOCK_S: Final = 5.0
"""A clock that is off by more spoils the reading of two logs side by side, and in the end
certificates."""
THIN_MBIT: Final = 0.1
"""Less upwards, and drafts queue before they leave: 32 bytes take 3 ms."""


def look(
    url: str,
    target: str,
    token_file: Path | None,
    ca_file: Path | None,
    *,
    insecure: bool,
    as_json: bool,
) -> None:
    """Ask, show, and raise Exit where it cannot be used."""
    from outrider.engines.load import load_vocabulary
    from outrider.runtime.dialling import greeting
    from outrider.runtime.edgeconfig import EdgeConfig
    from outrider.runtime.probe import probe

    specs.refuse_bare("--target", target)
    config = EdgeConfig(
        url=url,
        token=bearer_token(token_file),
        ca_file=str(ca_file) if ca_file else None,
        insecure=insecure,
    )
    must_resolve(url)
    with console.waiting(f"loading the tokenizer of {target}"):
        vocabulary = load_vocabulary(target)
    own = vocabulary.tokenizer.fingerprint
    with console.waiting("asking the verifier"):
        hello = greeting(vocabulary.tokenizer, vocabulary.model.info.context_length)
        found = asyncio.run(probe(config, hello))
    same = found.fingerprint == own if found.fingerprint else None
    usable = not found.fault and same is True
    if as_json:
        said = {"same_vocabulary": same, "advice": advice(found), "ok": usable}
        console.print_json(_finite(asdict(found)) | said)
    else:
        _show(found, same)
    if not usable:
        raise typer.Exit(FAILED)


def advice(found: Probe) -> str:
    """One line: what the link means for an answer. Empty where nothing was measured."""
    if found.rtt_ms is None:
        return ""
    if found.up_mbit is not None and found.up_mbit < THIN_MBIT:
        return "a thin uplink: guesses queue before they leave; a small --window, or cloud-only"
    if found.forward_ms is None:
        return "outrider plan compares the schedules for such a link"
    if found.rtt_ms <= found.forward_ms:
        return "a round trip takes no longer than a forward: any schedule does"
    return (
        f"a round trip takes {found.rtt_ms / found.forward_ms:.1f} forwards: freerun hides it, "
        "sync would wait for it every round; outrider plan compares them"
    )


def _finite(facts: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a bandwidth that was too large to tell is null."""
    return {
        key: None if isinstance(value, float) and math.isinf(value) else value
        for key, value in facts.items()
    }


def _show(found: Probe, same: bool | None) -> None:
    out = console.facts()
    for name, value in _rows(found, same):
        out.print(f"[bold]{name:<12}[/bold]{escape(value)}", soft_wrap=True)
    out.print()
    if found.fault:
        out.print(f"[red]no use[/red]      {escape(found.fault)}", soft_wrap=True)
    elif not same:
        out.print("[red]no use[/red]      give the --target that it serves", soft_wrap=True)
    else:
        out.print(f"[green]ready[/green]       {escape(advice(found))}", soft_wrap=True)


def _rows(found: Probe, same: bool | None) -> list[tuple[str, str]]:
    rows = [("reachable", "yes" if found.reachable else "no")]
    if found.login is not None:
        rows.append(("login", "accepted" if found.login else "refused: --token-file"))
    if found.clock_s is not None:
        off = abs(found.clock_s) > CLOCK_S
        words = f"{found.clock_s:+.1f} s ahead of this one; set one of them" if off else "the same"
        rows.append(("clock", words))
    if same is not None:
        rows.append(("model", found.model))
        rows.append(("vocabulary", "the same" if same else "another one than --target's"))
    if found.forward_ms is not None:
        rows.append(("forward", f"{found.forward_ms:.1f} ms over one row, as it says"))
    if found.rtt_ms is not None and found.worst_rtt_ms is not None:
        rows.append(("round trip", f"{found.rtt_ms:.1f} ms, at worst {found.worst_rtt_ms:.1f}"))
    rows += [
        (name, _speed(value))
        for name, value in (("up", found.up_mbit), ("down", found.down_mbit))
        if value is not None
    ]
    return rows


def _speed(mbit: float) -> str:
    return "faster than can be told" if math.isinf(mbit) else f"at least {mbit:.3g} Mbit/s"

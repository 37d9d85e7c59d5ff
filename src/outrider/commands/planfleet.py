"""What `outrider plan --per-token-ms` shows: how many verifiers so many edges need."""

from __future__ import annotations

from typing import Any

from outrider.commands import console
from outrider.plan.facts import Facts
from outrider.plan.replicas import BATCH_ROWS, SLOTS, Fleet, fleets


def as_json(facts: Facts, edges: int, seconds: float) -> dict[str, Any]:
    """`verifiers` of the one object of `--json`."""
    return {
        "edges": edges,
        "ms_per_token": 1e3 * seconds,
        "ways": [_row(found) for found in fleets(facts, edges=edges, seconds=seconds)],
    }


def _row(found: Fleet) -> dict[str, Any]:
    return {
        "name": found.estimate.schedule.value,
        "length": found.estimate.length,
        "verifiers": found.verifiers,
        "edges_per_verifier": found.edges,
        "answers_planned_for": found.share.answers,
        "answers_per_forward": found.share.batch,
        "ms_per_forward": 1e3 * found.share.forward,
        "ms_per_token": 1e3 * found.share.seconds,
    }


def show(facts: Facts, edges: int, seconds: float, *, explain: bool) -> None:
    """The fewest verifiers of each way to decode; with `explain` why not fewer."""
    out = console.facts()
    out.print()
    found = fleets(facts, edges=edges, seconds=seconds)
    wanted = f"{edges} edges at {1e3 * seconds:g} ms per token"
    if not found:
        out.print(f"{wanted}: no number of verifiers is enough; see ms above.", soft_wrap=True)
        return
    out.print(f"verifiers for {wanted}:", markup=False, soft_wrap=True)
    for each in sorted(found, key=lambda f: f.verifiers):
        out.print(_line(each), markup=False, soft_wrap=True)
        if explain:
            for line in _explained(each, facts, seconds):
                out.print(line, markup=False, soft_wrap=True)
    out.print(
        "Schedules that run ahead guess less under load: outrider simulate --scale. At most "
        f"{SLOTS} answers a verifier (--slots), {BATCH_ROWS} rows a forward (--batch-rows).",
        soft_wrap=True,
    )


def _line(found: Fleet) -> str:
    way = found.estimate.schedule.value
    way += f" (K {found.estimate.length})" if found.estimate.length else ""
    return (
        f"{found.verifiers:>6}  {way}: up to {found.edges} edges each, "
        f"{found.share.batch:.1f} answers in a forward of {1e3 * found.share.forward:.4g} ms, "
        f"{1e3 * found.share.seconds:.1f} ms per token"
    )


def _explained(found: Fleet, facts: Facts, seconds: float) -> list[str]:
    each = found.estimate.forwards
    lines = [
        f"        c x forwards <= wanted, at E + sqrt(E) = {found.share.answers} answers of "
        f"E = {found.edges * facts.requests}",
        f"        {1e3 * found.share.cycle:.4g} x {each:.3g} = {1e3 * found.share.seconds:.4g} <= "
        f"{1e3 * seconds:g}",
    ]
    if found.more is not None:
        lines.append(
            f"        one edge more: {1e3 * found.more.cycle:.4g} x {each:.3g} = "
            f"{1e3 * found.more.seconds:.4g}"
        )
    return lines

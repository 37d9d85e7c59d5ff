"""Two runs beside each other: which differences are more than noise. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.bench.figures import Estimate, answers_of, bootstrap, median, paired
from outrider.bench.journal import Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An arm at a point, in both runs."""

    point: str
    data: str
    arm: str
    answers: int
    """In both runs: the same question and seed."""
    ratio: Estimate | None
    """Times as fast in the second as in the first, median over answers; None: none in both."""

    @property
    def beyond_noise(self) -> bool:
        """The interval leaves 1 out."""
        ratio = self.ratio
        if ratio is None or ratio.low is None or ratio.high is None:
            return False
        return ratio.low > 1.0 or ratio.high < 1.0


Group = tuple[str, str, str]


def _groups(cells: Sequence[Cell]) -> dict[Group, list[Cell]]:
    found: dict[Group, list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.key.point, cell.key.data, cell.key.arm), []).append(cell)
    return found


def changes(first: Sequence[Cell], second: Sequence[Cell]) -> tuple[list[Change], list[Group]]:
    """What both runs have, and the groups that only one has."""
    a, b = _groups(first), _groups(second)
    found = []
    for key in a:
        if key in b:
            ratios = paired(answers_of(b[key]), answers_of(a[key]))
            found.append(
                Change(
                    point=key[0],
                    data=key[1],
                    arm=key[2],
                    answers=len(ratios),
                    ratio=bootstrap(ratios, median) if len(ratios) else None,
                )
            )
    return found, sorted(set(a) ^ set(b))

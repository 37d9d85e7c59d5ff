"""Small regressions that forget: drafting time on tokens, network time on bytes.

Both keep weighted means and centred second moments (West 1979), pull their slopes towards a prior
by ridge regression, and never return a negative one. Constants are our defaults.
"""

from __future__ import annotations

from typing import Final

FORGET: Final = 0.98
"""Weight kept a round: about the last 50 count."""
TELLING: Final = 0.5
"""Tokens off the mean from which a drafting job tells its start-up and its tokens apart. What is
known of that fades with such jobs alone: a length is held for long, and those that differ are
few."""
COUNT_PRIOR: Final = 1.0
"""Squared tokens of spread that the prior of a draft token's time is worth."""
BYTE_PRIOR: Final = 10 * 4096.0**2
"""Squared bytes of spread that the prior of a byte's time is worth: ten frames 4 KiB apart. Hot
frames differ by some twenty bytes, from which nothing can be learnt under jitter."""
MAX_BYTE_SECONDS: Final = 1e-3
"""Slowest link believed: 8 kb/s."""


class DraftTimes:
    """Seconds of a drafting job by tokens: start + count * each.

    One count alone cannot tell the two apart: then all of it counts as `each`.
    """

    __slots__ = ("_default", "_sxx", "_sxy", "_weight", "_x", "_y")

    def __init__(self, default: float) -> None:
        """`default`: seconds a token while nothing is known."""
        self._default = default
        self._weight = self._x = self._y = self._sxx = self._sxy = 0.0

    def observe(self, count: int, seconds: float) -> None:
        self._weight = self._weight * FORGET + 1.0
        dx, dy = count - self._x, seconds - self._y
        self._x += dx / self._weight
        self._y += dy / self._weight
        kept = FORGET if abs(dx) >= TELLING else 1.0
        self._sxx = self._sxx * kept + dx * (count - self._x)
        self._sxy = self._sxy * kept + dx * (seconds - self._y)

    @property
    def each(self) -> float:
        """t_d, seconds a token."""
        if not self._weight:
            return self._default
        most = self._y / self._x  # with no start-up part
        slope = (self._sxy + COUNT_PRIOR * most) / (self._sxx + COUNT_PRIOR)
        return max(0.0, min(most, slope))

    @property
    def start(self) -> float:
        """Seconds before the first token."""
        return max(0.0, self._y - self.each * self._x)


class ByteTimes:
    """Seconds a byte takes, up and down, from network times of frames of unequal size."""

    __slots__ = ("_m", "_prior", "_s", "_weight")

    def __init__(self, up: float, down: float) -> None:
        """Priors, seconds a byte."""
        self._prior = (up, down)
        self.restart()

    def restart(self) -> None:
        """The link has changed: what is known so far becomes the prior."""
        if hasattr(self, "_s"):
            self._prior = self.slopes()
        self._weight = 0.0
        self._m = [0.0, 0.0, 0.0]  # means of up, down, seconds
        self._s = [0.0] * 5  # up*up, up*down, down*down, up*seconds, down*seconds

    def observe(self, up: float, down: float, seconds: float) -> None:
        self._weight = self._weight * FORGET + 1.0
        x = (up, down, seconds)
        d = [x[i] - self._m[i] for i in range(3)]
        self._m = [m + e / self._weight for m, e in zip(self._m, d, strict=True)]
        r = [x[i] - self._m[i] for i in range(3)]
        products = (d[0] * r[0], d[0] * r[1], d[1] * r[1], d[0] * r[2], d[1] * r[2])
        self._s = [s * FORGET + p for s, p in zip(self._s, products, strict=True)]

    def slopes(self) -> tuple[float, float]:
        """(up, down), seconds a byte, each in [0, MAX_BYTE_SECONDS]."""
        uu, ud, dd, uy, dy = self._s
        a, b = uu + BYTE_PRIOR, dd + BYTE_PRIOR
        p, q = uy + BYTE_PRIOR * self._prior[0], dy + BYTE_PRIOR * self._prior[1]
        det = a * b - ud * ud
        up, down = (p * b - q * ud) / det, (q * a - p * ud) / det
        # A negative slope is none: the other then explains alone.
        if up < 0.0:
            up, down = 0.0, q / b
        elif down < 0.0:
            up, down = p / a, 0.0
        return _bounded(up), _bounded(down)


def _bounded(slope: float) -> float:
    return max(0.0, min(MAX_BYTE_SECONDS, slope))

"""Whether to speculate at all: hysteresis, and probing while it is off."""

from __future__ import annotations

from typing import Final

from outrider.control.base import ControllerFacts

STRIKES: Final = 2
"""Decisions in a row that must disagree with the present state (two strikes as in AWC,
arXiv 2511.21669; docs/papers.md, 6)."""
PROBE: Final = 1.0 / 8.0
"""Most rounds that are probes while speculation is off (our default)."""
BURDEN: Final = 0.01
"""Most time that probes may cost beside the cloud alone (our default): I8 allows 3 % in all."""
GRACE: Final = 16
"""Verdicts before acceptance as it was seen is a reason to stop (our default). With fewer it is
one only if hope does not pay either: a cloud that streams alone learns nothing of drafts."""
LEAST_BURDEN: Final = 1e-4
GATE_OPTIONS: Final = ("strikes", "probe", "burden", "always")


class Gate:
    """On or off, by what the model says round after round.

    Options: `strikes`; `probe`, the share of rounds that speculate all the same while it is off,
    so that an improvement is noticed (0: none); `burden`, the share of time that probes may cost,
    which makes dear probes rarer; `always` = 1: never off. `dwell`: rounds that a state lasts at
    least.

    `speculate` asks and changes nothing that a second question would see; `round_ended` counts.
    """

    def __init__(
        self,
        *,
        strikes: int = STRIKES,
        probe: float = PROBE,
        burden: float = BURDEN,
        always: bool = False,
        dwell: int = 0,
    ) -> None:
        self._strikes = strikes
        self._probe = probe
        self._burden = burden
        self._always = always
        self._dwell = dwell
        self._on = True
        self._against = 0
        self._since = dwell  # the first change need not wait
        self._idle = 0
        self._worth: bool | None = None

    @classmethod
    def from_facts(cls, facts: ControllerFacts, *, dwell: int) -> Gate:
        """Raises ParameterError for an option out of range."""
        return cls(
            strikes=round(facts.option("strikes", STRIKES, 1, 1000)),
            probe=facts.option("probe", PROBE, 0.0, 1.0),
            burden=facts.option("burden", BURDEN, LEAST_BURDEN, 1.0),
            always=facts.option("always", 0, 0, 1) > 0,
            dwell=dwell,
        )

    @property
    def may_stop(self) -> bool:
        """False: never off."""
        return not self._always

    def begin(self, *, on: bool) -> None:
        """Where to begin, before the first question: what is known then needs no strikes."""
        self._on = on or self._always

    def speculate(self, *, worth: bool, excess: float) -> bool:
        """`worth`: the model says that it pays now. `excess`: plain steps lost by a probe."""
        self._worth = worth
        return self._settled() or self._probing(excess)

    def round_ended(self, *, speculated: bool) -> None:
        """The round of the last question ended; with or without drafts."""
        if self._worth is None:
            return
        on = self._settled()
        if on != self._on:
            self._on, self._against, self._since, self._idle = on, 0, 0, 0
        else:
            self._against = self._against + 1 if self._worth != self._on else 0
        self._since += 1
        self._idle = 0 if on or speculated else self._idle + 1
        self._worth = None

    def _settled(self) -> bool:
        """The state, this round's word included."""
        if self._always:
            return True
        struck = self._worth != self._on and self._against + 1 >= self._strikes
        return self._on != (struck and self._since >= self._dwell)

    def _probing(self, excess: float) -> bool:
        # A probe may cost `excess` plain steps: so many plain rounds pay for it.
        if not self._probe:
            return False
        return self._idle + 1 >= max(1.0 / self._probe, excess / self._burden)

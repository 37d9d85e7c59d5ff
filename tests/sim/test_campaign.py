"""Random faults against the toy target, and planted bugs that the campaign has to find."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from outrider.commands.simulate import _campaign_facts
from outrider.core import rng
from outrider.core.rng import Purpose
from outrider.core.sequence import SpeculativeSequence
from outrider.proto.connection import Connection
from outrider.proto.messages import Draft, Message, Verdict
from outrider.session.cloud import CloudSession
from outrider.sim.campaign import Campaign, campaign, play
from outrider.sim.faults import LAWFUL, LAWLESS, LONG_EVERY, draw

LONG = range(LONG_EVERY - 1, 30 * LONG_EVERY, LONG_EVERY)
"""Cases in which the law behind a rejection shows."""


def played(seeds: range, *, most_failed: int = 10) -> Campaign:
    for sums in campaign(seeds, most_failed=most_failed):
        found = sums
    return found


def test_random_faults_break_nothing():
    found = played(range(80))
    assert [(r.case.seed, r.problems) for r in found.failed] == []
    assert found.cases == 80
    assert found.law is not None
    assert found.lawful
    assert '"passed": true' in json.dumps(_campaign_facts(range(160), found))
    # Every kind of fault did happen.
    assert {*LAWFUL, *LAWLESS, "cancel", "slow", "death", "drain"} == found.faults.keys()


@pytest.mark.parametrize("seed", [2440, 2955, 5763])
def test_a_session_that_is_lost_behind_another_goes_too(seed: int):
    """Its grace ends later than the one for which the timer was set."""
    assert play(draw(seed)).problems == ()


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a quarter of an hour on an idle core
def test_ten_thousand_schedules():
    found = played(range(10_000))
    assert [(r.case.seed, r.problems) for r in found.failed] == []
    assert found.lawful


def test_a_seed_replays_to_the_bit():
    first, second = play(draw(11)), play(draw(11))
    assert first == second
    assert first.fingerprint != play(draw(12)).fingerprint


# ------------------------------------------------------------------------------ planted bugs


def stale_epoch_accepted(patch: pytest.MonkeyPatch) -> None:
    """The cloud takes drafts of a chain that is dead."""
    real = CloudSession.on_draft

    def careless(self: CloudSession, frame: Draft, now: float) -> None:
        if frame.epoch <= self._epoch:
            self._epoch = frame.epoch
            self._alive = True
        real(self, frame, now)

    patch.setattr(CloudSession, "on_draft", careless)


def off_by_one_rollback(patch: pytest.MonkeyPatch) -> None:
    """A rollback leaves one rejected draft behind."""
    real = SpeculativeSequence.rollback

    def careless(self: SpeculativeSequence) -> int:
        kept = self._tail[:1]
        dropped = real(self)
        if len(kept) < dropped:
            self._tail = kept
        return dropped

    patch.setattr(SpeculativeSequence, "rollback", careless)


def reused_residual_draw(patch: pytest.MonkeyPatch) -> None:
    """All proposals of a rejection are one and the same draw."""
    real = rng.key

    def careless(seed: int, purpose: Purpose, position: int, index: int = 0) -> int:
        return real(seed, purpose, position, 0 if purpose is Purpose.PROPOSAL else index)

    patch.setattr(rng, "key", careless)


def dropped_verdict(patch: pytest.MonkeyPatch) -> None:
    """Every ninth verdict is forgotten in the cloud."""
    real, count = Connection.send, 0

    def careless(self: Connection, message: Message) -> None:
        nonlocal count
        count += isinstance(message, Verdict)
        if not (isinstance(message, Verdict) and count % 9 == 0):
            real(self, message)

    patch.setattr(Connection, "send", careless)


BUGS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    stale_epoch_accepted,
    off_by_one_rollback,
    reused_residual_draw,
    dropped_verdict,
)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


@pytest.mark.parametrize(
    ("bug", "seeds"),
    [
        (stale_epoch_accepted, range(49, 52)),
        (off_by_one_rollback, range(1, 4)),
        (dropped_verdict, range(11, 14)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_is_found_where_it_shows(
    bug: Callable[[pytest.MonkeyPatch], None], seeds: range, patch: pytest.MonkeyPatch
):
    """A few cases, of which the second shows it; without the bug they pass (the first test)."""
    bug(patch)
    assert [report.case.seed for report in played(seeds, most_failed=1).failed] == [seeds[1]]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], patch: pytest.MonkeyPatch
):
    bug(patch)
    seeds = LONG if bug is reused_residual_draw else range(160)
    found = played(seeds, most_failed=1)
    assert found.failed or not found.lawful

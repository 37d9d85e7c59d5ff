"""What the demo says of a comparison, on arms with literal figures."""

from __future__ import annotations

import pytest
from rich.console import Console

from outrider.bench.schedules import Arm, Sample
from outrider.commands import demotable
from outrider.commands.demotable import Promise, legend, promise, report, verdict
from outrider.commands.netdemo import NetDemo
from outrider.core.tokens import Origin, SamplingParams
from outrider.session.schedules import Schedule


async def never(prompt: tuple[int, ...], params: SamplingParams) -> Sample:
    raise AssertionError("these arms have their answers already")


def arm(name: str, ms: float, *, exact: bool = True, stood: int = 0, relaxed: int = 0) -> Arm:
    sample = Sample(
        seconds_per_token=ms / 1e3,
        ttft_s=0.1,
        tokens=20,
        forwards=20,
        drafted=10 if stood else 0,
        accepted=stood,
        payload_up=100,
        payload_down=100,
        ids=(1, 2),
        relaxed=relaxed,
    )
    schedule = Schedule.EDGE_ONLY if name == "edge-only" else Schedule.SYNC
    return Arm(name=name, schedule=schedule, answer=never, exact=exact, samples=[sample])


def demo(*, pace: float = 0.0, target: str = "builtin:smollm2") -> NetDemo:
    return NetDemo(
        target=target,
        draft=None,
        draft_length=4,
        window=16,
        link="rtt=50ms,up=5mbit,down=20mbit",
        pace_ms=pace,
        threads=None,
        prompts=1,
        seeds=1,
        max_tokens=20,
        temperature=0.0,
    )


RATIO = "sync (ratio)"
PLAIN = arm("cloud-only", 40.0)
LOSING = [PLAIN, arm(RATIO, 50.0, exact=False), arm("sync", 44.0, stood=3), arm("freerun", 39.0)]


@pytest.mark.parametrize(
    ("name", "exact", "kept"),
    [
        ("freerun", True, Promise.EXACT),
        ("sync/auto", True, Promise.EXACT),
        (RATIO, False, Promise.LAW),
        ("sync/auto/ratio", False, Promise.LAW),
        ("freerun/relaxed", False, Promise.LOSSY),
        ("plc/credit/e2sci", False, Promise.LOSSY),
        ("edge-only", False, Promise.OTHER),
    ],
)
def test_what_an_arm_promises(name: str, exact: bool, kept: Promise):
    assert promise(arm(name, 1.0, exact=exact)) is kept


def test_nothing_gained_says_why_and_what_to_try():
    lines = verdict(demo(), "lookup+small", LOSING, pinned=True)
    assert lines[-2:] == [
        "Speculation does not pay here: no schedule gains over 3 % on cloud-only.",
        "Why: the target alone streams a token in 40 ms and at best 30% of the guesses stood: "
        "drafting and the link cost more than that saves; try --draft large (guesses better) or "
        "--target-pace 60 (a slower target, as larger ones are).",
    ]
    idle = [PLAIN, arm("freerun", 40.0)]
    assert (
        "and no guess was judged in time: drafting" in verdict(demo(), "x", idle, pinned=True)[-1]
    )


@pytest.mark.parametrize(
    ("pace", "draft", "target", "words"),
    [
        (60.0, "lookup+small", "builtin:smollm2", "try --draft large (guesses better)."),
        (0.0, "large", "builtin:smollm2", "try --target-pace 60 (a slower target, as larger ones"),
        (0.0, "small", "toy:1", "try --target-pace 60"),
        (60.0, "large", "builtin:smollm2", "try a shorter --link."),
    ],
)
def test_nothing_is_recommended_that_was_tried(pace: float, draft: str, target: str, words: str):
    assert words in verdict(demo(pace=pace, target=target), draft, LOSING, pinned=True)[-1]


def test_the_ratio_arm_may_lose_and_win():
    lines = verdict(demo(), "large", LOSING, pinned=True)
    assert f"Slower than plain streaming from the cloud here: {RATIO}, sync." in lines
    ahead = [PLAIN, arm(RATIO, 20.0, exact=False), arm("freerun", 30.0)]
    assert verdict(demo(), "large", ahead, pinned=True)[-1] == (
        f"Fastest: {RATIO}, 2.00x cloud-only streaming."
    )


def test_a_lossy_arm_is_never_the_fastest():
    arms = [*LOSING, arm("freerun/relaxed", 10.0, exact=False, relaxed=5)]
    arms.append(arm("edge-only", 1.0, exact=False))
    lines = verdict(demo(), "large", arms, pinned=True)
    assert not [line for line in lines if line.startswith("Fastest")]
    assert "freerun/relaxed is lossy: 5 of 20 tokens are not the target's choice." in lines


def test_the_legend_without_colour_is_words_and_counts():
    origins = (Origin.TARGET, Origin.DRAFT, Origin.DRAFT, Origin.BONUS)
    plain = legend(origins, coloured=False).plain
    assert plain.splitlines() == [
        "4 tokens:",
        "   2 guessed by the draft, accepted",
        "   0 corrected by the target",
        "   1 target, behind accepted guesses",
        "   1 target alone (free-run)",
    ]
    assert "■    2 guessed" in legend(origins, coloured=True).plain


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_report_keeps_names_figures_and_its_title(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        demotable.console, "facts", lambda: Console(highlight=False, width=width, no_color=True)
    )
    names = ("plc/credit/e2sci", RATIO)
    arms = [PLAIN, *(arm(name, 1234.5, exact=False) for name in names), arm("freerun", 39.0)]
    report(demo(pace=60.0), "lookup+small", arms, pinned=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [
        "builtin:smollm2 with lookup+small",
        "rtt=50ms,up=5mbit,down=20mbit, T=0, 60 ms added to a forward",
    ]
    rows = {line.split("  ")[0].strip(): line.split()[-5:] for line in lines}
    assert rows["cloud-only"] == ["40.0", "1.00", "1.00", "-", "10.0"]
    assert rows["plc/credit/e2sci+"] == ["1234.5", "30.86", "1.00", "-", "10.0"]
    assert rows[f"{RATIO}*"] == ["1234.5", "30.86", "1.00", "-", "10.0"]
    notes = [line.split(":")[0] for line in lines]
    assert {"no mark", "*", "+"} <= set(notes)
    assert "~" not in notes

"""Draws docs/pictures/*.svg and a table of controllers.md: `python docs/draw_controllers.py`.

Everything comes from the package itself: rounds of known cost (outrider.bench.rounds) under fixed
seeds, the closed forms of outrider.control, certified bounds of outrider.core. A table stands
between `<!-- drawn: NAME -->` and `<!-- end -->`; a test compares the ones in TABLES.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from outrider.bench.rounds import Luck, Play, loss, play
from outrider.bench.worlds import LLAMA, QWEN, Drift, Steady, World, slow_target
from outrider.control.base import (
    Controller,
    ControllerFacts,
    Decision,
    Estimates,
    Outcome,
)
from outrider.control.costs import RowCosts
from outrider.control.curves import ChainedCurve
from outrider.control.oracle import best_lengths
from outrider.control.registry import CONTROLLERS, make
from outrider.control.specstop import outlook, turning_points
from outrider.control.stops import AdaEdl, needs
from outrider.core.divergence import Divergence, compare
from outrider.core.sampling import History, SamplingPipeline
from outrider.core.sparse import sketched
from outrider.core.tokens import ParameterError, SamplingParams

DOCUMENT: Final = Path(__file__).with_name("controllers.md")
PICTURES: Final = Path(__file__).with_name("pictures")
SIGNALLED: Final = ("adaedl", "specdecpp")
"""Stop blocks by what the draft says of itself, which rounds do not have."""
PLAYED: Final = tuple(name for name in CONTROLLERS if name not in SIGNALLED)
SEEDS: Final = 8
F64Array = npt.NDArray[np.float64]


# ------------------------------------------------------------------------------ worlds


@dataclass(frozen=True, slots=True)
class Phases:
    """One delay after the other, `each` rounds long."""

    levels: tuple[float, ...]
    each: int

    def draw(self, rounds: int, source: np.random.Generator) -> F64Array:  # noqa: ARG002
        index = np.minimum(np.arange(rounds) // self.each, len(self.levels) - 1)
        return np.asarray(np.array(self.levels)[index])


PHASES: Final = Phases((0.005, 0.040, 0.120), 100)
"""Where a short block, a long block and none is best."""


def changing() -> World:
    """`slow_target`: 60 ms a plain step or a judged block, 5 ms a draft, acceptance .8."""
    return replace(slow_target(0.0), name="changing", delays=PHASES)


LOSS_WORLDS: Final = (
    ("qwen, 55 ms", QWEN.world(Steady(0.055), max_length=10)),
    ("llama, 111 ms", LLAMA.world(Steady(0.111), max_length=10)),
    ("qwen, 20 to 150 ms", QWEN.world(Drift(0.020, 0.150, 400), max_length=10)),
)
LOSS_ROUNDS: Final = 400


def made(name: str, world: World, seed: int) -> Controller:
    """As bench/regret.py makes it: where the cloud cannot stream alone, told never to stop."""
    trips = tuple(2.0 * d + world.overhead for d in world.delays.levels)
    facts = ControllerFacts(max_length=world.max_length, fixed_length=4, seed=seed, delays=trips)
    if world.plain is None:
        try:
            return make(name, replace(facts, options={"always": 1.0}))
        except ParameterError:
            pass
    return make(name, facts)


def run(name: str, world: World, rounds: int, seed: int) -> tuple[Play, Luck]:
    luck = Luck.draw(world, rounds, seed)
    return play(made(name, world, seed), world, luck), luck


# ------------------------------------------------------------------------------ figures


def phases_played() -> dict[str, Play]:
    world = changing()
    return {n: run(n, world, PHASES.each * len(PHASES.levels), 1)[0] for n in PLAYED}


def phases_best() -> list[int]:
    """The best length of each phase; 0: the cloud alone."""
    world = changing()
    return [
        int(best_lengths(world.seconds(np.array([d])), world.tokens())[0][0]) for d in PHASES.levels
    ]


def phases_table(played: dict[str, Play] | None = None) -> str:
    """ms a token (expected, of what was decided) in the second half of each phase."""
    played = played or phases_played()
    world = changing()
    rows = ["| | " + " | ".join(f"d = {1e3 * d:g} ms" for d in PHASES.levels) + " |"]
    rows.append("| --- |" + " ---: |" * len(PHASES.levels))
    halves = [(PHASES.each * i + PHASES.each // 2, PHASES.each * (i + 1)) for i in range(3)]
    best = [best_lengths(world.seconds(np.array([d])), world.tokens())[1] for d in PHASES.levels]
    ks = phases_best()
    cells = [f"{1e3 * b:.1f} (k = {k})" for b, k in zip(best, ks, strict=True)]
    rows.append("| best possible | " + " | ".join(cells) + " |")
    for name, done in played.items():
        shown = [
            f"{1e3 * done.expected_ratio(a, b):.1f} (k = {done.lengths[a:b].mean():.1f})"
            for a, b in halves
        ]
        rows.append(f"| `{name}` | " + " | ".join(shown) + " |")
    return "\n".join(rows)


def loss_by_round(name: str, world: World, window: int = 50) -> dict[int, float]:
    """Loss of what was decided in the last `window` rounds, %, mean over SEEDS, every 8 rounds."""
    total: dict[int, float] = {}
    for seed in range(SEEDS):
        done, luck = run(name, world, LOSS_ROUNDS, seed)
        for end in range(8, LOSS_ROUNDS + 1, 8):
            value = loss(done, world, luck, max(0, end - window), end)
            total[end] = total.get(end, 0.0) + 100.0 * value / SEEDS
    return total


def known(round_trip: float, *, acceptance: float, draft: float, rows: list[tuple[int, float]]):
    """Estimates of constant acceptance."""

    class Constant(ChainedCurve):
        def _chain(self, count: int) -> list[float]:
            return [acceptance] * count

    return Estimates(
        round_trip=round_trip, draft=draft, verify=RowCosts(rows), curve=Constant(), rounds=100
    )


# ------------------------------------------------------------------------------ drawing

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = (
    "#0072b2", "#d55e00", "#009e73", "#c4312f", "#9351a6", "#8a8a8a",
)  # fmt: skip


def figure(width: float, height: float) -> Any:
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update(
        {
            "svg.fonttype": "none", "svg.hashsalt": "outrider", "font.size": 9,
            "font.family": "sans-serif", "axes.spines.top": False, "axes.spines.right": False,
            "axes.titlesize": 9, "axes.titleweight": "bold", "axes.grid": True,
            "grid.color": "#e6e6e6", "grid.linewidth": 0.6, "lines.linewidth": 1.3,
            "legend.frameon": False, "legend.fontsize": 8, "path.simplify_threshold": 0.3,
        }
    )  # fmt: skip
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save(drawn: Any, name: str) -> None:
    PICTURES.mkdir(exist_ok=True)
    path = PICTURES / f"{name}.svg"
    drawn.savefig(path, metadata={"Date": None, "Creator": None})
    # Tenths of a point are enough, and half the size.
    text = re.sub(r"\d+\.\d\d+", lambda m: f"{float(m[0]):.1f}", path.read_text("utf-8"))
    text = re.sub(r"(?m)^ +|[ \t]+$", "", re.sub(r"'DejaVu Sans'[^;\"]*", "sans-serif", text))
    path.write_text(text, encoding="utf-8")


def corners(values: Any) -> tuple[list[int], list[int]]:
    """The same steps without points on a straight line."""
    xs, ys = [0], [int(values[0])]
    for i in range(1, len(values)):
        if values[i] != values[i - 1]:
            xs += [i, i]
            ys += [ys[-1], int(values[i])]
    return [*xs, len(values)], [*ys, ys[-1]]


def draw_lengths(played: dict[str, Play]) -> None:
    """Small multiples: length over rounds, the best in grey."""
    best = np.repeat(phases_best(), PHASES.each)
    drawn = figure(9.6, 6.2)
    axes = drawn.subplots(3, 4, sharex=True, sharey=True).flat
    for axis, (name, done) in zip(axes, played.items(), strict=False):
        axis.plot(*corners(best), color=GREY, linewidth=3, alpha=0.45)
        axis.plot(*corners(done.lengths), color=BLUE, linewidth=0.9)
        axis.set_title(name)
        axis.set_ylim(-0.6, 16.6)
        axis.set_yticks([0, 8, 16])
        axis.set_xticks([0, 100, 200, 300])
    last = drawn.axes[-1]
    last.axis("off")
    last.text(0.0, 0.85, "grey: best length of the delay", color=GREY, transform=last.transAxes)
    last.text(0.0, 0.68, "blue: length decided", color=BLUE, transform=last.transAxes)
    last.text(0.0, 0.43, "one-way delay 5, 40, 120 ms,", transform=last.transAxes)
    last.text(0.0, 0.28, "100 rounds each; 0: cloud alone", transform=last.transAxes)
    drawn.supxlabel("round", fontsize=9)
    drawn.supylabel("drafts a round", fontsize=9)
    save(drawn, "lengths")


SHOWN: Final = (
    ("auto", BLUE), ("specstop", GREEN), ("ucb-scaled", PURPLE), ("ucb-specstop", ORANGE),
    ("naive-ucb", GREY), ("exp3", RED),
)  # fmt: skip


def draw_loss() -> None:
    drawn = figure(9.6, 3.2)
    axes = drawn.subplots(1, len(LOSS_WORLDS), sharey=True)
    for axis, (title, world) in zip(axes, LOSS_WORLDS, strict=True):
        for name, colour in SHOWN:
            found = loss_by_round(name, world)
            axis.plot(list(found), list(found.values()), color=colour, label=name)
        axis.set_title(title)
        axis.set_xticks(range(0, 401, 100))
        axis.set_xlabel("round")
    axes[0].set_ylim(0, 40)
    axes[0].set_ylabel("loss against the oracle, %\n(last 50 rounds)")
    handles, labels = axes[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=len(SHOWN))
    save(drawn, "loss")


TRIPS: Final = (0.01, 0.08, 0.2)
ROWS: Final = [(1, 0.060), (9, 0.072)]
"""As in data/drafts/HEADS.md: 60 ms for one row, 72 for nine."""


def draw_model() -> None:
    """N(k)/B(k) and where its minimum lies."""
    drawn = figure(9.6, 3.0)
    left, right = drawn.subplots(1, 2)
    for trip, colour in zip(TRIPS, (BLUE, GREEN, ORANGE), strict=True):
        told = known(trip, acceptance=0.8, draft=0.005, rows=ROWS)
        view = outlook(told, 16)
        curve = [1e3 * s for s in view.token_seconds[1:]]
        left.plot(range(1, 17), curve, color=colour, label=f"R = {1e3 * trip:g} ms")
        left.plot(view.length, curve[view.length - 1], "o", color=colour)
    left.axhline(60.0, color=GREY, linestyle="--", linewidth=1)
    left.text(16, 61, "the cloud alone", color=GREY, ha="right", va="bottom")
    left.set_ylim(20, 110)
    left.set_xlabel("drafts a round, k")
    left.set_ylabel("ms a token, N(k)/B(k)")
    left.legend()
    for acceptance, colour in ((0.6, ORANGE), (0.7, GREEN), (0.8, BLUE)):
        told = known(0.05, acceptance=acceptance, draft=0.005, rows=ROWS)
        trips = np.arange(0.0, 0.2505, 0.005)
        lengths = []
        for trip in trips:
            view = outlook(replace(told, round_trip=float(trip)), 16)
            lengths.append(view.length if view.worth else 0)
        right.step(
            1e3 * trips, lengths, color=colour, where="mid", label=f"acceptance {acceptance}"
        )
        ceiling = 1e3 * turning_points(told, 16).ceiling
        right.axvline(ceiling, color=colour, linewidth=0.8, linestyle=":")
    right.set_xlabel("round trip R, ms")
    right.set_ylabel("length that specstop takes")
    right.legend()
    save(drawn, "model")


DRAFTS: Final = (("small", 0.402, 0.0079), ("large", 0.675, 0.0136))
"""Acceptance and seconds a token, as in data/drafts/HEADS.md."""


def adaedl_thresholds(acceptance: float, rounds: int = 1000) -> F64Array:
    """lambda by round where each of 4 drafts stands with `acceptance`."""
    source = np.random.default_rng(4)
    controller = AdaEdl(ControllerFacts())
    values = []
    for _ in range(rounds):
        fell = np.nonzero(source.random(4) >= acceptance)[0]
        stood = int(fell[0]) if len(fell) else 4
        outcome = Outcome(
            decision=Decision(length=4), drafted=4, accepted=stood, strict=stood,
            tokens=stood + 1, seconds=0.1,
        )  # fmt: skip
        controller.observe(outcome, 0.0)
        values.append(controller.threshold)
    return np.array(values)


def draw_stops() -> None:
    drawn = figure(9.6, 3.0)
    left, right = drawn.subplots(1, 2)
    for acceptance, colour in ((0.4, ORANGE), (0.7, GREEN), (0.97, BLUE)):
        values = adaedl_thresholds(acceptance)[9::10]
        left.plot(np.arange(10, 1001, 10), values, color=colour, label=f"acceptance {acceptance}")
    left.set_title("adaedl")
    left.set_ylim(0, 1)
    left.set_xlabel("round")
    left.set_ylabel("threshold lambda")
    left.legend(loc="lower left")
    trips = np.arange(0.0, 0.3005, 0.01)
    for (draft, acceptance, step), colour in zip(DRAFTS, (ORANGE, BLUE), strict=True):
        told = known(0.0, acceptance=acceptance, draft=step, rows=ROWS)
        least = [needs(replace(told, round_trip=float(trip)), 8)[0] for trip in trips]
        right.plot(1e3 * trips, least, color=colour, label=draft)
    right.axhline(0.7, color=GREY, linestyle="--", linewidth=1)
    right.text(300, 0.71, "published: 1 - .3", color=GREY, ha="right", va="bottom")
    right.set_title("specdecpp")
    right.set_ylim(0, 1)
    right.set_xlabel("round trip, ms")
    right.set_ylabel("least chance that all so far stand\nto draft on")
    right.legend(loc="lower left")
    save(drawn, "stops")


def credit_by_round(**options: float) -> tuple[F64Array, F64Array, F64Array]:
    """(credit, T, W) by round; acceptance .9, then .3, then .9, 60 rounds each."""
    source = np.random.default_rng(5)
    controller: Any = make("credit", ControllerFacts(options=options))
    rows = []
    for acceptance in (0.9, 0.3, 0.9):
        for _ in range(60):
            window = controller.window
            fell = np.nonzero(source.random(window) >= acceptance)[0]
            stood = int(fell[0]) if len(fell) else window
            outcome = Outcome(
                decision=Decision(length=window), drafted=window, accepted=stood, strict=stood,
                tokens=stood + 1, seconds=0.1,
            )  # fmt: skip
            controller.observe(outcome, 0.0)
            rows.append((controller.credit, controller.threshold, controller.window))
    credit, threshold, window = np.array(rows).T
    return credit, threshold, window


def draw_credit() -> None:
    credit, threshold, window = credit_by_round()
    drawn = figure(9.6, 2.6)
    axes = drawn.subplots(1, 3, sharex=True)
    facts = (("credit r", credit, BLUE), ("threshold T, nats", threshold, ORANGE))
    for axis, (title, values, colour) in zip(
        axes, (*facts, ("window W", window, GREEN)), strict=True
    ):
        axis.step(range(len(values)), values, color=colour, where="post")
        axis.set_title(title)
        axis.set_xlabel("round")
        for border in (60, 120):
            axis.axvline(border, color=GREY, linestyle=":", linewidth=1)
    axes[0].set_ylim(0, 1)
    axes[1].set_ylim(0, 0.32)
    axes[2].set_ylim(0, 16.5)
    save(drawn, "credit")


SIZES: Final = (4, 8, 16, 32, 64)


def certified(temperature: float, seed: int = 3) -> tuple[float, list[tuple[float, float]]]:
    """True JSD of a Zipf pair of 512 ids, and its bounds by sketch size."""
    source = np.random.default_rng(seed)
    base = -1.3 * np.log(np.arange(1.0, 513.0))
    rows = [(base + source.normal(0.0, s, 512)).astype(np.float32) for s in (0.0, 0.9)]
    params = SamplingParams(temperature=temperature)
    pipeline = SamplingPipeline(params, vocab_size=512)
    p, q = (pipeline.distribution(row, History(())) for row in rows)
    bounds = []
    for size in SIZES:
        sketch, _ = sketched(q, size)
        found = compare(p, sketch).bounds(Divergence.JSD)
        bounds.append((found.lower, found.upper))
    return float(compare(p, q).value(Divergence.JSD)), bounds


def draw_bounds() -> None:
    drawn = figure(9.6, 2.6)
    axes = drawn.subplots(1, 2, sharey=True)
    for axis, temperature in zip(axes, (1.0, 0.7), strict=True):
        true, bounds = certified(temperature)
        for i, (low, high) in enumerate(bounds):
            axis.plot(
                [i, i], [low, high], color=BLUE, linewidth=6, alpha=0.5, solid_capstyle="butt"
            )
        axis.axhline(true, color=ORANGE)
        axis.set_xticks(range(len(SIZES)), SIZES)
        axis.set_title(f"temperature {temperature:g}")
        axis.set_xlabel("ids in the sketch, K")
    axes[0].set_ylabel("JSD, nats")
    axes[0].set_ylim(0, None)
    save(drawn, "bounds")


# ------------------------------------------------------------------------------ the document

TABLES: Final[dict[str, Callable[[], str]]] = {"phases": phases_table}


def filled(text: str) -> str:
    """`text` with its drawn parts made anew."""
    for name, table in TABLES.items():
        part = re.compile(rf"(<!-- drawn: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        body = table()
        text = part.sub(lambda m, body=body: f"{m[1]}{body}\n{m[2]}", text)
    return text


def main() -> None:
    played = phases_played()
    draw_lengths(played)
    draw_loss()
    draw_model()
    draw_stops()
    draw_credit()
    draw_bounds()
    if DOCUMENT.exists():
        DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

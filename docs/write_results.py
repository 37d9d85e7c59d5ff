"""docs/results.md: each scenario of scenarios/papers beside what was published.

    python docs/write_results.py [--runs FOLDER] [--only specstop-qwen,...] [--live [--quick]]

Simulated scenarios run here; live ones only with --live (they need the built-in pair,
OUTRIDER_DATA and a quiet machine). A live one that names a calibration gets one first
(`outrider calibrate`), where its folder is not there yet. --quick: few questions and one seed of
each live one, and the page says so. Runs already in the folder are used as they are, so that a page
can be made of runs from several machines; without --live, live scenarios that were not run are
listed as such.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.bench.experiment import Experiment, System
from outrider.bench.figures import FEWEST, Row, rows
from outrider.bench.journal import Run, read
from outrider.bench.papertable import markdown
from outrider.cli import run
from outrider.commands.bench import header_of, load

ROOT = Path(__file__).parent.parent
SCENARIOS = ROOT / "scenarios" / "papers"
HEAD = """# Results beside the papers

Made by `python docs/write_results.py` from `scenarios/papers`. Where the models are of hub size,
rounds are simulated with the published step times and acceptance, through the code that runs live;
what a paper does not state is an option with our value, and named. Only UCB-SpecStop was read at
first hand; the others through digests, so their figures are to be taken as reported. These are no
measurements of those machines: they say what the published numbers imply.

Missing everywhere: relaxed rules on hub-size pairs (they need real distributions), judge scores,
and any pair of ours larger than the built-in one.

"""


def section(path: Path, runs: Path, *, live: bool, quick: bool, note: str) -> str:
    """Of docs/results.md."""
    experiment = load(header_of(path, (), quick=False, run_code=False))
    out = runs / f"{path.stem}.jsonl"
    shown = f"scenarios/papers/{path.name}"
    simulated = experiment.system is System.SIMULATOR
    if not out.exists() and (live or simulated):
        print(path.stem, file=sys.stderr, flush=True)
        words = ["bench", str(path), "-o", str(out), "--json"]
        if not simulated:
            words += [*(["--quick"] if quick else []), *calibrated(experiment, runs)]
        if run(words):
            raise SystemExit(f"{path.stem} did not run")
    if out.exists():
        made = read(out)
        found = rows(made.cells, base=experiment.base)
        if simulated:
            return markdown(experiment, found, shown)
        return markdown(experiment, found, shown, note=conditions(made, found, note))
    assert experiment.paper is not None
    return (
        f"## {experiment.paper.table}\n\n{experiment.paper.source}. Scenario: `{shown}`.\n\n"
        f"*Not run yet*: it needs the built-in pair on a quiet machine.\n\n"
        f"*Left out there*: {experiment.paper.left_out}.\n\n"
        f"*Why they differ*: {experiment.paper.reason}.\n"
    )


def calibrated(experiment: Experiment, runs: Path) -> list[str]:
    """What `outrider bench` has to be told of the calibration that a live experiment names; it is
    made here when there is none."""
    if all(p.pair is None or p.pair.calibration is None for p in experiment.points):
        return []
    folder = runs / "calibration"
    if not (folder / "calibration.json").exists():
        print("calibration", file=sys.stderr, flush=True)
        if run(["calibrate", str(folder), "--samples", "12", "--max-tokens", "64"]):
            raise SystemExit("the calibration did not run")
    return ["--set", f"live.calibration={folder}"]


def conditions(made: Run, found: Sequence[Row], note: str) -> str:
    """Of a live run, in words: the figures are worth no more than these."""
    few = ", too few for intervals" if min(row.answers for row in found) < FEWEST else ""
    machine = made.header.machine
    answers = sorted({row.answers for row in found})
    count = f"{answers[0]} to {answers[-1]}" if len(answers) > 1 else f"{answers[0]}"
    return (
        f"Live: the built-in pair on {machine.get('cores', '?')} cores, "
        f"{count} answers in each cell"
        f"{few}{', --quick' if made.header.quick else ''}{', ' + note if note else ''}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--only", default="")
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--note", default="", help="how busy the machine was, for the page")
    args = parser.parse_args()
    args.runs.mkdir(exist_ok=True)
    only = [name for name in args.only.split(",") if name]
    paths = [p for p in sorted(SCENARIOS.glob("*.toml")) if not only or p.stem in only]
    page = HEAD + "\n".join(
        section(path, args.runs, live=args.live, quick=args.quick, note=args.note) for path in paths
    )
    if only:
        print(page)
    else:
        (ROOT / "docs" / "results.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

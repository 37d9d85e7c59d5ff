"""docs/results.md: each scenario of scenarios/papers beside what was published.

    python docs/write_results.py [--runs FOLDER] [--only specstop-qwen,...] [--live]

Simulated scenarios run here; live ones only with --live (they need the built-in pair,
OUTRIDER_DATA and a quiet machine). Runs already in the folder are used as they are, so that a page can be made of
runs from several machines; without --live, live scenarios that were not run are listed as such.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from outrider.bench.experiment import System
from outrider.bench.figures import rows
from outrider.bench.journal import read
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


def section(path: Path, runs: Path, *, live: bool) -> str:
    """Of docs/results.md."""
    experiment = load(header_of(path, (), quick=False, run_code=False))
    out = runs / f"{path.stem}.jsonl"
    shown = f"scenarios/papers/{path.name}"
    if not out.exists() and (live or experiment.system is System.SIMULATOR):
        print(path.stem, file=sys.stderr, flush=True)
        if run(["bench", str(path), "-o", str(out), "--json"]):
            raise SystemExit(f"{path.stem} did not run")
    if out.exists():
        return markdown(experiment, rows(read(out).cells, base=experiment.base), shown)
    assert experiment.paper is not None
    return (
        f"## {experiment.paper.table}\n\n{experiment.paper.source}. Scenario: `{shown}`.\n\n"
        f"*Not run yet*: it needs the built-in pair on a quiet machine.\n\n"
        f"*Left out there*: {experiment.paper.left_out}.\n\n"
        f"*Why they differ*: {experiment.paper.reason}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--only", default="")
    parser.add_argument("--live", action="store_true")
    args = parser.parse_args()
    args.runs.mkdir(exist_ok=True)
    only = [name for name in args.only.split(",") if name]
    paths = [p for p in sorted(SCENARIOS.glob("*.toml")) if not only or p.stem in only]
    page = HEAD + "\n".join(section(path, args.runs, live=args.live) for path in paths)
    if only:
        print(page)
    else:
        (ROOT / "docs" / "results.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

"""`outrider distill`: make a draft for a target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from outrider.commands import console, specs
from outrider.commands.errors import CommandError
from outrider.commands.options import DEFAULT_TARGET, Json

if TYPE_CHECKING:
    from outrider.distill.run import DistillConfig, DistillReport
    from outrider.distill.run import Progress as Stage
    from outrider.distill.run import Target as Teacher

Files = list[Path] | None


def _file(text: str) -> Any:
    return typer.Option(metavar="FILE", help=text, exists=True, dir_okay=False)


def _number(text: str) -> Any:
    return typer.Option(metavar="N", help=text, min=1)


def distill(
    work: Annotated[Path, typer.Argument(help="Folder for everything made on the way.")],
    target: Annotated[
        str, typer.Option(metavar="MODEL", help="Whom to guess: builtin:smollm2, id or folder.")
    ] = DEFAULT_TARGET,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The draft's file; else draft.safetensors in WORK."),
    ] = None,
    prompts: Annotated[Files, _file("JSONL with prompts, mixed with our own; repeatable.")] = None,
    held_out: Annotated[Files, _file("JSONL with prompts for the evaluation only.")] = None,
    tokens: Annotated[int, _number("Tokens of the target's own text to learn from.")] = 1_000_000,
    layers: Annotated[int, _number("Layers of the draft, taken from the target's.")] = 8,
    support: Annotated[int, _number("Ids the draft can say, the most used ones.")] = 16_384,
    steps: Annotated[int, _number("Training steps.")] = 1500,
    seed: Annotated[int, typer.Option(metavar="N", help="Same seed, same draft.")] = 0,
    quick: Annotated[
        bool,
        typer.Option("--quick", metavar="", help="A minute on a tiny model: to try the path."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a draft for a target: its own text, a few of its layers, training, one small file.

    Hours for a good draft. Stopped and started again with the same WORK folder and options, it
    goes on where it was. At the end: acceptance on prompts it never saw, before and after.

    Examples:

    ```
    outrider distill work --steps 1500
    outrider distill work --target ./my-model --quick
    outrider generate "Hello" --target ./my-model --draft work/draft.safetensors
    ```
    """
    from outrider.distill.run import distill as make

    chosen: dict[str, Any] = {
        "output": output,
        "prompt_files": tuple(prompts or ()),
        "held_out": tuple(held_out or ()),
        "seed": seed,
    }
    sizes = {"corpus_tokens": tokens, "layers": layers, "support": support, "steps": steps}
    config = settings(work, chosen, sizes, quick=quick)
    with console.waiting(f"loading {target}"):
        teacher = _load(target)
    with _Bars() as bars:
        report = make(teacher, config, bars.show)
    if as_json:
        console.print_json(report.as_dict())
    else:
        _show(report)


def settings(
    work: Path, chosen: dict[str, Any], sizes: dict[str, Any], *, quick: bool
) -> DistillConfig:
    """The options as a configuration; --quick brings sizes of its own."""
    from outrider.distill import run

    try:
        if quick:
            return run.quick(work, **chosen)
        return run.DistillConfig(work=work, **chosen, **sizes)
    except ValueError as error:
        raise CommandError(str(error)) from None


def _load(spec: str) -> Teacher:
    """The target as transformers has it: distillation trains against the model itself."""
    from outrider.distill.run import Target as Teacher
    from outrider.engines import builtin
    from outrider.engines.load import load_checkpoint, load_vocabulary
    from outrider.engines.tokenizer import Tokenizer

    specs.refuse_bare("--target", spec)
    if spec == builtin.SPEC:
        model = builtin.load_model("bfloat16")
        words: Tokenizer = builtin.load_tokenizer()
    else:
        # First what is small: it says in one sentence that there is no such model.
        words = load_vocabulary(spec).tokenizer
        model = load_checkpoint(spec)
    return Teacher(
        name=spec,
        model=model,
        encode=lambda text: words.chat([{"role": "user", "content": text}]),
        decode=words.decode,
        end_ids=words.eos_token_ids,
        vocab=words.vocab_size,
    )


class _Bars:
    """One progress bar a stage, with the time left; silent where there is no terminal."""

    def __init__(self) -> None:
        screen = console.messages()
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=screen,
            disable=not screen.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, stage: Stage) -> None:
        if stage.stage not in self._tasks:
            self._tasks[stage.stage] = self._progress.add_task(stage.stage, note="")
        task = self._tasks[stage.stage]
        self._progress.update(task, completed=stage.done, total=stage.whole, note=stage.note)


def _show(report: DistillReport) -> None:
    table = Table(title="acceptance on prompts never seen, before and after")
    table.add_column("task")
    for heading in ("T=0", "T=0, lookup first", "T=0.7", "T=1"):
        table.add_column(heading, justify="right")
    for was, now in zip(report.before, report.after, strict=True):
        pairs = [(was.greedy, now.greedy), (was.with_lookup, now.with_lookup)]
        pairs += [(was.overlap[t], now.overlap[t]) for t in ("0.7", "1.0")]
        table.add_row(now.task, *(f"{a:.2f} > {b:.2f}" for a, b in pairs))
    table.caption = "lookup first: the draft guesses only where lookup finds nothing to copy"
    out = console.facts()
    out.print(table)
    out.print(
        f"{report.path} ({report.bytes / 1e6:.1f} MB), "
        f"{report.seconds_per_token_after * 1e3:.1f} ms per guess, after {report.steps} steps",
        markup=False,
        soft_wrap=True,
    )

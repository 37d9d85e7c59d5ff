"""`outrider pull`: the built-in target's weights onto this machine."""

from __future__ import annotations

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from outrider.commands import console
from outrider.engines import builtin


def pull() -> None:
    """Get the built-in target's weights (93 MB), check them, unpack them into the cache.

    Safe to repeat: what is there and intact is kept. `outrider generate` does the unpacking
    itself when it has to; `OUTRIDER_CACHE` moves the cache.

    Examples:

    ```
    outrider pull
    ```
    """
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    screen = console.messages()
    with Progress(
        *columns, console=screen, transient=True, disable=not screen.is_terminal
    ) as progress:
        tasks = {}

        def tell(what: str, done: int, whole: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=whole)
            progress.update(tasks[what], completed=done, total=whole)

        path = builtin.pull(progress=tell)
    console.facts().print(f"{builtin.SPEC} is ready: {path}", soft_wrap=True)

"""A core each for a verifier and its edge on one machine, for the demo and the bench.

On a small machine the two would otherwise chase each other over the cores, and the times would say
more about that than about the schedule. Two measurements at once would meet on the same cores,
though: so a core is taken by a lock on a file, and who finds fewer than two that are free pins
nothing and says so. The lock ends with the process, however that ends, as the pinning does.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Final

_CORES: Final = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
"""What this process may run on before it pins itself: a pinned process, and every child and
thread of it, sees only its own core afterwards."""


def pin(pid: int, core: int) -> bool:
    """Keep a process on one core, where the system can; True when it is pinned. `core` counts from
    0 among the cores that this process was started on."""
    if len(_CORES) < 2 or core >= len(_CORES):
        return False
    try:
        # Threads that run already keep what they inherited: tell each.
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
    except OSError:
        threads = [pid]
    try:
        for thread in threads:
            os.sched_setaffinity(thread, {_CORES[core]})
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Those of a pair, as `pin` counts them; None: none of its own."""

    cloud: int | None
    edge: int | None
    words: str
    """For the machine's description."""
    locks: tuple[IO[str], ...] = field(default=(), repr=False)

    def pin_edge(self) -> bool:
        """Keep this process on the edge's core."""
        return self.edge is not None and pin(os.getpid(), self.edge)


@cache
def cores() -> Cores:
    """Two that no other process of this user has taken; this one keeps them until it ends."""
    if len(_CORES) < 2:
        return _unpinned("fewer than two cores")
    if (folder := _folder()) is None:
        return _unpinned("no folder to tell others which cores are taken")
    taken: dict[int, IO[str]] = {}
    holders: dict[str, None] = {}
    for number, core in enumerate(_CORES):
        file = (folder / f"core-{core}").open("a+", encoding="utf-8")
        if _locked(file):
            taken[number] = file
            if len(taken) == 2:
                break
        else:
            file.seek(0)
            holders[file.read().strip() or "?"] = None
            file.close()
    if len(taken) < 2:
        for file in taken.values():
            file.close()
        others = ", ".join(holders)
        return _unpinned(f"another measurement has the cores, process {others}")
    for file in taken.values():
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    cloud, edge = taken
    words = f"verifier on core {_CORES[cloud]}, edge on core {_CORES[edge]}"
    return Cores(cloud=cloud, edge=edge, words=words, locks=tuple(taken.values()))


def _unpinned(why: str) -> Cores:
    return Cores(cloud=None, edge=None, words=f"not pinned: {why}")


def _folder() -> Path | None:
    """This user's own; None where somebody else has put something in its place."""
    folder = Path(tempfile.gettempdir()) / f"outrider-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            return folder
    return None


def _locked(file: IO[str]) -> bool:
    import fcntl  # where there are no affinities, as on Windows, there may be none

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

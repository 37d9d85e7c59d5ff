"""Runs clients that are installed elsewhere: `make clients`, or OUTRIDER_CLIENTS=FOLDER, which is a
virtual environment that also holds `node_modules`. They never share an environment with us."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from live import PATIENCE
from served import MODEL

PROGRAMS: Final = Path(__file__).parent / "programs"
START_S: Final = 600.0
"""Seconds that a client may take: some import for minutes on a busy machine."""


def folder() -> Path:
    """Where the clients are; skips the test where there is none."""
    given = os.environ.get("OUTRIDER_CLIENTS")
    if not given:
        pytest.skip("other people's clients are not installed: make clients")
    return Path(given).resolve()


def command(name: str) -> str:
    """A client's own command line."""
    path = folder() / "bin" / name
    if not path.exists():
        pytest.skip(f"{name} is not installed in {folder()}: make clients")
    return str(path)


async def ran(
    *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, status: int = 0
) -> str:
    """What a program printed; it must have ended with that status."""
    quiet = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_COLOR": "1"}
    quiet["PYTHONDONTWRITEBYTECODE"] = (
        ""  # thousands of modules: the next start finds them compiled
    )
    process = await asyncio.create_subprocess_exec(
        *words,
        env={**os.environ, **quiet, **(env or {})},
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # with the workers of its own, so that they end with it
    )
    talk = asyncio.create_task(process.communicate())
    try:
        out, err = await asyncio.wait_for(asyncio.shield(talk), START_S)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await talk
    assert process.returncode == status, f"{words[0]}: {err.decode()[-3000:]}{out.decode()[-1000:]}"
    return out.decode()


async def python(name: str, package: str, url: str) -> Any:
    """The JSON that programs/NAME.py prints, given the gateway's address and model."""
    interpreter = command("python")
    if not any(folder().glob(f"lib/python3*/site-packages/{package}")):
        pytest.skip(f"{package} is not installed in {folder()}: make clients")
    return json.loads(await ran(interpreter, str(PROGRAMS / f"{name}.py"), f"{url}/v1", MODEL))


async def node(name: str, package: str, url: str, tmp: Path) -> Any:
    """As `python`, of programs/NAME.mjs. Node looks for packages beside the program."""
    interpreter, packages = shutil.which("node"), folder() / "node_modules"
    if interpreter is None or not (packages / package).is_dir():
        pytest.skip(f"{package} of npm is not installed in {folder()}: make clients")
    (tmp / "node_modules").symlink_to(packages)
    program = shutil.copy(PROGRAMS / f"{name}.mjs", tmp)
    return json.loads(await ran(interpreter, str(program), f"{url}/v1", MODEL))


PATIENCE_WITH_CLIENTS: Final = START_S + PATIENCE

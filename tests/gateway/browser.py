"""A headless Chromium for tests of the chat page; they are skipped where there is none."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_MS: Final = 60_000


def executable() -> str | None:
    given = os.environ.get("OUTRIDER_CHROMIUM")
    return given or next(filter(None, map(shutil.which, NAMES)), None)


def require() -> Any:
    """playwright's async API, or the test is skipped with what is missing."""
    driver = pytest.importorskip(
        "playwright.async_api", reason='no playwright: pip install "outrider[browser]"'
    )
    if executable() is None:
        pytest.skip("no Chromium: apt install chromium, or OUTRIDER_CHROMIUM=path")
    return driver


@contextlib.asynccontextmanager
async def page_of(url: str, **how: Any) -> AsyncIterator[Any]:
    """A fresh page at `url`; whatever it says on its console as an error fails the test. `how`: of
    the browser's context (viewport, color_scheme)."""
    said: list[str] = []
    async with require().async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=executable(), args=["--no-sandbox", "--disable-gpu"]
        )
        context = await browser.new_context(**({"viewport": {"width": 1400, "height": 900}} | how))
        page = await context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda m: said.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        await page.goto(url)
        page.said = said
        yield page
        await browser.close()
    assert not said, said

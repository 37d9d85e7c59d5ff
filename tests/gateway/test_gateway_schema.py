"""Whatever the schema allows, and much that it does not: never a 500.

Needs `pip install schemathesis`, which is no dependency here: it brings a pytest plugin that every
other test would load.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from served import served

schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = 150


@pytest.fixture
def url() -> Iterator[str]:
    """A gateway in a thread of its own, for clients that know no asyncio."""
    up, done = threading.Event(), threading.Event()
    where: list[str] = []

    async def work() -> None:
        async with served(config={"answers": 8}) as gateway:
            where.append(gateway.url)
            up.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    up.wait()
    yield where[0]
    done.set()
    thread.join()


def checked(case: Any, path: str) -> tuple[str, int]:
    """Send it; path and status. A model that exists, so that more than its name is looked at, and
    few tokens: an answer of the whole context only takes long."""
    if isinstance(case.body, dict) and "model" in case.body:
        case.body |= {"model": "toy", "max_tokens": 3}
        case.body.pop("max_completion_tokens", None)
    answer = case.call(timeout=60)
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    if answer.status_code >= 400:
        assert set(json.loads(answer.text)) == {"error"}
    return path, answer.status_code


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_request_is_answered_with_a_fault_of_ours(url: str):
    described = schemathesis.openapi.from_url(f"{url}/openapi.json")
    seen = set()
    for found, mode in product(described.get_all_operations(), schemathesis.GenerationMode):
        operation = found.ok()

        @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            seen.add(checked(case, operation.path))  # noqa: B023 - it is called in this very turn

        if mode is schemathesis.GenerationMode.POSITIVE or operation.method == "post":
            ask()
    assert {path for path, _ in seen} == set(described.raw_schema["paths"])
    assert ("/v1/completions", 200) in seen

"""A span for each answer: counts and seconds, and no text."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from live import run, until
from outrider.gateway.tracing import SpanTracing
from served import CHAT, chat, served

DOCS = (Path(__file__).parents[2] / "docs/operations.md").read_text("utf-8")
PLANTED = "the PLANTED prompt"


@pytest.fixture
def spans():
    """A tracing, and the spans it has finished."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    yield SpanTracing(provider.get_tracer("test")), memory.get_finished_spans
    provider.shutdown()


def test_each_answer_is_a_span_with_its_rounds(spans):
    tracing, finished = spans

    async def work() -> None:
        async with served(config={"tracing": tracing}) as gateway:
            body = chat(max_tokens=12, n=2, messages=[{"role": "user", "content": PLANTED}])
            usage = (await gateway.post(CHAT, body)).json()["usage"]
            bad = await gateway.post(CHAT, chat(temperature=PLANTED))
            assert bad.status_code == 400
            made = finished()
            assert len(made) == 2
            facts = [dict(span.attributes) for span in made]
            tokens = sum(fact["outrider.completion_tokens"] for fact in facts)
            assert tokens == usage["completion_tokens"]
            assert {fact["outrider.choice"] for fact in facts} == {0, 1}
            for span, fact in zip(made, facts, strict=True):
                assert fact["outrider.ttft_s"] > 0
                rounds = [event.attributes for event in span.events]
                assert (
                    sum(r["outrider.tokens"] for r in rounds) == fact["outrider.completion_tokens"]
                )
                assert sum(r["outrider.queue_s"] for r in rounds) == pytest.approx(
                    fact["outrider.queue_s"]
                )
                assert "PLANTED" not in span.to_json()
                traces = {name.removeprefix("outrider.") for name in fact}
                assert traces <= set(re.findall(r"`(\w+)`", DOCS.split("## Traces")[1]))

    run(work())


def test_a_client_that_goes_ends_its_span(spans):
    tracing, finished = spans

    async def work() -> None:
        async with served(config={"tracing": tracing}, cloud={"pace": 0.005}) as gateway:
            body = chat(max_tokens=1000, stream=True, ignore_eos=True)
            async with gateway.http.stream("POST", CHAT, json=body) as response:
                await anext(response.aiter_raw())
            await until(lambda: len(finished()) == 1)
            assert finished()[0].attributes["outrider.cancelled"] is True

    run(work())


def test_nothing_of_it_is_imported_unless_asked_for():
    code = (
        "import sys\nimport outrider.gateway.app, outrider.commands.gateway\n"
        "sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

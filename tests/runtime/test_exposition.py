"""A verifier's /metrics: what Prometheus reads is what the verifier counted, and is documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_access import http

from live import alone, ask, drafter, edge, hear, run, same, server
from outrider.core.tokens import SamplingParams
from outrider.runtime.access import hash_token
from outrider.runtime.exposition import METRICS, exposition
from outrider.runtime.failures import CloudError
from outrider.runtime.routes import HEALTH_PATH, METRICS_PATH

DOCS = Path(__file__).parents[2] / "docs"
SHORT = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)


def samples(text: str) -> dict[tuple[str, str], float]:
    """Name and label's value (or nothing) to the metric's value."""
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def documented(page: str) -> set[str]:
    """Names in the first column of tables."""
    rows = re.findall(r"^\| (`outrider_.*?) \|", (DOCS / page).read_text("utf-8"), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)[`{]", row)}


def test_every_metric_is_documented_and_no_other():
    assert documented("operations.md") == {metric.full for metric in METRICS}
    assert len({metric.full for metric in METRICS}) == len(METRICS)


def test_it_says_what_was_counted():
    async def work() -> None:
        async with server(tokens={hash_token("s"): 'a"b\\c'}) as cloud:
            async with edge(cloud.port, drafter(), token="s") as runtime:
                same(await hear(await runtime.stream(ask(SHORT))), alone(SHORT))
                found = samples(exposition(cloud.status()))
            load = cloud.service.load
            assert found["outrider_verifier_forwards_total", ""] == load.forwards > 0
            assert found["outrider_verifier_rows_total", ""] == load.rows
            assert found["outrider_verifier_forward_seconds_total", ""] == load.forward_s > 0
            assert found["outrider_verifier_forward_sessions_total", ""] == load.forwards
            assert found["outrider_verifier_sessions_opened_total", ""] == 1
            assert found["outrider_verifier_tenant_share", 'a"b\\c'] > 0
            assert found["outrider_verifier_connections", ""] == 1

    run(work())


def test_a_refusal_is_counted_by_its_code():
    async def work() -> None:
        async with server(service={"max_sessions": 0}) as cloud, edge(cloud.port) as runtime:
            with pytest.raises(CloudError):
                await hear(await runtime.stream(ask(SHORT)))
            assert (
                samples(exposition(cloud.status()))["outrider_verifier_refused_total", "busy"] > 0
            )

    run(work())


def test_the_route_gives_it_to_a_login_and_health_says_when_it_drains():
    async def work() -> None:
        async with server(tokens={hash_token("s"): "me"}) as cloud:
            status, _ = await http(cloud.port, METRICS_PATH)
            assert status == 401
            status, body = await http(cloud.port, METRICS_PATH, "Authorization: Bearer s")
            assert status == 200
            assert samples(body.partition("\r\n\r\n")[2])["outrider_verifier_draining", ""] == 0
            assert (await http(cloud.port, HEALTH_PATH))[0] == 200
            cloud._stop_by = 0.0
            status, body = await http(cloud.port, HEALTH_PATH)
            assert (status, body.split()[-1]) == (503, "draining")
            cloud._stop_by = None

    run(work())

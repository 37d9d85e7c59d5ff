"""Counters of one gateway, in Prometheus' format. Names are documented in docs/api.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from outrider.gateway.admission import Room
from outrider.runtime.edge import EdgeRuntime
from outrider.runtime.edgestream import EdgeResult

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.5, 1.0)


class Metrics:
    """One registry a gateway: two in one process (tests) do not share counters."""

    def __init__(self, room: Room, runtime: EdgeRuntime) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._requests = Counter(
            "outrider_requests", "HTTP requests answered.", ["route", "status"], registry=registry
        )
        self._cancelled = Counter(
            "outrider_requests_cancelled", "Requests whose client went away.", registry=registry
        )
        self._tokens = Counter(
            "outrider_tokens", "Tokens of complete answers.", ["kind"], registry=registry
        )
        self._drafts = Counter(
            "outrider_drafts", "Drafted tokens, by what became of them.", ["fate"],
            registry=registry,
        )  # fmt: skip
        self._forwards = Counter(
            "outrider_target_forwards", "Rounds of the target model.", registry=registry
        )
        self._relaxed = Counter(
            "outrider_relaxed_tokens", "Tokens that stand although the target chose others.",
            registry=registry,
        )  # fmt: skip
        self._first = Histogram(
            "outrider_time_to_first_token_seconds", "From asking the cloud to the first token.",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._each = Histogram(
            "outrider_time_per_token_seconds", "Mean of an answer, after its first round.",
            buckets=TOKEN_SECONDS, registry=registry,
        )  # fmt: skip
        self._gauge("outrider_answers_active", "Answers being made.", lambda: room.active)
        self._gauge("outrider_requests_waiting", "Requests in the queue.", lambda: room.waiting)
        self._gauge("outrider_cloud_up", "1 while the link is up.", lambda: runtime.connected)
        for name, help_ in (("up", "Bytes to the cloud."), ("down", "Bytes from the cloud.")):
            self._gauge(
                f"outrider_link_bytes_{name}",
                help_,
                lambda name=name: getattr(runtime.link_use, f"bytes_{name}"),
            )
        self._gauge(
            "outrider_link_reconnects",
            "Links after the first.",
            lambda: runtime.link_use.reconnects,
        )

    def _gauge(self, name: str, help_: str, read) -> None:  # type: ignore[no-untyped-def]
        Gauge(name, help_, registry=self._registry).set_function(read)

    def answered(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def cancelled(self) -> None:
        self._cancelled.inc()

    def finished(self, prompt_tokens: int, results: Iterable[EdgeResult]) -> None:
        """The answers of a request are complete."""
        self._tokens.labels("prompt").inc(prompt_tokens)
        for result in results:
            made, counters = result.generation, result.generation.counters
            self._tokens.labels("completion").inc(made.completion_tokens)
            self._drafts.labels("accepted").inc(counters.accepted)
            self._drafts.labels("rejected").inc(counters.drafted - counters.accepted)
            self._drafts.labels("wasted").inc(result.wasted)
            self._forwards.inc(counters.rounds)
            self._relaxed.inc(counters.relaxed)
            self._first.observe(made.timing.ttft_s)
            if made.timing.tpot_s is not None:
                self._each.observe(made.timing.tpot_s)

    def text(self) -> bytes:
        return generate_latest(self._registry)

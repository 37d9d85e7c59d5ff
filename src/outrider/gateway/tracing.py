"""One trace span an answer, for whoever collects them: OpenTelemetry, or nothing at all.

A span says how an answer was made and what it took, and has an event for each round. It holds
counts and seconds: no prompt, no text, no token id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from outrider.runtime.edgerequest import EdgeRequest
from outrider.runtime.edgestream import EdgeResult
from outrider.session.generation import Step

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

PREFIX = "outrider."


class AnswerTrace(Protocol):
    """Told what becomes of one answer."""

    def round(self, step: Step) -> None:
        """A round came."""

    def end(self, result: EdgeResult | None, error: BaseException | None) -> None:
        """It is over; with an error if it did not come to its end. Called once."""


class Tracing(Protocol):
    """Where answers are traced to."""

    def answer(self, index: int, request: EdgeRequest) -> AnswerTrace:
        """An answer begins."""

    def close(self) -> None:
        """Send what is not sent yet."""


class NoTracing:
    """Nobody collects: the default."""

    def answer(self, index: int, request: EdgeRequest) -> AnswerTrace:  # noqa: ARG002
        return self

    def round(self, step: Step) -> None: ...

    def end(self, result: EdgeResult | None, error: BaseException | None) -> None: ...

    def close(self) -> None: ...


class SpanTracing:
    """Spans of an OpenTelemetry tracer."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def answer(self, index: int, request: EdgeRequest) -> AnswerTrace:
        facts = {
            "choice": index,
            "prompt_tokens": len(request.prompt_ids),
            "schedule": request.schedule.value,
            "controller": request.controller,
            "rule": request.rule.value,
        }
        return _SpanTrace(self._tracer.start_span("outrider.answer", attributes=_named(facts)))

    def close(self) -> None: ...


class _SpanTrace:
    def __init__(self, span: Span) -> None:
        self._span = span
        self._queue_s = 0.0

    def round(self, step: Step) -> None:
        facts: dict[str, Any] = {"tokens": len(step.tokens)}
        if step.round is not None:
            self._queue_s += step.round.queue_s
            facts |= {
                "drafted": step.round.drafted,
                "accepted": step.round.accepted,
                "window": step.round.window,
                "queue_s": step.round.queue_s,
                "step_s": step.round.step_s,
            }
        self._span.add_event("round", _named(facts))

    def end(self, result: EdgeResult | None, error: BaseException | None) -> None:
        from opentelemetry.trace import StatusCode

        if result is not None:
            self._span.set_attributes(_named(self._summary(result)))
        if isinstance(error, Exception):  # by its kind alone: its text may quote what was asked
            self._span.set_status(StatusCode.ERROR, type(error).__name__)
        elif error is not None:
            self._span.set_attributes(_named({"cancelled": True}))
        self._span.end()

    def _summary(self, result: EdgeResult) -> dict[str, Any]:
        made, counters = result.generation, result.generation.counters
        facts: dict[str, Any] = {
            "completion_tokens": made.completion_tokens,
            "forwards": counters.rounds,
            "drafted": counters.drafted,
            "accepted": counters.accepted,
            "wasted": result.wasted,
            "queue_s": self._queue_s,
            "ttft_s": made.timing.ttft_s,
            "total_s": made.timing.total_s,
            "bytes_up": result.link.bytes_up,
            "bytes_down": result.link.bytes_down,
        }
        if counters.drafted:
            facts["acceptance"] = counters.accepted / counters.drafted
        if made.finish_reason is not None:
            facts["finish_reason"] = made.finish_reason.value
        return facts


def _named(facts: dict[str, Any]) -> dict[str, Any]:
    return {PREFIX + name: value for name, value in facts.items()}


class Exported(SpanTracing):
    """Spans sent by OTLP over HTTP, to where OTEL_EXPORTER_OTLP_ENDPOINT and its kin say. Close it
    to send the last ones. Raises ModuleNotFoundError without the extra `otel`."""

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # OTEL_SERVICE_NAME goes before ours.
        resource = Resource.create({SERVICE_NAME: "outrider"}).merge(Resource.create())
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        super().__init__(self._provider.get_tracer("outrider.gateway"))

    def close(self) -> None:
        self._provider.shutdown()

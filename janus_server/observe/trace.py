"""Spans of requests, exported over OTLP/HTTP where `--otlp-endpoint` asks for it. Needs the optional extra `otel`.

`serve` opens a `Tracer`, `http.access` hands it each request once that is over. Spans are made then, with the times
that were taken meanwhile, so tracing costs a running request nothing; OpenTelemetry's own thread sends them from a
bounded queue and drops what does not fit. Nothing of OpenTelemetry is imported unless a tracer is opened. Attributes
follow the GenAI conventions, and vLLM's names where those have none; texts are never in them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from janus_server.errors import BadConfig
from janus_server.types import CallFacts, Request

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer as OtelTracer

_NS = 10**9
_TRACES_PATH: Final = "/v1/traces"
_REMEDY: Final = (
    "--otlp-endpoint needs OpenTelemetry, which is not installed; run: pip install 'janus-server[otel]' (the packages "
    "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http)"
)
_OPERATIONS: Final[Mapping[str, str]] = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings"}

Value = str | int | float | bool | list[str]


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """The generating part of a request. arrived_s is from the request's own start to when its body was read."""

    kind: str
    response_id: str
    request: Request
    choices: int
    arrived_s: float
    facts: CallFacts


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """One request that is over, as spans tell of it. start_ns is the wall clock; carrier the trace headers it brought.

    end says why it ended: reasons of its choices, the code of a refusal, or client_left. failed: by our fault, which
    the status does not tell of a stream that had begun.
    """

    id: str
    method: str
    route: str
    status: int
    start_ns: int
    total_s: float
    end: str | None
    failed: bool
    carrier: Mapping[str, str]
    ran: Ran | None


class Tracer:
    """Turns finished requests into spans. `record` never waits; `close` gives the last ones a moment to leave."""

    def __init__(self, provider: TracerProvider, tracer: OtelTracer) -> None:
        self._provider = provider
        self._tracer = tracer

    @staticmethod
    def open(endpoint: str, version: str) -> Tracer:
        """A tracer whose spans go to that collector; BadConfig where OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise BadConfig(_REMEDY) from None
        resource = Resource.create({"service.name": "janus", "service.version": version})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(endpoint))))
        return Tracer(provider, provider.get_tracer("janus_server", version))

    def record(self, one: Finished) -> None:
        """The spans of a request: the request itself, what it generated, and the phases of that."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(dict(one.carrier))
        span = self._tracer.start_span(
            f"{one.method} {one.route}", context, SpanKind.SERVER, dict(_server_attributes(one)), None, one.start_ns
        )
        if one.failed:
            span.set_status(Status(StatusCode.ERROR))
        if one.ran is not None and span.is_recording():
            self._record_run(one.ran, one.start_ns, one.total_s, set_span_in_context(span))
        span.end(one.start_ns + round(one.total_s * _NS))

    def close(self, timeout_s: float = 3.0) -> None:
        """Send what is queued, but let a collector that does not answer hold up nobody's exit."""
        last = threading.Thread(target=self._provider.shutdown, name="janus-otlp-last", daemon=True)
        last.start()
        last.join(timeout_s)

    def _record_run(self, ran: Ran, start_ns: int, total_s: float, context: Any) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation import set_span_in_context

        arrived_ns = start_ns + round(ran.arrived_s * _NS)
        name = f"{_OPERATIONS.get(ran.kind, ran.kind)} {ran.facts.model}"
        span = self._tracer.start_span(name, context, SpanKind.INTERNAL, dict(_run_attributes(ran)), None, arrived_ns)
        inside = set_span_in_context(span)
        for phase, begin_s, end_s in _phases(ran.facts):
            child = self._tracer.start_span(
                phase, inside, SpanKind.INTERNAL, None, None, arrived_ns + round(begin_s * _NS)
            )
            child.end(arrived_ns + round(end_s * _NS))
        span.end(start_ns + round(total_s * _NS))


def traces_url(endpoint: str) -> str:
    """Where traces are sent: a bare collector's address gets OTLP's own path, any other path is taken as it is."""
    scheme, _, rest = endpoint.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host}{slash}{path}" if path else f"{scheme}://{host}{_TRACES_PATH}"


def _server_attributes(one: Finished) -> Iterator[tuple[str, Value]]:
    yield "http.request.method", one.method
    yield "http.route", one.route
    yield "http.response.status_code", one.status
    yield "janus.request_id", one.id
    if one.end is not None:
        yield "janus.end", one.end
    if one.failed or one.status >= 400:
        yield "error.type", one.end or str(one.status)


def _run_attributes(ran: Ran) -> Iterator[tuple[str, Value]]:
    facts, request, sampling = ran.facts, ran.request, ran.request.sampling
    yield "gen_ai.operation.name", _OPERATIONS.get(ran.kind, ran.kind)
    yield "gen_ai.provider.name", "janus"
    yield "gen_ai.request.model", facts.application or facts.model
    yield "gen_ai.response.model", facts.model
    yield "gen_ai.response.id", ran.response_id
    yield "gen_ai.request.max_tokens", request.max_tokens
    yield "gen_ai.request.temperature", sampling.temperature
    yield "gen_ai.request.top_p", sampling.top_p
    yield "gen_ai.request.top_k", float(sampling.top_k)
    yield "gen_ai.request.choice.count", ran.choices
    yield "gen_ai.usage.input_tokens", facts.prompt_tokens
    yield "gen_ai.usage.output_tokens", facts.completion_tokens
    yield "gen_ai.usage.cache_read.input_tokens", facts.cached_tokens
    if facts.ends:
        yield "gen_ai.response.finish_reasons", list(facts.ends)
    yield "gen_ai.latency.e2e", facts.total_s
    if facts.queue_s is not None:
        yield "gen_ai.latency.time_in_queue", facts.queue_s
    if facts.ttft_s is not None:
        yield "gen_ai.latency.time_to_first_token", facts.ttft_s


def _phases(facts: CallFacts) -> Iterator[tuple[str, float, float]]:
    """The phases that were entered, from and to in seconds after arrival; one that was cut off ends with the call."""
    queued_s = facts.queue_s
    if queued_s is None:
        yield "queue", 0.0, facts.ttft_s if facts.ttft_s is not None else facts.total_s
        return
    yield "queue", 0.0, queued_s
    first_s = facts.ttft_s
    yield "prefill", queued_s, max(queued_s, facts.total_s if first_s is None else first_s)
    if first_s is not None and facts.last_s is not None:
        yield "decode", max(queued_s, first_s), max(queued_s, facts.last_s)

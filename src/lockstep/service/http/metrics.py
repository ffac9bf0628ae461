"""Figures for Prometheus: of the HTTP side as they happen, of the service when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lockstep.service.requests import ServiceStatus

MEDIA = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """A registry of its own: two servers in one process do not share figures."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        r = self._registry
        self._calls = Counter("lockstep_http_calls", "Calls answered", ["path", "status"], registry=r)
        self._seconds = Histogram(
            "lockstep_http_call_seconds", "From the headers to the end of the answer", ["path"], buckets=BUCKETS,
            registry=r,
        )  # fmt: skip
        self._active = Gauge("lockstep_http_active_calls", "Calls under way that sample or score", registry=r)
        self._admitted = Counter("lockstep_http_rollouts", "Requests submitted to the service", registry=r)
        self._tokens = Counter("lockstep_http_tokens", "Tokens of finished calls", ["kind"], registry=r)
        self._broken = Counter("lockstep_http_broken_streams", "Streams that ended with an error", ["code"], registry=r)
        self._gone = Counter("lockstep_http_clients_gone", "Clients that left or stopped reading", registry=r)

    def called(self, path: str, status: int, seconds: float) -> None:
        self._calls.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def active(self, count: int) -> None:
        self._active.set(count)

    def admitted(self, count: int) -> None:
        self._admitted.inc(count)

    def sampled(self, usage: Mapping[str, int]) -> None:
        self._tokens.labels("prompt").inc(usage["prompt_tokens"])
        self._tokens.labels("completion").inc(usage["completion_tokens"])

    def broke(self, code: str) -> None:
        self._broken.labels(code).inc()

    def gone(self) -> None:
        self._gone.inc()

    def text(self, status: ServiceStatus) -> bytes:
        """Everything, in Prometheus' text format."""
        everything = CollectorRegistry()
        everything.register(_Counted(self._registry))
        everything.register(_Service(status))
        return generate_latest(everything)


class _Counted:
    """What a registry counts, without the `_created` series that the library adds to each (its own switch for them
    would be one for every registry of the process)."""

    def __init__(self, registry: CollectorRegistry):
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class _Service:
    """The service's own status as metrics."""

    def __init__(self, status: ServiceStatus):
        self._status = status

    def collect(self) -> Iterable[Metric]:
        s = self._status
        yield GaugeMetricFamily("lockstep_paused", "1 where nothing is sent to replicas", float(s.paused))
        yield GaugeMetricFamily("lockstep_requests_waiting", "Requests not at a replica", s.waiting)
        yield GaugeMetricFamily("lockstep_requests_running", "Requests at a replica", s.running)
        yield CounterMetricFamily("lockstep_requests_redispatched", "Requests sent again", s.redispatched)
        version = -1 if s.published is None else s.published.number
        yield GaugeMetricFamily("lockstep_published_version", "Newest version that is served; -1: none", version)
        lost = -1 if s.lost is None else s.lost.number
        yield GaugeMetricFamily("lockstep_lost_version", "Published last, and nobody has it any more; -1: none", lost)
        for what, count in s.freed.items():
            yield CounterMetricFamily(f"lockstep_retired_{what}", f"Let go of old versions: {what}", count)
        ended = CounterMetricFamily("lockstep_requests_ended", "Requests by outcome", labels=["outcome"])
        for outcome, count in s.ended.items():
            ended.add_metric([outcome], count)
        yield ended
        yield from self._replicas()

    def _replicas(self) -> Iterable[Metric]:
        def gauge(name: str, words: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"lockstep_replica_{name}", words, labels=["replica", *labels])

        alive = gauge("alive", "1 where the replica answers")
        accepting = gauge("accepting", "1 where it gets new requests")
        active = gauge("active_version", "The version it serves; -1: none")
        samples = gauge("samples", "Samples by state", "state")
        pages = gauge("pages", "Cache pages by state", "state")
        rate = gauge("tokens_per_second", "Completion tokens over the last seconds")
        tokens = CounterMetricFamily("lockstep_replica_tokens", "Completion tokens", labels=["replica"])
        for r in self._status.replicas:
            alive.add_metric([r.name], float(r.alive))
            accepting.add_metric([r.name], float(r.accepting))
            active.add_metric([r.name], -1 if r.active is None else r.active.number)
            if (e := r.engine) is None:
                continue
            samples.add_metric([r.name, "running"], e.running)
            samples.add_metric([r.name, "waiting"], e.waiting)
            for state, count in zip(("free", "cached", "used", "total"), e.pages, strict=True):
                pages.add_metric([r.name, state], count)
            rate.add_metric([r.name], e.tokens_per_s)
            tokens.add_metric([r.name], e.tokens)
        return (alive, accepting, active, samples, pages, rate, tokens)

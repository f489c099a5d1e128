"""A server's Prometheus metrics; docs/serve.md lists them."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"tachyscope_{name}", about, labels, registry=self.registry)

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(f"tachyscope_{name}", about, labels, registry=self.registry)

        def histogram(name: str, about: str) -> Histogram:
            return Histogram(f"tachyscope_{name}", about, registry=self.registry, buckets=SECONDS)

        self.sessions = gauge("sessions", "Sessions by state.", "state")
        self.reserved = gauge("reserved_bytes", "Memory reserved for resident sessions.")
        self.budget = gauge("budget_bytes", "Memory that sessions may reserve.")
        self.opened = counter("sessions_opened", "Sessions begun or resumed.", "how")
        self.ended = counter("sessions_ended", "Sessions and connections ended.", "why")
        self.refused = counter("refused", "Requests refused.", "why")
        self.messages = counter("messages", "Clients' messages.", "type")
        self.steps = counter("steps", "Chunks made.", "lane")
        self.made = counter("frames_made", "Frames made.")
        self.sent = counter("frames_sent", "Frames sent.")
        self.dropped = counter("frames_dropped", "Frames replaced by newer ones before sending.")
        self.step_s = histogram("step_seconds", "Time of a chunk, decoding included.")
        self.wait_s = histogram("wait_seconds", "Time a due session waited for its turn.")
        self.key_s = histogram("key_to_frame_seconds", "From a key's message to its first frame.")
        self.snapshots = counter("snapshots", "Snapshots by result.", "result")
        self.snapshot_bytes = counter("snapshot_bytes", "Bytes of snapshots written.")
        self.pairs = counter("pairs", "Query-key pairs.", "kind")
        self.rows = counter("mlp_rows", "Rows of MLPs.", "kind")
        self.cache = gauge("cache_bytes", "Last chunk's cache, and what dense would hold.", "kind")
        self.jobs = gauge("jobs", "Videos by state.", "state")

    def count(self, stats: Mapping[str, float]) -> None:
        """Add a chunk's row of the meter."""
        self.pairs.labels("read").inc(stats.get("pairs", 0.0))
        self.pairs.labels("dense").inc(stats.get("pairs_dense", 0.0))
        self.rows.labels("computed").inc(stats.get("rows_computed", 0.0))
        self.rows.labels("replayed").inc(stats.get("rows_replayed", 0.0))

    def text(self) -> bytes:
        return generate_latest(self.registry)

"""Counters of the server, and their families for GET /metrics: llama-server's names, and kvs's own.

    engine thread   requests ─ Metrics: sums that only grow
    event loop      a scrape ─ MetricsCollector: those sums, the ``Present``, and rates since the scrape before
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvs_cli.server.slot import ParkedTotals
from kvs_core.engine.reports import KvReport
from kvs_core.speculative.drafter import DraftStats


@dataclass(slots=True)
class Drafted:
    """What the drafts of one type came to, of all requests."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Metrics:
    """Sums since the start. The engine's thread counts, others read. drafted: by type of drafter."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_s: float = 0.0
    predicted_tokens: int = 0
    predicted_s: float = 0.0
    decodes: int = 0
    longest_tokens: int = 0
    drafted: dict[str, Drafted] = field(default_factory=dict)
    accepted_by_position: list[int] = field(default_factory=list)

    def add_prompt(self, tokens: int, seconds: float) -> None:
        """Prompt tokens that were run."""
        self.prompt_tokens += tokens
        self.prompt_s += seconds
        self.decodes += 1

    def add_text(self, tokens: int, seconds: float, held: int, drafts: Mapping[str, DraftStats]) -> None:
        """A request that ended with ``held`` tokens in the slot, and what its drafters did, by type."""
        for name, stats in drafts.items():
            drafted = self.drafted.setdefault(name, Drafted())
            drafted.drafts += stats.drafts
            drafted.tokens += stats.drafted_tokens
            drafted.accepted += stats.accepted_tokens
            missing = len(stats.accepted_at) - len(self.accepted_by_position)
            self.accepted_by_position += [0] * missing
            for position, count in enumerate(stats.accepted_at):
                self.accepted_by_position[position] += count
        self.predicted_tokens += tokens
        self.predicted_s += seconds
        self.decodes += tokens
        self.longest_tokens = max(self.longest_tokens, held)


@dataclass(frozen=True, slots=True)
class Present:
    """The server at the time of a scrape. link_bytes_per_s: of large copies to the device, as probed."""

    processing: bool
    waiting: int
    kv: KvReport
    link_bytes_per_s: float
    parked: ParkedTotals


class MetricsCollector(Collector):
    """All families, for a registry of their own. For one thread: a scrape notes where the next one's rates begin."""

    def __init__(self, metrics: Metrics, look: Callable[[], Present]) -> None:
        """``look``: called once in each scrape."""
        self._metrics = metrics
        self._look = look
        self._prompt = _Rate()
        self._text = _Rate()
        self._copies = _Rate()
        self._began_s = time.perf_counter()

    def collect(self) -> Iterator[Metric]:
        """Llama-server's families, then kvs's."""
        present = self._look()
        yield from self._requests(present)
        yield from _kv(present.kv)
        yield from self._own(present)

    def _requests(self, present: Present) -> Iterator[Metric]:
        """Under llama-server's names."""
        seen = self._metrics
        drafted = list(seen.drafted.values())   # at once: a request that ends may add a type
        for name, text, value in (
            ("prompt_tokens_total", "Number of prompt tokens processed.", seen.prompt_tokens),
            ("prompt_tokens_cached_total", "Number of prompt tokens reused from the cache.", seen.cached_tokens),
            ("prompt_seconds_total", "Prompt process time", seen.prompt_s),
            ("tokens_predicted_total", "Number of generation tokens processed.", seen.predicted_tokens),
            ("tokens_predicted_seconds_total", "Predict process time", seen.predicted_s),
            ("n_decode_total", "Total number of engine steps", seen.decodes),
            ("spec_decode_num_draft_tokens_total", "Number of drafted tokens.", sum(each.tokens for each in drafted)),
            ("spec_decode_num_accepted_tokens_total", "Number of accepted draft tokens.",
             sum(each.accepted for each in drafted)),
            ("spec_decode_num_drafts_total", "Number of drafts.", sum(each.drafts for each in drafted)),
        ):
            yield CounterMetricFamily(f"llamacpp:{name}", text, value)
        if seen.accepted_by_position:
            by_position = CounterMetricFamily(
                "llamacpp:spec_decode_num_accepted_tokens_per_pos_total", "Accepted draft tokens by position.",
                labels=["position"],
            )
            for position, count in enumerate(seen.accepted_by_position):
                by_position.add_metric([str(position)], count)
            yield by_position
        for name, text, value in (
            ("n_tokens_max", "Largest observed number of tokens in the slot.", seen.longest_tokens),
            ("prompt_tokens_seconds", "Average prompt throughput in tokens/s.",
             self._prompt.since_last(seen.prompt_tokens, seen.prompt_s)),
            ("predicted_tokens_seconds", "Average generation throughput in tokens/s.",
             self._text.since_last(seen.predicted_tokens, seen.predicted_s)),
            ("requests_processing", "Number of requests processing.", present.processing),
            ("requests_deferred", "Number of requests deferred.", present.waiting),
            ("n_busy_slots_per_decode", "Average number of busy slots per step", seen.decodes > 0),
        ):
            yield GaugeMetricFamily(f"llamacpp:{name}", text, value)

    def _own(self, present: Present) -> Iterator[Metric]:
        """The link, hits, the queue, what is set aside, and drafts by type."""
        link = present.link_bytes_per_s
        copied_per_s = self._copies.since_last(present.kv.h2d_bytes, time.perf_counter() - self._began_s)
        for name, text, value in (
            ("link_bytes_per_second", "Rate of large copies to the device, measured at start.", link),
            ("link_share", "Part of that rate which copies used since the last scrape.",
             copied_per_s / link if link > 0 else 0.0),
            ("queue_length", "Requests that wait for their turn.", present.waiting),
            ("parked_conversations", "Conversations that are set aside.", present.parked.conversations),
            ("parked_bytes", "Bytes of host memory that these hold.", present.parked.size_bytes),
        ):
            yield GaugeMetricFamily(f"kvs:{name}", text, value)
        yield CounterMetricFamily(
            "kvs:cached_tokens_total", "Prompt tokens that were there already.", self._metrics.cached_tokens)
        if self._metrics.drafted:
            yield from _drafts(self._metrics.drafted)


class _Rate:
    """A rate over what came since the last time: its reader alone keeps where that was."""

    def __init__(self) -> None:
        self._amount = self._took_s = 0.0

    def since_last(self, amount: float, took_s: float) -> float:
        """Per second. Both are sums since the start; 0 where no time went by."""
        more, more_s = amount - self._amount, took_s - self._took_s
        self._amount, self._took_s = amount, took_s
        return more / more_s if more_s > 0 else 0.0


def _drafts(by_type: Mapping[str, Drafted]) -> Iterator[Metric]:
    """Counts by type of drafter, and the part of its tokens that was accepted."""
    drafts = CounterMetricFamily("kvs:drafts_total", "Drafts that were verified.", labels=["type"])
    tokens = CounterMetricFamily("kvs:draft_tokens_total", "Tokens of drafts that were verified.", labels=["type"])
    accepted = CounterMetricFamily(
        "kvs:draft_accepted_tokens_total", "Tokens of drafts that were accepted.", labels=["type"])
    share = GaugeMetricFamily("kvs:draft_acceptance", "Accepted part of the drafted tokens.", labels=["type"])
    for name, each in sorted(by_type.items()):
        drafts.add_metric([name], each.drafts)
        tokens.add_metric([name], each.tokens)
        accepted.add_metric([name], each.accepted)
        share.add_metric([name], each.accepted / each.tokens if each.tokens else 0.0)
    yield from (drafts, tokens, accepted, share)


def _kv(kv: KvReport) -> Iterator[Metric]:
    """Pages by place, and what was copied."""
    stats = kv.stats
    for name, text, value in (
        ("pool_pages", "Page slots of the arena.", stats.pool_pages),
        ("resident_pages", "Pages that stay on the device.", stats.resident_pages),
        ("ring_slots", "Page slots of the ring.", stats.ring_slots),
        ("active_pages", "Pages that hold rows.", stats.active_pages),
        ("streamed_pages_per_step", "Pages copied to the device in a step.", stats.streamed_pages_per_step),
        ("history_bytes", "Bytes of the history in host memory.", stats.history_bytes),
        ("arena_bytes", "Bytes of the arena.", kv.arena_bytes),
    ):
        yield GaugeMetricFamily(f"kvs:{name}", text, value)
    for name, text, total in (
        ("h2d_bytes_total", "Bytes copied to the device.", kv.h2d_bytes),
        ("h2d_calls_total", "Copies to the device.", kv.h2d_calls),
        ("d2h_bytes_total", "Bytes published to the history.", kv.d2h_bytes),
        ("stall_seconds_total", "Time that steps waited for copies.",
         None if kv.stall_ms is None else kv.stall_ms / 1e3),
        ("repartitions_total", "Changes of which pages stay on the device.", stats.repartitions),
    ):
        if total is not None:
            yield CounterMetricFamily(f"kvs:{name}", text, total)

"""Counters of the server, and their text form for GET /metrics: llama-server's names, and kvs's own.

The engine's thread counts; the event loop reads. Rates are averages since the last time they were read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvs_core.engine.engine import KvReport
from kvs_core.speculative.drafter import DraftStats


@dataclass(slots=True)
class Drafted:
    """What the drafts of one type came to, of all requests."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Metrics:
    """Sums since the start; ``since_*`` since the last scrape, which was at ``scraped_s``. drafted: by type of drafter.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_s: float = 0.0
    predicted_tokens: int = 0
    predicted_s: float = 0.0
    decodes: int = 0
    longest_tokens: int = 0
    drafted: dict[str, Drafted] = field(default_factory=dict)
    accepted_by_position: list[int] = field(default_factory=list)
    since_prompt_tokens: int = 0
    since_prompt_s: float = 0.0
    since_predicted_tokens: int = 0
    since_predicted_s: float = 0.0
    scraped_s: float = field(default_factory=time.perf_counter)
    scraped_h2d_bytes: int = 0

    def add_prompt(self, tokens: int, seconds: float) -> None:
        """Prompt tokens that were run."""
        self.prompt_tokens += tokens
        self.prompt_s += seconds
        self.since_prompt_tokens += tokens
        self.since_prompt_s += seconds
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
        self.since_predicted_tokens += tokens
        self.since_predicted_s += seconds
        self.decodes += tokens
        self.longest_tokens = max(self.longest_tokens, held)

    def text(self, *, processing: int, waiting: int, kv: KvReport, link_bytes_per_s: float) -> str:
        """The exposition, version 0.0.4. Resets the rates. link_bytes_per_s: of large copies to the device, as probed.
        """
        prompt_rate = self.since_prompt_tokens / self.since_prompt_s if self.since_prompt_s > 0 else 0.0
        rate = self.since_predicted_tokens / self.since_predicted_s if self.since_predicted_s > 0 else 0.0
        self.since_prompt_tokens = self.since_predicted_tokens = 0
        self.since_prompt_s = self.since_predicted_s = 0.0
        drafted = list(self.drafted.values())   # at once: a request that ends may add a type
        lines: list[str] = []
        for name, help_text, value in (
            ("prompt_tokens_total", "Number of prompt tokens processed.", self.prompt_tokens),
            ("prompt_tokens_cached_total", "Number of prompt tokens reused from the cache.", self.cached_tokens),
            ("prompt_seconds_total", "Prompt process time", self.prompt_s),
            ("tokens_predicted_total", "Number of generation tokens processed.", self.predicted_tokens),
            ("tokens_predicted_seconds_total", "Predict process time", self.predicted_s),
            ("n_decode_total", "Total number of engine steps", self.decodes),
            ("n_tokens_max", "Largest observed number of tokens in the slot.", self.longest_tokens),
            ("spec_decode_num_draft_tokens_total", "Number of drafted tokens.", sum(each.tokens for each in drafted)),
            ("spec_decode_num_accepted_tokens_total", "Number of accepted draft tokens.",
             sum(each.accepted for each in drafted)),
            ("spec_decode_num_drafts_total", "Number of drafts.", sum(each.drafts for each in drafted)),
        ):
            lines += _metric("llamacpp", name, "counter", help_text, value)
        if self.accepted_by_position:
            name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f"# HELP {name} Accepted draft tokens by position.", f"# TYPE {name} counter"]
            lines += [f'{name}{{position="{at}"}} {count}' for at, count in enumerate(self.accepted_by_position)]
        for name, help_text, value in (
            ("prompt_tokens_seconds", "Average prompt throughput in tokens/s.", prompt_rate),
            ("predicted_tokens_seconds", "Average generation throughput in tokens/s.", rate),
            ("requests_processing", "Number of requests processing.", processing),
            ("requests_deferred", "Number of requests deferred.", waiting),
            ("n_busy_slots_per_decode", "Average number of busy slots per step", float(self.decodes > 0)),
        ):
            lines += _metric("llamacpp", name, "gauge", help_text, value)
        lines += _kv_lines(kv)
        for name, kind, help_text, value in (
            ("link_bytes_per_second", "gauge", "Rate of large copies to the device, measured at start.",
             link_bytes_per_s),
            ("link_share", "gauge", "Part of that rate which copies used since the last scrape.",
             self._link_share(kv.h2d_bytes, link_bytes_per_s)),
            ("cached_tokens_total", "counter", "Prompt tokens that were there already.", self.cached_tokens),
            ("queue_length", "gauge", "Requests that wait for their turn.", waiting),
        ):
            lines += _metric("kvs", name, kind, help_text, value)
        lines += self._draft_lines()
        return "\n".join(lines) + "\n"

    def _link_share(self, h2d_bytes: int, link_bytes_per_s: float) -> float:
        now_s = time.perf_counter()
        took_s, self.scraped_s = now_s - self.scraped_s, now_s
        copied, self.scraped_h2d_bytes = h2d_bytes - self.scraped_h2d_bytes, h2d_bytes
        return copied / (link_bytes_per_s * took_s) if took_s > 0 and link_bytes_per_s > 0 else 0.0

    def _draft_lines(self) -> Iterator[str]:
        """Counts by type of drafter, and the part of its tokens that was accepted."""
        drafted = sorted(self.drafted.items())
        if not drafted:
            return
        for name, kind, help_text, values in (
            ("drafts_total", "counter", "Drafts that were verified.", [each.drafts for _, each in drafted]),
            ("draft_tokens_total", "counter", "Tokens of drafts that were verified.",
             [each.tokens for _, each in drafted]),
            ("draft_accepted_tokens_total", "counter", "Tokens of drafts that were accepted.",
             [each.accepted for _, each in drafted]),
            ("draft_acceptance", "gauge", "Accepted part of the drafted tokens.",
             [each.accepted / each.tokens if each.tokens else 0.0 for _, each in drafted]),
        ):
            yield f"# HELP kvs:{name} {help_text}"
            yield f"# TYPE kvs:{name} {kind}"
            for (drafter, _), value in zip(drafted, values, strict=True):
                yield f'kvs:{name}{{type="{drafter}"}} {value}'


def _kv_lines(kv: KvReport) -> Iterable[str]:
    stats = kv.stats
    for name, kind, help_text, value in (
        ("pool_pages", "gauge", "Page slots of the arena.", stats.pool_pages),
        ("resident_pages", "gauge", "Pages that stay on the device.", stats.resident_pages),
        ("ring_slots", "gauge", "Page slots of the ring.", stats.ring_slots),
        ("active_pages", "gauge", "Pages that hold rows.", stats.active_pages),
        ("streamed_pages_per_step", "gauge", "Pages copied to the device in a step.", stats.streamed_pages_per_step),
        ("history_bytes", "gauge", "Bytes of the history in host memory.", stats.history_bytes),
        ("arena_bytes", "gauge", "Bytes of the arena.", kv.arena_bytes),
        ("h2d_bytes_total", "counter", "Bytes copied to the device.", kv.h2d_bytes),
        ("h2d_calls_total", "counter", "Copies to the device.", kv.h2d_calls),
        ("d2h_bytes_total", "counter", "Bytes published to the history.", kv.d2h_bytes),
        (
            "stall_seconds_total", "counter", "Time that steps waited for copies.",
            None if kv.stall_ms is None else kv.stall_ms / 1e3,
        ),
        ("repartitions_total", "counter", "Changes of which pages stay on the device.", stats.repartitions),
    ):
        if value is not None:
            yield from _metric("kvs", name, kind, help_text, value)


def _metric(prefix: str, name: str, kind: str, help_text: str, value: float) -> list[str]:
    full = f"{prefix}:{name}"
    return [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}", f"{full} {value}"]

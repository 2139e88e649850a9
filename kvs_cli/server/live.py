"""``GET /kvs/live``: what the engine does right now, for the page: where pages are, the link, speed, drafts, the queue.

    engine thread   a step's border ─ look ─ Snapshot, at most a few per second, and none where nobody asks
    event loop      a poll ─ as_json: the last snapshot, with what ``SlotView`` says by now
                    a scrape of /metrics ─ its counters
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvs_cli.server.slot import Conversation, SlotView
from kvs_core.engine.reports import KvReport
from kvs_core.engine.speculation import Speculation
from kvs_core.streaming.places import LayerPlaces

PLACES = ("resident", "ring", "host")
"""Where a page is: on the device to stay, there for this step or the next, in host memory alone; or no longer there
either, if a sliding window has passed it."""

_EVERY_S = 0.25    # between two snapshots
_WANTED_S = 5.0    # after a poll, snapshots are made for that long
_WINDOW_S = 2.0    # rates are averages over about as much


@dataclass(frozen=True, slots=True)
class DraftCount:
    """What one drafter did in the request in progress, or in the last one."""

    name: str
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine between two steps. Rates per second; None: not known yet."""

    tokens: int
    places: tuple[LayerPlaces, ...]
    report: KvReport
    drafters: tuple[DraftCount, ...]
    tokens_per_s: float | None = None
    copied_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Sample:
    """Tokens and copied bytes so far, at one time."""

    time_s: float
    tokens: int
    copied: int


class LiveView:
    """The engine's thread looks, others read what it saw."""

    def __init__(
        self, conversation: Conversation, view: SlotView, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """In the engine's thread. ``clock``: seconds that never go back."""
        self._conversation = conversation
        self._view = view
        self._clock = clock
        engine = conversation.session.engine
        self.link_bytes_per_s = engine.link_bytes_per_s
        self._layer_numbers = engine.kv_layer_numbers
        self._context_tokens = engine.context.context_tokens
        self._next_s = self._wanted_until_s = 0.0
        self._samples: deque[_Sample] = deque()
        self._sampled: tuple[int, bool] | None = None   # the request, and whether it writes by now
        self.look(always=True)

    def polled(self, again_s: float = 0.0) -> None:
        """From any thread: somebody reads, and will within ``again_s`` or soon, so snapshots are worth their while."""
        self._wanted_until_s = max(self._wanted_until_s, self._clock() + max(again_s, _WANTED_S))

    def look(self, speculation: Speculation | None = None, *, always: bool = False) -> None:
        """In the engine's thread, between steps: make a snapshot if one is due. ``speculation``: of this request."""
        now_s = self._clock()
        if not always and (now_s < self._next_s or now_s > self._wanted_until_s):
            return
        self._next_s = now_s + _EVERY_S
        session = self._conversation.session
        report = session.engine.report()
        tokens_per_s, copied_per_s = self._rates(now_s, report.h2d_bytes)
        self.snapshot = Snapshot(
            len(session.tokens), tuple(session.engine.places()), report,
            () if speculation is None else tuple(
                DraftCount(name, each.drafted_tokens, each.accepted_tokens) for name, each in speculation.stats.items()
            ),
            tokens_per_s, copied_per_s,
        )  # fmt: skip

    def as_json(self, waiting: int) -> dict[str, Any]:
        """The reply, with ``waiting`` requests in the queue. An idle engine has no rates."""
        view, seen = self._view, self.snapshot
        stats, report = seen.report.stats, seen.report
        state = "idle" if not view.processing else "text" if view.decoded else "prompt"
        busy = state != "idle"
        return {
            "state": state,
            "queue": waiting,
            "context": {"tokens": seen.tokens, "size": self._context_tokens},
            "prompt": {
                "tokens": view.prompt_tokens, "processed": view.prompt_processed, "cached": view.prompt_cached,
            },
            "decoded": view.decoded,
            "tokens_per_s": seen.tokens_per_s if busy else None,
            "drafters": [
                {"name": each.name, "drafted": each.drafted, "accepted": each.accepted} for each in seen.drafters
            ],
            "link": {
                "bytes_per_s": seen.copied_per_s if busy else None,
                "probed_bytes_per_s": self.link_bytes_per_s,
                "h2d_bytes": report.h2d_bytes,
                "d2h_bytes": report.d2h_bytes,
            },
            "pages": {
                "mode": report.mode,
                "page_tokens": report.page_tokens,
                "page_bytes": report.page_bytes,
                "pool_pages": stats.pool_pages,
                "ring_slots": stats.ring_slots,
                "streamed_pages_per_step": stats.streamed_pages_per_step,
                "history_bytes": stats.history_bytes,
                "places": PLACES,
                "layers": [
                    {"layer": number, "runs": list(place_runs(each))}
                    for number, each in zip(self._layer_numbers, seen.places, strict=True)
                ],
            },
        }  # fmt: skip

    def _rates(self, now_s: float, copied: int) -> tuple[float | None, float | None]:
        """Of tokens and of copied bytes, since this request began to read or to write, or for about the window."""
        view = self._view
        writes = view.decoded > 0
        if self._sampled != (view.task, writes):
            self._sampled = (view.task, writes)
            self._samples.clear()
        samples = self._samples
        samples.append(_Sample(now_s, view.decoded if writes else view.prompt_processed, copied))
        while len(samples) > 2 and samples[1].time_s <= now_s - _WINDOW_S:
            samples.popleft()
        took_s = now_s - samples[0].time_s
        if took_s <= 0:
            return None, None
        return (samples[-1].tokens - samples[0].tokens) / took_s, (copied - samples[0].copied) / took_s


def place_runs(layer: LayerPlaces) -> Iterator[tuple[int, int]]:
    """The pages of a layer in order: an index of ``PLACES``, and how many pages in a row are there."""
    at = 0
    for pages, place in (
        (layer.first_page, 2),
        (layer.streamed.start, 0),
        *((end, place) for run in layer.in_ring for end, place in ((run.start, 2), (run.stop, 1))),
        (layer.streamed.stop, 2),
        (layer.pages, 0),
    ):
        if pages > at:
            yield place, pages - at
            at = pages

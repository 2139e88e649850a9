"""Where the pages of a cache are, as others are told: in numbers, and layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvStats:
    """Where the pages are now, and what has happened since the start.

    pool_pages, resident_pages  of both pools, where layers that slide have one of their own
    streamed_pages_per_step     as often as attention reads them
    """

    pool_pages: int
    resident_pages: int
    ring_slots: int
    active_pages: int
    active_bytes: int
    streamed_pages_per_step: int
    repartitions: int
    history_bytes: int
    moved_bytes: tuple[int, ...]   # to the device, by layer


@dataclass(frozen=True, slots=True)
class LayerPlaces:
    """Where the pages of one layer are. Those of ``streamed`` pass through the ring in every step, all others are
    resident, but for those before ``first_page``: a sliding window has passed them, and nobody reads them.

    in_ring  of the streamed ones, those that are there now or on their way, in order
    """

    pages: int
    streamed: range
    in_ring: tuple[range, ...]
    first_page: int = 0

    @staticmethod
    def of(pages: int, streamed: range, runs: Iterable[range], first_page: int) -> LayerPlaces:
        """``runs``: what the ring was given of the layer, in any order; pages that stream no more are left out."""
        inside = [range(max(run.start, streamed.start), min(run.stop, streamed.stop)) for run in runs]
        ring = tuple(sorted(set(filter(None, inside)), key=lambda run: run.start))
        return LayerPlaces(pages, streamed, ring, first_page)

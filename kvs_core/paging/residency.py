"""What stays on the device: a pure function from what is known to what shall be. No bytes move, no clock is read.

Per layer, pages [0, cut) are streamed and [cut, pages) resident; cuts are whole groups. The newest pages are resident:
they are the ones still being written, so no copy ever waits for a producer. What the pool has beyond the resident pages
is the ring, which need only be as large as the link can fill while attention consumes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import ceil

from kvs_core.errors import BudgetError
from kvs_core.paging.geometry import GROUP_PAGES
from kvs_core.paging.passed import first_page
from kvs_core.units import align_up, ceil_div, mib_ceil

_COPY_BYTES = 26 << 20       # the link is at its rate, and attention calls and the copies of a captured step are few
_COOL_DOWN_STEPS = 8         # steps between two changes of the ring
_RING_SHARE = 4              # a computed ring takes at most a fourth of the pool: a resident page saves copies
_MOST_RING_SHARE = 2         # and starvation does not take it beyond half: where the link is the limit nothing helps
_EASE_STEPS = 256            # steps without starvation before the ring gives a run's slots back


class ResidencyMode(Enum):
    """--kv-residency-mode."""

    ADAPTIVE = "adaptive"
    WINDOW = "window"
    RESIDENT = "resident"


@dataclass(frozen=True, slots=True)
class ResidencyConfig:
    """What does not change while a cache lives.

    layers            attention layers, all with pages of ``page_bytes``
    ring_slots        a fixed ring, or 0: from link rate and gap, refined by feedback
    run_pages         pages moved by one copy at most, or 0: what makes a 26 MiB copy
    link_bytes_per_s  rate of large copies to the device
    head_pages        the first pages of a layer, whole groups, that stay resident: drafts attend to them
    favoured          of the layers, the last ones, that give pages up after all others: drafts read them many times
    window_pages      window mode: the newest pages of each layer that stay resident, None: all of them. There the ring
                      has ``ring_slots`` slots
    sliding_pages     of each layer that sees but a sliding window, pages before the one that is written which a row may
                      see, None: the layer sees everything; () if all do. Such a layer never streams: what its window
                      has passed leaves the device
    sliding_slots     of a pool that these layers have for themselves, enough for all of them at any context; then
                      ``page_bytes`` and the pool's slots are those of the others. 0: all share one pool
    drops_passed      what the windows of such layers have passed leaves the history too, unless something is to come
                      back to it
    """

    mode: ResidencyMode
    layers: int
    page_bytes: int
    ring_slots: int = 0
    run_pages: int = 0
    link_bytes_per_s: float = 0.0
    head_pages: int = 0
    favoured: int = 0
    window_pages: tuple[int | None, ...] = ()
    sliding_pages: tuple[int | None, ...] = ()
    sliding_slots: int = 0
    drops_passed: bool = False

    def __post_init__(self) -> None:
        assert len(self.sliding_pages) in (0, self.layers), self.sliding_pages
        assert self.head_pages % GROUP_PAGES == 0, self.head_pages
        assert 0 <= self.favoured <= self.layers, self.favoured
        assert len(self.window_pages) == (self.layers if self.mode is ResidencyMode.WINDOW else 0), self.window_pages

    def streamed(self, cut: int) -> range:
        """The pages that a layer with this cut streams."""
        return range(min(self.head_pages, cut), cut)

    def slides(self, layer: int) -> bool:
        """Whether the layer sees but a window."""
        return bool(self.sliding_pages) and self.sliding_pages[layer] is not None

    def is_apart(self, layer: int) -> bool:
        """Whether the layer's pages lie in the pool of those that slide."""
        return self.sliding_slots > 0 and self.slides(layer)

    def pooled(self, counts: Sequence[int]) -> int:
        """The sum of a number per layer, over the layers whose pages lie in the pool through which pages stream."""
        return sum(count for layer, count in enumerate(counts) if not self.is_apart(layer))

    def first_pages(self, writable_page: int) -> tuple[int, ...]:
        """By layer, the first page that a step which writes from ``writable_page`` on may see, whole groups; (): 0."""
        firsts = {before: first_page(before, writable_page) for before in set(self.sliding_pages)}
        return tuple([firsts[before] for before in self.sliding_pages])

    @property
    def copy_pages(self) -> int:
        """Pages of a run, if the ring has room for two."""
        return self.run_pages or align_up(ceil_div(_COPY_BYTES, self.page_bytes), GROUP_PAGES)

    def run_pages_in(self, ring_slots: int) -> int:
        """Pages of a run in a ring of that size: one is read while the next arrives."""
        if self.run_pages:
            return min(self.run_pages, ring_slots)
        return max(1, min(self.copy_pages, ring_slots // 2))


@dataclass(frozen=True, slots=True)
class ResidencyState:
    """What a decision leaves behind for the next one.

    ring_bonus   slots that starvation added to the ring
    first_pages  by layer, the first page that is on the device or streamed; (): 0 for all
    seen         what it was decided for; None: changed since
    """

    cuts: tuple[int, ...]
    ring_slots: int = 0
    ring_bonus: int = 0
    steps_since_change: int = 0
    calm_steps: int = 0
    first_pages: tuple[int, ...] = ()
    seen: Observation | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Observation:
    """What the step about to run, and the last one, look like.

    pages          per layer, with this step's rows included
    writable_page  the first page this step writes; it and those behind it cannot be streamed
    pool_slots     slots of the KV pool in this phase
    gap_s          longest time inside a step in which attention consumed nothing; 0 until measured
    starved        attention waited while the link was idle for lack of a slot
    in_vain        what starvation added to the ring has not helped
    """

    pages: int
    writable_page: int
    pool_slots: int
    gap_s: float = 0.0
    starved: bool = False
    in_vain: bool = False


def least_pool_slots(
    layers: int, context_tokens: int, page_tokens: int, step_rows: int, head_pages: int = 0,
    sliding_pages: Sequence[int] = (),
) -> int:
    """Slots with which any context up to ``context_tokens`` runs in steps of up to ``step_rows`` rows.

    Of each of ``layers`` layers, the head and the groups a step can touch must be resident; older groups pass through a
    ring of at least one slot. Layers with a sliding window, ``sliding_pages`` of each, come on top. With one slot fewer
    some step fails.
    """
    pages = ceil_div(context_tokens, page_tokens)
    sliding = sum(most_sliding_pages(context_tokens, page_tokens, step_rows, before) for before in sliding_pages)
    most = most_resident_pages(context_tokens, page_tokens, step_rows, head_pages)
    if most >= pages:
        return layers * pages + sliding
    older = layers > 0 and pages >= most + GROUP_PAGES   # such a step can have an older group behind it
    return layers * most + int(older) + sliding


def most_resident_pages(
    context_tokens: int, page_tokens: int, step_rows: int, head_pages: int = 0, window_pages: int | None = 0
) -> int:
    """Pages of one layer that a step of up to ``step_rows`` rows must have on the device, at any context: the head,
    what it writes, and its window (None: everything)."""
    pages = ceil_div(context_tokens, page_tokens)
    if window_pages is None:
        return pages
    # The first page written, or of the window, may be the last of its group.
    return min(pages, head_pages + max(_touched(step_rows, page_tokens), window_pages) + GROUP_PAGES - 1)


def most_sliding_pages(context_tokens: int, page_tokens: int, step_rows: int, before: int) -> int:
    """The same of a layer whose rows see ``before`` pages before the one that is written."""
    pages = ceil_div(context_tokens, page_tokens)
    return min(pages, before + _touched(step_rows, page_tokens) + GROUP_PAGES - 1)


def most_sliding_groups(context_tokens: int, page_tokens: int, step_rows: int, before: int) -> int:
    """Groups of such a layer that its history holds at most, where it drops what its window has passed and nothing is
    to come back to that: what the last step saw and what this one writes, and one that is made ahead of need."""
    groups = ceil_div(ceil_div(context_tokens, page_tokens), GROUP_PAGES)
    return min(groups, ceil_div(before + _touched(2 * step_rows, page_tokens) + GROUP_PAGES - 1, GROUP_PAGES) + 1)


def _touched(step_rows: int, page_tokens: int) -> int:
    """Pages that a step writes at most."""
    return ceil_div(step_rows - 1, page_tokens) + 1


def residency_step(config: ResidencyConfig, state: ResidencyState, seen: Observation) -> ResidencyState:
    """The cuts and the ring for the step about to run. ``BudgetError`` if the pool cannot hold it at all."""
    if seen == state.seen and _is_settled(state, seen):
        # As most steps are, and while this is found out the GPU waits.
        return replace(state, steps_since_change=state.steps_since_change + 1, calm_steps=state.calm_steps + 1)
    return replace(_decide(config, state, seen), seen=seen)


def _is_settled(state: ResidencyState, seen: Observation) -> bool:
    """Whether the same observation leads to the same decision."""
    is_asked = seen.starved or seen.in_vain
    eases = state.ring_bonus > 0 and state.calm_steps + 1 >= _EASE_STEPS
    return not is_asked and not eases and state.steps_since_change > _COOL_DOWN_STEPS


def _decide(config: ResidencyConfig, state: ResidencyState, seen: Observation) -> ResidencyState:
    layers, pages = config.layers, seen.pages
    limit = seen.writable_page // GROUP_PAGES * GROUP_PAGES
    firsts = config.first_pages(seen.writable_page)
    every = config.pooled([pages - first for first in firsts or (0,) * layers])
    # A cut within the head would stream nothing: then there is none.
    cuts = [
        min(cut, limit) if min(cut, limit) > config.head_pages and not config.slides(layer) else 0
        for layer, cut in enumerate(state.cuts)
    ]
    streaming = sum(not config.slides(layer) for layer in range(layers))
    least = every - streaming * len(config.streamed(limit))   # what slides streams nothing, wherever it lies
    most_ring = seen.pool_slots - least
    next_state = _feedback(config, state, seen, min(most_ring, seen.pool_slots // _MOST_RING_SHARE))
    next_state = replace(next_state, first_pages=firsts)
    if config.mode is ResidencyMode.WINDOW:
        return _window_step(config, next_state, seen, limit)
    if every <= seen.pool_slots:
        return replace(next_state, cuts=(0,) * layers, ring_slots=0)
    if config.mode is ResidencyMode.RESIDENT:
        raise _too_small(config, seen, every)
    if most_ring < 1:
        raise _too_small(config, seen, min(every, least + 1))

    # Some page is streamed, so more pages are streamed than the ring has slots: it can use them all.
    ring = min(_wanted_ring(config, state, next_state.ring_bonus, seen), most_ring)
    resident = every - sum(len(config.streamed(cut)) for cut in cuts)
    spare = seen.pool_slots - ring - resident
    cuts = _fit(config, cuts, limit, -spare) if spare < 0 else _promote(config, cuts, spare)
    since = 0 if ring != state.ring_slots else next_state.steps_since_change
    return replace(next_state, cuts=tuple(cuts), ring_slots=ring, steps_since_change=since)


def _window_step(
    config: ResidencyConfig, state: ResidencyState, seen: Observation, limit: int
) -> ResidencyState:
    """Each layer's window stays and the rest streams, whatever the pool has room for: the user fixed it."""
    cuts = []
    for layer, window in enumerate(config.window_pages):
        window = None if config.slides(layer) else window
        older = 0 if window is None else max(0, seen.pages - window) // GROUP_PAGES * GROUP_PAGES
        cut = min(older, limit)
        cuts.append(cut if cut > config.head_pages else 0)
    streamed = sum(len(config.streamed(cut)) for cut in cuts)
    ring = min(config.ring_slots, streamed)
    firsts = state.first_pages or (0,) * config.layers
    needed = config.pooled([seen.pages - first for first in firsts]) - streamed + ring
    if needed > seen.pool_slots:
        raise _too_small(config, seen, needed)
    return replace(state, cuts=tuple(cuts), ring_slots=ring)


def _wanted_ring(config: ResidencyConfig, state: ResidencyState, bonus: int, seen: Observation) -> int:
    """Two runs, those that hold ceil(link rate x longest gap / page bytes), and what starvation added; or the fixed
    size."""
    if config.ring_slots:
        return config.ring_slots
    if state.ring_slots and state.steps_since_change + 1 < _COOL_DOWN_STEPS:
        return state.ring_slots
    ahead = ceil(config.link_bytes_per_s * seen.gap_s / config.page_bytes)
    # In whole runs, for a run lies in one piece: less would bridge nothing.
    wanted = 2 * config.copy_pages + align_up(ahead, config.copy_pages)
    computed = min(wanted, max(1, seen.pool_slots // _RING_SHARE))
    # A measured gap moves a little from step to step; the ring follows it only beyond an eighth, upwards or downwards.
    base = state.ring_slots - state.ring_bonus
    if base > 0 and abs(computed - base) * 8 <= base:
        computed = base
    return computed + bonus


def _feedback(config: ResidencyConfig, state: ResidencyState, seen: Observation, most_ring: int) -> ResidencyState:
    """Starvation grows a ring below ``most_ring`` by a run; long ease takes one back, or that it was in vain. Not
    within the cool-down."""
    since = state.steps_since_change + 1
    calm = 0 if seen.starved else state.calm_steps + 1
    bonus, run = state.ring_bonus, config.run_pages_in(state.ring_slots)
    if since >= _COOL_DOWN_STEPS:
        if seen.in_vain:
            bonus = max(0, bonus - run)
        elif seen.starved and state.ring_slots < most_ring:
            bonus += run
        elif calm >= _EASE_STEPS and bonus > 0:
            bonus, calm = max(0, bonus - run), 0
    return replace(state, ring_bonus=bonus, steps_since_change=since, calm_steps=calm)


def _fit(config: ResidencyConfig, cuts: Sequence[int], limit: int, over: int) -> list[int]:
    """Raise cuts, a group at a time where most is resident, until ``over`` fewer pages are; favoured layers last."""
    cuts = list(cuts)
    while over > 0:
        layer = min(
            (
                layer for layer, cut in enumerate(cuts)
                if max(cut, config.head_pages) < limit and not config.slides(layer)
            ),
            key=lambda layer: (_is_favoured(config, layer), cuts[layer], layer),
        )
        cuts[layer] = max(cuts[layer], config.head_pages) + GROUP_PAGES
        over -= GROUP_PAGES
    return cuts


def _promote(config: ResidencyConfig, cuts: Sequence[int], spare: int) -> list[int]:
    """Lower cuts while a group and the next page of every layer fit into ``spare`` slots: a pool that grew is used at
    once. Favoured layers come first."""
    cuts = list(cuts)
    pooled = config.pooled([1] * len(cuts))
    while spare >= GROUP_PAGES + pooled:
        layer = max(
            range(len(cuts)), key=lambda layer: (cuts[layer] > 0, _is_favoured(config, layer), cuts[layer], layer)
        )
        if cuts[layer] == 0:
            break
        cuts[layer] -= GROUP_PAGES
        if cuts[layer] == config.head_pages:
            cuts[layer] = 0
        spare -= GROUP_PAGES
    return cuts


def _is_favoured(config: ResidencyConfig, layer: int) -> bool:
    return layer >= config.layers - config.favoured


def _too_small(config: ResidencyConfig, seen: Observation, needed_slots: int) -> BudgetError:
    needed, given = mib_ceil(needed_slots * config.page_bytes), seen.pool_slots * config.page_bytes >> 20
    return BudgetError(
        f"KV pool too small: {config.mode.value} mode needs {needed_slots} pages ({needed} MiB) here, "
        f"the pool has {seen.pool_slots} ({given} MiB); raise --kv-stream-arena-mib",
        needed_mib=needed,
        given_mib=given,
    )

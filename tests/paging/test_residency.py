"""The policy as a pure function: what it may never do, what it does in steady use, and the least pool that will do."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.errors import BudgetError
from kvs_core.paging.geometry import GROUP_PAGES
from kvs_core.paging.residency import (
    Observation,
    ResidencyConfig,
    ResidencyMode,
    ResidencyState,
    least_pool_slots,
    most_resident_pages,
    most_sliding_pages,
    residency_step,
)
from kvs_core.units import align_up, ceil_div

PAGE_MIB = 8
PAGE_BYTES = PAGE_MIB << 20   # a run is then one group
RUN = GROUP_PAGES
LINK = 1000.0 * PAGE_BYTES
COOL_DOWN = 8
EASE = 256
HEADS = st.sampled_from([0, GROUP_PAGES, 2 * GROUP_PAGES])


def config(layers: int = 4, **others: object) -> ResidencyConfig:
    values = {"mode": ResidencyMode.ADAPTIVE, "layers": layers, "page_bytes": PAGE_BYTES, "link_bytes_per_s": LINK}
    return ResidencyConfig(**(values | others))  # type: ignore[arg-type]


def start(layers: int = 4) -> ResidencyState:
    return ResidencyState(cuts=(0,) * layers)


def repeat(used: ResidencyConfig, state: ResidencyState, seen: Observation, times: int) -> list[ResidencyState]:
    states = []
    for _ in range(times):
        state = residency_step(used, state, seen)
        states.append(state)
    return states


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    pages = draw(st.integers(0, 60))
    return Observation(
        pages=pages,
        writable_page=max(0, pages - draw(st.integers(0, 9))),
        pool_slots=draw(st.integers(1, 260)),
        gap_s=draw(st.floats(0, 0.1)),
        starved=draw(st.booleans()),
        in_vain=draw(st.booleans()),
    )


def least_of_step(layers: int, pages: int, writable_page: int, head_pages: int = 0) -> int:
    """Slots that one step needs, by hand: all pages, or a head and the groups it may write, and one slot to stream
    through."""
    limit = writable_page // GROUP_PAGES * GROUP_PAGES
    touched = pages - max(0, limit - head_pages)
    return min(layers * pages, layers * touched + 1)


def check(used: ResidencyConfig, state: ResidencyState, seen: Observation) -> None:
    """What holds for every decision."""
    assert len(state.cuts) == used.layers
    assert all(cut % GROUP_PAGES == 0 and 0 <= cut <= seen.writable_page for cut in state.cuts)
    resident = sum(seen.pages - cut for cut in state.cuts)
    assert resident + state.ring_slots <= seen.pool_slots
    assert max(state.cuts) - min(state.cuts) <= GROUP_PAGES, "layers stream about equally"
    if sum(state.cuts):
        assert 1 <= state.ring_slots <= sum(state.cuts)
        if used.ring_slots:
            assert state.ring_slots <= used.ring_slots
        # No pool is left idle: another group and the next page of every layer would not fit.
        assert seen.pool_slots - resident - state.ring_slots < GROUP_PAGES + used.layers
    else:
        assert state.ring_slots == 0


@given(
    st.integers(1, 5), st.sampled_from([0, 0, 1, 7, 40]), st.integers(0, 9), st.lists(observations(), max_size=12)
)
def test_every_decision_can_be_carried_out(
    layers: int, ring_slots: int, run_pages: int, seen: list[Observation]
) -> None:
    """Always: pages fit, what is written stays, cuts are whole groups; or the pool is too small, and by how much."""
    used = config(layers, ring_slots=ring_slots, run_pages=run_pages)
    state = start(layers)
    for each in seen:
        if each.pool_slots >= least_of_step(layers, each.pages, each.writable_page):
            state = residency_step(used, state, each)
            check(used, state, each)
            assert 1 <= used.run_pages_in(max(1, state.ring_slots)) <= max(1, state.ring_slots)
        else:
            with pytest.raises(BudgetError, match="--kv-stream-arena-mib") as caught:
                residency_step(used, state, each)
            least = least_of_step(layers, each.pages, each.writable_page)
            assert caught.value.needed_mib == least * PAGE_MIB
            assert caught.value.given_mib == each.pool_slots * PAGE_MIB


@given(
    st.integers(1, 4), st.sampled_from([0, 0, 7]), st.booleans(),
    st.lists(st.tuples(observations(), st.sampled_from([1, 2, 9, 20, 300])), max_size=5),
)
def test_a_decision_that_is_taken_again_is_the_same(
    layers: int, ring_slots: int, window: bool, seen: list[tuple[Observation, int]]
) -> None:
    """What most steps skip, since they see what the last one saw, would have changed nothing."""
    mode = ResidencyMode.WINDOW if window else ResidencyMode.ADAPTIVE
    used = config(layers, mode=mode, ring_slots=ring_slots or 3 * window, window_pages=(8,) * layers * window)
    state = start(layers)
    for each, times in seen:
        try:
            for _ in range(times):
                in_full = residency_step(used, replace(state, seen=None), each)
                state = residency_step(used, state, each)
                assert state == in_full
        except BudgetError:
            continue


@given(st.integers(1, 5), st.lists(observations(), max_size=12))
def test_resident_mode_holds_everything_or_refuses(layers: int, seen: list[Observation]) -> None:
    """No page is ever streamed; the refusal names what all pages need."""
    used = config(layers, mode=ResidencyMode.RESIDENT)
    state = start(layers)
    for each in seen:
        if layers * each.pages <= each.pool_slots:
            state = residency_step(used, state, each)
            assert (state.cuts, state.ring_slots) == ((0,) * layers, 0)
        else:
            with pytest.raises(BudgetError, match="resident mode") as caught:
                residency_step(used, state, each)
            assert caught.value.needed_mib == layers * each.pages * PAGE_MIB


@given(st.integers(1, 4), st.integers(1, 700), st.integers(1, 130), HEADS, st.data())
def test_least_pool_is_enough_and_not_a_slot_too_many(
    layers: int, context: int, rows: int, head_pages: int, data: st.DataObject
) -> None:
    """Any step of any length and width runs in the least pool, whatever head stays and whichever layers are favoured;
    with one slot fewer some step is refused."""
    page = 32
    rows = min(rows, context)
    least = least_pool_slots(layers, context, page, rows, head_pages)
    used = config(layers, head_pages=head_pages, favoured=data.draw(st.integers(0, layers)))
    state = start(layers)
    refused = False
    for first in range(context):
        for width in {1, min(rows, context - first)}:
            seen = Observation(ceil_div(first + width, page), first // page, least)
            residency_step(used, state, seen)
            try:
                residency_step(used, state, replace(seen, pool_slots=least - 1))
            except BudgetError:
                refused = True
    assert refused


@given(
    st.integers(1, 5), HEADS, st.sampled_from([0, 0, 1, 7]), st.lists(observations(), min_size=1, max_size=12),
    st.data(),
)
def test_heads_and_favoured_layers_fit_like_others(
    layers: int, head_pages: int, ring_slots: int, seen: list[Observation], data: st.DataObject
) -> None:
    """Always: resident pages and the ring fit; heads and what is written stay; cuts are whole groups and stream a group
    at least, or none; favoured layers give only what no other can. Or the pool is too small."""
    favoured = data.draw(st.integers(0, layers))
    used, state = config(layers, head_pages=head_pages, favoured=favoured, ring_slots=ring_slots), start(layers)
    for each in seen:
        least = least_of_step(layers, each.pages, each.writable_page, head_pages)
        if each.pool_slots < least:
            with pytest.raises(BudgetError, match="--kv-stream-arena-mib") as caught:
                residency_step(used, state, each)
            assert caught.value.needed_mib == least * PAGE_MIB
            continue
        before, state = state.cuts, residency_step(used, state, each)
        limit = each.writable_page // GROUP_PAGES * GROUP_PAGES
        streamed = [used.streamed(cut) for cut in state.cuts]
        for cut, pages in zip(state.cuts, streamed, strict=True):
            assert cut % GROUP_PAGES == 0
            assert cut == 0 or head_pages < cut <= limit
            assert pages == (range(head_pages, cut) if cut else range(0))
        resident = sum(each.pages - len(pages) for pages in streamed)
        assert resident + state.ring_slots <= each.pool_slots
        assert (state.ring_slots > 0) == any(state.cuts)
        if any(state.cuts):
            assert each.pool_slots - resident - state.ring_slots < GROUP_PAGES + layers, "no pool is left idle"
        others, loved = state.cuts[: layers - favoured], state.cuts[layers - favoured :]
        if any(after > cut for after, cut in zip(loved, before[layers - favoured :], strict=True)):
            assert all(cut == limit for cut in others)
        for alike in (others, loved):
            assert not alike or max(alike) - min(alike) <= GROUP_PAGES + head_pages


@given(st.integers(2, 5), HEADS, st.integers(40, 120), st.integers(0, 200))
def test_favoured_layers_give_up_last_and_get_back_first(layers: int, head_pages: int, pages: int, extra: int) -> None:
    """While a context grows the last layer keeps everything until all others stream all that they can; when the pool
    grows it has its pages back before any other has."""
    used, state = config(layers, head_pages=head_pages, favoured=1, ring_slots=4), start(layers)
    pool = least_pool_slots(layers, pages * 32, 32, 1, head_pages) + extra
    for number in range(1, pages + 1):
        before, state = state, residency_step(used, state, Observation(number, number - 1, pool))
        limit = (number - 1) // GROUP_PAGES * GROUP_PAGES
        if state.cuts[-1] > before.cuts[-1]:
            assert all(cut == limit for cut in state.cuts[:-1])
    seen = Observation(pages, pages - 1, pool)
    for more in range(0, layers * pages, GROUP_PAGES):
        before = state
        state = residency_step(used, state, replace(seen, pool_slots=pool + more))
        assert all(a <= b for a, b in zip(state.cuts, before.cuts, strict=True))
        if state.cuts[-1]:
            assert state.cuts[:-1] == before.cuts[:-1]


def test_streamed_pages_begin_behind_the_head() -> None:
    """A cut within the head streams nothing."""
    used = config(head_pages=2 * GROUP_PAGES)
    assert [len(used.streamed(cut)) for cut in (0, 4, 8, 12, 16)] == [0, 0, 0, 4, 8]
    assert used.streamed(16) == range(8, 16)
    assert config().streamed(16) == range(16)
    for wrong in ({"head_pages": 3}, {"favoured": 5}, {"favoured": -1}):
        with pytest.raises(AssertionError):
            config(4, **wrong)


@given(
    layers=st.integers(1, 5), pool=st.integers(30, 300), ring=st.sampled_from([0, 0, 1, 5]),
    gap_s=st.floats(0, 0.2), pages=st.integers(1, 90),
)
def test_steady_growth_only_evicts(layers: int, pool: int, ring: int, gap_s: float, pages: int) -> None:
    """A context that grows page by page moves every cut upwards only, and the ring not at all."""
    used, state = config(layers, ring_slots=ring), start(layers)
    states = []
    for number in range(1, pages + 1):
        seen = Observation(number, number - 1, pool, gap_s)
        states += repeat(used, state, seen, 3)
        state = states[-1]
    for before, after in pairwise(states):
        assert all(a <= b for a, b in zip(before.cuts, after.cuts, strict=True))
        if before.ring_slots:
            assert after.ring_slots == before.ring_slots


@given(st.integers(1, 5), st.integers(60, 200), st.integers(1, 200), st.integers(40, 90))
def test_what_was_brought_back_stays_for_the_next_page(layers: int, pool: int, more: int, pages: int) -> None:
    """A pool that grows brings groups back, but none that the next page of every layer would send away again."""
    used = config(layers, ring_slots=5)
    small = settled(used, Observation(pages, pages - 1, pool))
    large = residency_step(used, small, Observation(pages, pages - 1, pool + more))
    following = residency_step(used, large, Observation(pages + 1, pages, pool + more))
    if large.cuts != small.cuts and any(large.cuts):
        assert following.cuts == large.cuts


@given(
    st.integers(1, 4), st.sampled_from([0, 0, 3, 20]), st.lists(observations(), min_size=1, max_size=6), observations()
)
def test_nothing_moves_while_nothing_changes(
    layers: int, ring: int, before: list[Observation], seen: Observation
) -> None:
    """Whatever came before, the same observation again and again changes the ring once at most, after the cool-down."""
    used, state = config(layers, ring_slots=ring), start(layers)
    seen = replace(seen, starved=False)
    for each in [*before, seen]:
        if each.pool_slots >= least_of_step(layers, each.pages, each.writable_page):
            state = residency_step(used, state, each)
    if seen.pool_slots < least_of_step(layers, seen.pages, seen.writable_page):
        return
    state = replace(state, ring_bonus=0)
    places = [(each.cuts, each.ring_slots) for each in repeat(used, state, seen, 2 * COOL_DOWN)]
    assert len(set(places[:COOL_DOWN])) <= 2
    assert len(set(places[COOL_DOWN:])) == 1


@given(st.integers(1, 50), st.integers(0, 90))
def test_a_fixed_ring_has_its_size_wherever_it_fits(ring: int, spare: int) -> None:
    """A ring that the user fixed is neither computed nor refined, and smaller only where the pool has no more."""
    layers, pages = 4, 100
    used, state = config(layers, ring_slots=ring), start(layers)
    tail = layers * (pages - 96)
    pool = tail + 1 + spare
    for starved in (False, True) * 20:
        state = residency_step(used, state, Observation(pages, pages - 1, pool, 1.0, starved))
        assert state.ring_slots == min(ring, pool - tail)


def settled(used: ResidencyConfig, seen: Observation) -> ResidencyState:
    """The state after enough calm steps for a change to be allowed."""
    return repeat(used, start(used.layers), seen, COOL_DOWN + 1)[-1]


SEEN = Observation(pages=400, writable_page=399, pool_slots=1000)


@pytest.mark.parametrize("gap_s", [0.0, 0.01, 0.1, 0.2])
def test_the_ring_is_what_the_link_can_fill_in_the_longest_gap(gap_s: float) -> None:
    """Two runs, one read while the next arrives, and the pages that arrive while nothing is read, in whole runs."""
    state = settled(config(), replace(SEEN, gap_s=gap_s))
    assert state.ring_slots == 2 * RUN + align_up(round(1000 * gap_s), RUN)


def test_a_computed_ring_takes_a_quarter_of_the_pool_at_most() -> None:
    """However long the gap: a resident page saves a copy in every step."""
    assert settled(config(), replace(SEEN, gap_s=10.0)).ring_slots == 250


@pytest.mark.parametrize("gap_s", [0.0, 0.03, 0.1, 0.2])
def test_starvation_grows_the_ring_by_a_run_and_not_again_within_the_cool_down(gap_s: float) -> None:
    """Whatever the ring's size, one run more at once, then the same ring until the change has had time to tell."""
    used, seen = config(), replace(SEEN, gap_s=gap_s)
    state = settled(used, seen)
    rings = [each.ring_slots for each in repeat(used, state, replace(seen, starved=True), 2 * COOL_DOWN + 1)]
    assert rings[0] == state.ring_slots + RUN
    assert rings == [rings[0]] * COOL_DOWN + [rings[0] + RUN] * COOL_DOWN + [rings[0] + 2 * RUN]


@pytest.mark.parametrize("gap_s", [0.0, 0.03, 0.1, 0.2])
def test_long_ease_gives_back_what_starvation_took(gap_s: float) -> None:
    """A run at a time, each after long calm, down to the computed ring and no further."""
    used, seen = config(), replace(SEEN, gap_s=gap_s)
    base = settled(used, seen)
    grown = repeat(used, base, replace(seen, starved=True), 2 * COOL_DOWN + 1)[-1]
    assert grown.ring_slots == base.ring_slots + 3 * RUN
    rings = [each.ring_slots for each in repeat(used, grown, seen, 5 * EASE)]
    assert rings == sorted(rings, reverse=True)
    assert {*rings} == {base.ring_slots + runs * RUN for runs in range(4)}
    assert rings[-1] == base.ring_slots
    assert all(rings.count(base.ring_slots + runs * RUN) >= EASE - 1 for runs in (1, 2, 3))


def test_a_growth_in_vain_is_taken_back_at_once() -> None:
    """Once the change has had time to tell, without waiting for calm; down to the computed ring and no further."""
    used = config()
    base = settled(used, SEEN)
    grown = repeat(used, base, replace(SEEN, starved=True), 1)[-1]
    assert grown.ring_slots == base.ring_slots + RUN
    rings = [each.ring_slots for each in repeat(used, grown, replace(SEEN, in_vain=True), 3 * COOL_DOWN)]
    assert rings[COOL_DOWN - 2] == grown.ring_slots
    assert rings[COOL_DOWN:] == [base.ring_slots] * (2 * COOL_DOWN)


def test_starvation_without_end_asks_for_no_more_than_there_is() -> None:
    """Starvation takes at most half the pool, and leaves no debt: it is given back as fast as it came."""
    used = config()
    starved = repeat(used, start(), replace(SEEN, starved=True), 5000)[-1]
    assert starved.ring_slots == 1000 // 2
    calm = repeat(used, starved, SEEN, EASE * (1000 // RUN))[-1]
    assert calm.ring_slots == 2 * RUN


@given(st.lists(st.floats(0.9, 1.1), min_size=2, max_size=40))
def test_a_gap_that_trembles_does_not_move_the_ring(factors: list[float]) -> None:
    """A tenth up or down is noise."""
    used = config()
    state = settled(used, replace(SEEN, gap_s=0.1))
    ring = state.ring_slots
    for factor in factors:
        state = residency_step(used, state, replace(SEEN, gap_s=0.1 * factor))
        assert state.ring_slots == ring


@pytest.mark.parametrize("gap_s", [0.0, 0.05, 0.2])
def test_the_ring_follows_a_gap_that_really_changed_after_the_cool_down(gap_s: float) -> None:
    """Up or down by more than an eighth: one change, not before the last one is eight steps old."""
    used = config()
    state = repeat(used, start(), replace(SEEN, gap_s=0.1), 1)[-1]
    rings = [each.ring_slots for each in repeat(used, state, replace(SEEN, gap_s=gap_s), 2 * COOL_DOWN)]
    assert rings[: COOL_DOWN - 1] == [state.ring_slots] * (COOL_DOWN - 1)
    assert rings[COOL_DOWN - 1 :] == [2 * RUN + align_up(round(1000 * gap_s), RUN)] * (COOL_DOWN + 1)


def test_a_pool_that_grows_is_used_at_once_and_one_that_shrinks_gives_way() -> None:
    """From one phase's pool to the other's and back: resident pages as many as fit, the newest."""
    used = config()
    small = settled(used, replace(SEEN, pool_slots=400))
    large = residency_step(used, small, SEEN)
    check(used, large, SEEN)
    assert sum(large.cuts) < sum(small.cuts) - 500
    again = residency_step(used, large, replace(SEEN, pool_slots=400))
    assert sum(again.cuts) == sum(small.cuts)
    all_fit = residency_step(used, again, replace(SEEN, pool_slots=1600))
    assert (all_fit.cuts, all_fit.ring_slots) == ((0,) * 4, 0)


@pytest.mark.parametrize(
    ("run_pages", "ring", "run"),
    [(0, 1, 1), (0, 2, 1), (0, 3, 1), (0, 7, 3), (0, 8, 4), (0, 100, 4), (6, 100, 6), (6, 4, 4), (1, 9, 1)],
)
def test_runs_are_long_copies_if_two_of_them_fit_in_the_ring(run_pages: int, ring: int, run: int) -> None:
    """One is read while the next arrives; a length that the user fixed gives way to the ring only."""
    assert config(run_pages=run_pages).run_pages_in(ring) == run


def test_runs_are_whole_groups_of_at_least_26_mib() -> None:
    """As many groups as make the copy that reaches the link's rate."""
    assert config(page_bytes=425_984).copy_pages == 64
    assert config(page_bytes=4096).copy_pages == 6656
    assert config(page_bytes=1 << 30).copy_pages == GROUP_PAGES


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 40)), min_size=1, max_size=5), st.integers(1, 40), HEADS,
    st.lists(observations(), max_size=12),
)
def test_windows_are_kept_whatever_the_pool_could_hold(
    windows: list[int | None], ring_slots: int, head_pages: int, seen: list[Observation]
) -> None:
    """A layer keeps its window, less than a group more, and what is written; the ring has its size, or as much as is
    streamed; a pool with less room is refused with what it needs."""
    used = config(
        len(windows), mode=ResidencyMode.WINDOW, window_pages=tuple(windows), ring_slots=ring_slots,
        head_pages=head_pages,
    )
    state = start(len(windows))
    for each in seen:
        older = [
            0 if window is None else min(max(0, each.pages - window), each.writable_page) // GROUP_PAGES * GROUP_PAGES
            for window in windows
        ]
        streamed = sum(max(0, pages - head_pages) for pages in older)
        needed = len(windows) * each.pages - streamed + min(ring_slots, streamed)
        if needed > each.pool_slots:
            with pytest.raises(BudgetError, match="--kv-stream-arena-mib") as caught:
                residency_step(used, state, each)
            assert caught.value.needed_mib == needed * PAGE_MIB
            continue
        state = residency_step(used, state, each)
        assert [used.streamed(cut).stop for cut in state.cuts] == [
            pages if pages > head_pages else 0 for pages in older
        ]
        assert state.ring_slots == min(ring_slots, streamed)


@given(
    st.integers(1, 3000), st.sampled_from([32, 256]), st.integers(1, 600), HEADS,
    st.one_of(st.none(), st.integers(0, 40)), st.data(),
)
def test_the_most_that_a_window_keeps_is_known_before(
    context: int, page: int, rows: int, head_pages: int, window: int | None, data: st.DataObject
) -> None:
    """With so many slots for what is resident every step within the context runs."""
    most = most_resident_pages(context, page, rows, head_pages, window)
    used = config(1, mode=ResidencyMode.WINDOW, window_pages=(window,), ring_slots=1, head_pages=head_pages)
    first = data.draw(st.integers(0, context - 1))
    count = data.draw(st.integers(1, min(rows, context - first)))
    seen = Observation(pages=ceil_div(first + count, page), writable_page=first // page, pool_slots=most + 1)
    residency_step(used, start(1), seen)


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 20)), min_size=1, max_size=5), HEADS, st.integers(0, 9),
    st.lists(observations(), max_size=12),
)
def test_sliding_layers_keep_what_rows_see_and_stream_nothing(
    sliding: list[int | None], head_pages: int, ring_slots: int, seen: list[Observation]
) -> None:
    """They have the groups from their window on, whatever the pool; the others are cut so that all fit; a pool that is
    too small is refused with what it needs."""
    used = config(
        len(sliding), sliding_pages=tuple(sliding), head_pages=head_pages, ring_slots=ring_slots
    )
    state = start(len(sliding))
    for each in seen:
        firsts = [
            0 if before is None else max(0, each.writable_page - before) // GROUP_PAGES * GROUP_PAGES
            for before in sliding
        ]
        limit = max(head_pages, each.writable_page // GROUP_PAGES * GROUP_PAGES)
        whole = sliding.count(None)
        every = len(sliding) * each.pages - sum(firsts)
        least = min(every, every - whole * (limit - head_pages) + 1)
        if each.pool_slots < least:
            with pytest.raises(BudgetError, match="--kv-stream-arena-mib") as caught:
                residency_step(used, state, each)
            assert caught.value.needed_mib == least * PAGE_MIB
            continue
        state = residency_step(used, state, each)
        assert list(state.first_pages) == firsts
        streamed = [len(used.streamed(cut)) for cut in state.cuts]
        assert not any(count for count, before in zip(streamed, sliding, strict=True) if before is not None)
        assert every - sum(streamed) + state.ring_slots <= each.pool_slots
        assert (state.ring_slots > 0) == any(streamed)


@given(st.integers(1, 3000), st.sampled_from([32, 256]), st.integers(1, 600), st.integers(0, 20), st.data())
def test_the_most_that_a_sliding_layer_keeps_is_known_before(
    context: int, page: int, rows: int, before: int, data: st.DataObject
) -> None:
    """With so many slots every step within the context runs, and some step needs them all."""
    most = most_sliding_pages(context, page, rows, before)
    used = config(1, sliding_pages=(before,))
    first = data.draw(st.integers(0, context - 1))
    count = data.draw(st.integers(1, min(rows, context - first)))
    seen = Observation(pages=ceil_div(first + count, page), writable_page=first // page, pool_slots=most)
    residency_step(used, start(1), seen)
    assert least_pool_slots(0, context, page, rows, sliding_pages=[before]) == most


@given(
    slides=st.lists(st.booleans(), min_size=1, max_size=6).filter(lambda some: not all(some)),
    seen=st.lists(observations(), min_size=1, max_size=12), before=st.integers(0, 6), head_pages=HEADS,
)
def test_layers_with_a_pool_of_their_own_change_nothing(
    slides: list[bool], seen: list[Observation], before: int, head_pages: int
) -> None:
    """The others have the cuts and the ring that they have alone, or the same refusal; who slides never streams."""
    both = config(
        len(slides), head_pages=head_pages, sliding_pages=tuple(before if each else None for each in slides),
        sliding_slots=1,
    )
    alone = config(slides.count(False), head_pages=head_pages)
    state, other = start(len(slides)), start(slides.count(False))
    for each in seen:
        try:
            other = residency_step(alone, other, each)
        except BudgetError as refusal:
            with pytest.raises(BudgetError, match=re.escape(str(refusal))):
                residency_step(both, state, each)
            continue
        state = residency_step(both, state, each)
        assert tuple(cut for cut, slid in zip(state.cuts, slides, strict=True) if not slid) == other.cuts
        assert not any(cut for cut, slid in zip(state.cuts, slides, strict=True) if slid)
        assert state.ring_slots == other.ring_slots

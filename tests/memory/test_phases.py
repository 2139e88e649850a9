"""The two layouts of the arena, the least arena that does, and the order of a hand-over."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.errors import BudgetError
from kvs_core.memory.arena import Arena, RegionRequest
from kvs_core.memory.lease import ArenaError
from kvs_core.memory.phases import (
    KV_POOL,
    HandoverOrder,
    HandoverState,
    HandoverStep,
    MemoryPlan,
    Phase,
    PhaseRequest,
    plan_phase,
    required_bytes,
)
from kvs_core.units import MIB

Need = dict[str, Any]  # all arguments of a MemoryPlan but the arena
SIZES = st.lists(st.integers(1, 3_000_000), max_size=3)
PREFILL, DECODE = PhaseRequest(Phase.PREFILL, ()), PhaseRequest(Phase.DECODE, ())


def workspace(phase: Phase, sizes: list[int]) -> PhaseRequest:
    return PhaseRequest(phase, tuple(RegionRequest(f"part{i}", size) for i, size in enumerate(sizes)))


@st.composite
def needs(draw: st.DrawFn) -> Need:
    sizes = draw(SIZES)
    return {
        "slot_bytes": draw(st.integers(1, 500_000)),
        "min_slots": draw(st.integers(1, 9)),
        "prefill": workspace(Phase.PREFILL, draw(SIZES)),
        "decode": workspace(Phase.DECODE, draw(SIZES)),
        "persistent": tuple(RegionRequest(f"kept{i}", size, persistent=True) for i, size in enumerate(sizes)),
    }


def least_bytes(need: Need) -> int:
    return max(
        required_bytes(
            need[phase.value], slot_bytes=need["slot_bytes"], slots=need["min_slots"], persistent=need["persistent"]
        )
        for phase in Phase
    )


@given(needs())
def test_budget_edge_to_the_byte(need: Need) -> None:
    """The least arena holds both phases, one of them with not one slot to spare; one byte less is refused."""
    least = least_bytes(need)
    plan = MemoryPlan(arena_bytes=least, **need)
    assert min(plan.slots(phase) for phase in Phase) - need["min_slots"] <= 255 // need["slot_bytes"]
    with pytest.raises(BudgetError):
        MemoryPlan(arena_bytes=least - 1, **need)


@given(needs(), st.integers(0, 8))
def test_needed_mib_is_the_least(need: Need, given_mib: int) -> None:
    """The MiB that a refusal names would do, and one MiB less would not."""
    if least_bytes(need) <= given_mib * MIB:
        MemoryPlan(arena_bytes=given_mib * MIB, **need)
        return
    with pytest.raises(BudgetError) as caught:
        MemoryPlan(arena_bytes=given_mib * MIB, **need)
    needed_mib = caught.value.needed_mib
    assert caught.value.given_mib == given_mib
    MemoryPlan(arena_bytes=needed_mib * MIB, **need)
    with pytest.raises(BudgetError):
        MemoryPlan(arena_bytes=(needed_mib - 1) * MIB, **need)


@given(needs(), st.integers(0, 4000), st.lists(st.sampled_from(Phase), min_size=1, max_size=6))
def test_phase_switch_keeps_the_pool_in_place(need: Need, spare: int, phases: list[Phase]) -> None:
    """Whatever came before, a phase's layout is ``plan(phase)``; the persistent regions and the pool never move."""
    plan = MemoryPlan(arena_bytes=least_bytes(need) + spare * 256, **need)
    arena = Arena(plan.arena_bytes)
    kept = [region.id for region in need["persistent"]] + [KV_POOL]
    offsets = [plan.plan(Phase.PREFILL).region(name).offset for name in kept]
    assert offsets == sorted(offsets)
    for phase in phases:
        with arena.begin() as transaction:
            plan.reserve(transaction, phase)
            transaction.commit()
        assert arena.plan == plan.plan(phase)
        assert [arena.plan.region(name).offset for name in kept] == offsets
        pool = arena.plan.region(KV_POOL)
        assert pool.size_bytes == plan.slots(phase) * need["slot_bytes"]
        assert plan.slots(phase) >= need["min_slots"]
        assert all(arena.plan.region(part.id).offset >= pool.end for part in plan.request(phase).workspace)
        end = arena.plan.regions[-1].end
        assert plan.arena_bytes - end < max(256, need["slot_bytes"])


def test_pool_lease_stays_when_the_pool_grows_only() -> None:
    """Going to the phase with the longer pool needs no release; coming back does, and so does the workspace."""
    plan = MemoryPlan(
        4 * MIB, 1000, 1, PhaseRequest.of_bytes(Phase.PREFILL, MIB), PhaseRequest.of_bytes(Phase.DECODE, 1000)
    )
    arena = Arena(plan.arena_bytes)
    lease = None
    for phase in (Phase.PREFILL, Phase.DECODE):
        with arena.begin() as transaction:
            plan.reserve(transaction, phase)
            transaction.commit()
        lease = lease or arena.lease(KV_POOL)
    assert lease is not None
    assert arena.is_current(lease.view)
    with arena.begin() as transaction, arena.lease("workspace"):
        plan.reserve(transaction, Phase.PREFILL)
        with pytest.raises(ArenaError, match=f"{KV_POOL}, workspace"):
            transaction.commit()


@given(needs(), st.integers(0, 8 * MIB))
def test_fixed_pool_is_the_same_in_both_phases(need: Need, pool_bytes: int) -> None:
    """A fixed pool has all whole slots of its bytes in both phases, in the least whole MiB that hold the larger one."""
    if pool_bytes < need["min_slots"] * need["slot_bytes"]:
        with pytest.raises(BudgetError) as caught:
            MemoryPlan.pool_only(pool_bytes=pool_bytes, **need)
        pool_bytes = caught.value.needed_mib * MIB
        if pool_bytes > MIB:
            with pytest.raises(BudgetError):
                MemoryPlan.pool_only(pool_bytes=pool_bytes - MIB, **need)
    plan = MemoryPlan.pool_only(pool_bytes=pool_bytes, **need)
    slots = pool_bytes // need["slot_bytes"]
    assert plan.slots(Phase.PREFILL) == plan.slots(Phase.DECODE) == slots
    assert plan.plan(Phase.PREFILL).region(KV_POOL) == plan.plan(Phase.DECODE).region(KV_POOL)
    assert plan.arena_bytes % MIB == 0
    with pytest.raises(BudgetError):
        MemoryPlan(arena_bytes=plan.arena_bytes - MIB, pool_slots=slots, **need)


def test_one_workspace_per_phase() -> None:
    """``plan_phase`` places one workspace at the arena's end and leaves the rest to the pool, in whole slots."""
    sizes = {Phase.PREFILL: MIB, Phase.DECODE: 0}
    prefill = plan_phase(
        Phase.PREFILL, arena_bytes=2 * MIB, workspace_bytes=sizes, slot_bytes=100_000, min_slots=10
    )
    assert [(region.id, region.offset, region.end) for region in prefill.regions] == [
        (KV_POOL, 0, 1_000_000),
        ("workspace", MIB, 2 * MIB),
    ]
    decode = plan_phase(Phase.DECODE, arena_bytes=2 * MIB, workspace_bytes=sizes, slot_bytes=100_000, min_slots=10)
    assert [(region.id, region.offset, region.end) for region in decode.regions] == [(KV_POOL, 0, 2_000_000)]


@pytest.mark.parametrize(
    ("prefill_mib", "decode_mib", "line"),
    [
        (8, 1, "prefill needs 9 MiB, --kv-stream-arena-mib is 2; raise it"),
        (1, 8, "decode needs 9 MiB, --kv-stream-arena-mib is 2; raise it"),
    ],
)
def test_refusal_names_the_phase_and_both_numbers(prefill_mib: int, decode_mib: int, line: str) -> None:
    """Whichever phase is planned, the line names the larger one and both numbers."""
    sizes = {Phase.PREFILL: prefill_mib * MIB, Phase.DECODE: decode_mib * MIB}
    for phase in Phase:
        with pytest.raises(BudgetError) as caught:
            plan_phase(phase, arena_bytes=2 * MIB, workspace_bytes=sizes, slot_bytes=MIB, min_slots=1)
        assert str(caught.value) == f"arena too small: {line}"


def test_small_fixed_pool_is_refused_with_its_flag() -> None:
    """A pool below the minimum is refused with both numbers in the terms of its own flag."""
    with pytest.raises(BudgetError) as caught:
        MemoryPlan.pool_only(pool_bytes=MIB, slot_bytes=MIB, min_slots=3, prefill=PREFILL, decode=DECODE)
    assert str(caught.value) == (
        "KV pool too small: 3 pages need 3 MiB, --kv-stream-pool-mib is 1; raise it"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"slot_bytes": 0},
        {"min_slots": 0},
        {"pool_slots": 1, "min_slots": 2},
        {"prefill": DECODE},
        {"decode": PREFILL},
        {"persistent": (RegionRequest("a", 1),)},
        {"persistent": (RegionRequest("a", 1, 512, True),)},
        {"arena_bytes": MIB + 1},
    ],
    ids=str,
)
def test_malformed_memory_plan_is_not_born(wrong: Need) -> None:
    """What can not be laid out is refused at birth as our own mistake, not later as a lack of memory."""
    right: Need = {"arena_bytes": MIB, "slot_bytes": 100, "min_slots": 1, "prefill": PREFILL, "decode": DECODE}
    MemoryPlan(**right)
    with pytest.raises(ArenaError):
        MemoryPlan(**(right | wrong))


@pytest.mark.parametrize("request_", [RegionRequest(KV_POOL, 1), RegionRequest("a", 1, persistent=True)])
def test_workspace_is_temporary_and_not_the_pool(request_: RegionRequest) -> None:
    """A phase's workspace can neither outlive the phase nor take the pool's name."""
    with pytest.raises(ArenaError):
        PhaseRequest(Phase.DECODE, (request_,))


STEPS = list(HandoverStep)


def enter(order: HandoverOrder, arena: Arena, step: HandoverStep, *, broken: bool = False) -> None:
    """Do a step; the commit really commits. A broken one raises, the commit before it has changed anything."""
    with order.step(step):
        if broken:
            raise ZeroDivisionError
        if step is HandoverStep.COMMIT:
            arena.begin().commit()


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["right", "other", "broken", "fail"]), st.sampled_from(STEPS)), max_size=12))
def test_handover_keeps_its_order(moves: list[tuple[str, HandoverStep]]) -> None:
    """Only the next step may be done; a failure rolls back before the commit and closes after it; ends are final."""
    arena, done, state = Arena(1), 0, HandoverState.RUNNING
    order = HandoverOrder(arena)
    for move, other in moves:
        over = state is not HandoverState.RUNNING
        failed = HandoverState.CLOSED if done > STEPS.index(HandoverStep.COMMIT) else HandoverState.ROLLED_BACK
        step = other if over or move == "other" else STEPS[done]
        if move == "fail":
            if over:
                with pytest.raises(ArenaError):
                    order.fail()
            else:
                state = failed
                assert order.fail() is failed
        elif over or step is not STEPS[done]:
            with pytest.raises(ArenaError):
                enter(order, arena, step)
        elif move == "broken":
            with pytest.raises(ZeroDivisionError):
                enter(order, arena, step, broken=True)
            state = failed
        else:
            enter(order, arena, step)
            done += 1
            state = HandoverState.ACTIVE if done == len(STEPS) else state
        assert order.state is state


def until(step: HandoverStep) -> tuple[HandoverOrder, Arena]:
    """A hand-over that stands right before ``step``."""
    arena = Arena(1)
    order = HandoverOrder(arena)
    for each in STEPS[: STEPS.index(step)]:
        enter(order, arena, each)
    return order, arena


def test_steps_do_not_nest() -> None:
    """Neither the same step nor the next one can begin inside a step; the refusals change nothing."""
    order, arena = until(HandoverStep.DRAIN)
    with order.step(HandoverStep.DRAIN):
        for step in (HandoverStep.DRAIN, HandoverStep.DROP_GRAPHS):
            with pytest.raises(ArenaError, match="inside step drain"):
                enter(order, arena, step)
    enter(order, arena, HandoverStep.DROP_GRAPHS)
    assert order.state is HandoverState.RUNNING


def test_interrupt_after_the_commit_closes() -> None:
    """The arena, not the block, says whether the commit happened: an interrupt right behind it closes the arena."""
    order, arena = until(HandoverStep.COMMIT)

    def interrupted() -> None:
        arena.begin().commit()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), order.step(HandoverStep.COMMIT):
        interrupted()
    assert order.state is HandoverState.CLOSED
    with pytest.raises(ArenaError, match="closed"):
        arena.begin()


def test_commit_step_without_commit_rolls_back() -> None:
    """A commit step that commits nothing is refused, so no step after it can run on the old layout."""
    order, _ = until(HandoverStep.COMMIT)
    with pytest.raises(ArenaError, match="without a commit"), order.step(HandoverStep.COMMIT):
        pass
    assert order.state is HandoverState.ROLLED_BACK


def test_giving_up_inside_a_step_is_final() -> None:
    """A step that gave the hand-over up may end normally; the state stays what the failure made it."""
    order, _ = until(HandoverStep.RELEASE)
    with order.step(HandoverStep.RELEASE):
        order.fail()
    assert order.state is HandoverState.ROLLED_BACK

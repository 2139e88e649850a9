"""Prefill and decode: what each reserves of the arena, the least arena that does, and the order of a hand-over.

    prefill | weights ring | kv_pool ............ | activations of n_ubatch rows, attention |
    decode  | weights ring | kv_pool ...................................... | a few rows    |

The pool has one offset in both layouts. The phase with the smaller workspace has the longer pool: going there, leases
on the pool may stay; coming back, the slots of its end are emptied and the leases released first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from kvs_core.errors import BudgetError
from kvs_core.memory.arena import ALIGNMENT, Arena, ArenaPlan, RegionRequest, Transaction
from kvs_core.memory.lease import ArenaError
from kvs_core.units import MIB, align_up, mib_ceil

KV_POOL = "kv_pool"

WEIGHTS_RING = "weights_ring"
"""The persistent region through which weights pass that do not stay on the device, where there are such."""


class Phase(Enum):
    """Which layout of the arena is active."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class PhaseRequest:
    """The workspace of one phase. Its regions end with the phase, so none is persistent."""

    phase: Phase
    workspace: tuple[RegionRequest, ...]

    def __post_init__(self) -> None:
        for region in self.workspace:
            if region.persistent or region.id == KV_POOL:
                raise ArenaError(f"region {region.id!r} is no workspace")

    @classmethod
    def of_bytes(cls, phase: Phase, workspace_bytes: int) -> PhaseRequest:
        """One region named ``workspace``, or none for 0 bytes."""
        if workspace_bytes == 0:
            return cls(phase, ())
        return cls(phase, (RegionRequest("workspace", workspace_bytes),))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the two phases share an arena of ``arena_bytes``. Raises ``BudgetError`` at birth if one has no room.

    slot_bytes  one page
    min_slots   the fewest slots of the pool that the engine can run with
    pool_slots  the pool's size if it is fixed; without it the pool takes all that a phase leaves
    All regions and the arena have one alignment: then no region slips into another's padding and the need is exact.
    """

    arena_bytes: int
    slot_bytes: int
    min_slots: int
    prefill: PhaseRequest
    decode: PhaseRequest
    persistent: tuple[RegionRequest, ...] = ()
    pool_slots: int | None = None

    def __post_init__(self) -> None:
        if self.slot_bytes < 1 or self.min_slots < 1:
            raise ArenaError(f"a pool of {self.min_slots} slots of {self.slot_bytes} bytes")
        if self.pool_slots is not None and self.pool_slots < self.min_slots:
            raise ArenaError(f"a fixed pool of {self.pool_slots} slots where {self.min_slots} are needed")
        if self.prefill.phase is not Phase.PREFILL or self.decode.phase is not Phase.DECODE:
            raise ArenaError("the requests of the phases are exchanged")
        if not all(region.persistent for region in self.persistent):
            raise ArenaError("a temporary region among the persistent ones")
        for region in (*self.persistent, *self.prefill.workspace, *self.decode.workspace):
            if region.alignment != ALIGNMENT:
                raise ArenaError(f"region {region.id!r} is aligned to {region.alignment}, not {ALIGNMENT}")
        self._check_budget()
        if self.arena_bytes % ALIGNMENT:
            raise ArenaError(f"an arena of {self.arena_bytes} bytes is no multiple of {ALIGNMENT}")

    @classmethod
    def pool_only(
        cls,
        *,
        pool_bytes: int,
        slot_bytes: int,
        min_slots: int,
        prefill: PhaseRequest,
        decode: PhaseRequest,
        persistent: tuple[RegionRequest, ...] = (),
    ) -> MemoryPlan:
        """A fixed pool of ``pool_bytes`` in whole slots; the arena is that plus the larger workspace, in whole MiB.

        The pool is the same in both phases, so no page ever has to leave it at a hand-over.
        """
        slots = pool_bytes // slot_bytes
        if slots < min_slots:
            needed_mib, given_mib = mib_ceil(min_slots * slot_bytes), pool_bytes // MIB
            raise BudgetError(
                f"KV pool too small: {min_slots} pages need {needed_mib} MiB, --kv-stream-pool-mib is {given_mib}; "
                "raise it",
                needed_mib=needed_mib,
                given_mib=given_mib,
            )
        needed_bytes = max(
            required_bytes(request, slot_bytes=slot_bytes, slots=slots, persistent=persistent)
            for request in (prefill, decode)
        )
        arena_bytes = mib_ceil(needed_bytes) * MIB
        return cls(arena_bytes, slot_bytes, min_slots, prefill, decode, persistent, pool_slots=slots)

    def request(self, phase: Phase) -> PhaseRequest:
        """What ``phase`` asks for."""
        return self.prefill if phase is Phase.PREFILL else self.decode

    def reserve(self, transaction: Transaction, phase: Phase) -> None:
        """Reserve all regions of ``phase``. The transaction is fresh, on an arena of ``arena_bytes``."""
        for region in self.persistent:
            transaction.reserve(region)
        for region in self.request(phase).workspace:
            transaction.reserve(region, at_end=True)
        if self.pool_slots is None:
            transaction.reserve_rest(KV_POOL, unit_bytes=self.slot_bytes, persistent=True)
        else:
            transaction.reserve(RegionRequest(KV_POOL, self.pool_slots * self.slot_bytes, persistent=True))

    def plan(self, phase: Phase) -> ArenaPlan:
        """The layout that ``reserve`` leads to, whatever phase was active before."""
        transaction = Arena(self.arena_bytes).begin()
        self.reserve(transaction, phase)
        return transaction.commit()

    def slots(self, phase: Phase) -> int:
        """Slots of the pool while ``phase`` is active."""
        return self.plan(phase).region(KV_POOL).size_bytes // self.slot_bytes

    def pool_bytes(self, phase: Phase) -> int:
        """Bytes for pages while ``phase`` is active: of the pool and of regions that no phase changes."""
        return self.slots(phase) * self.slot_bytes + sum(region.size_bytes for region in self.persistent)

    def _check_budget(self) -> None:
        slots = self.min_slots if self.pool_slots is None else self.pool_slots
        need = {
            phase: required_bytes(
                self.request(phase), slot_bytes=self.slot_bytes, slots=slots, persistent=self.persistent
            )
            for phase in Phase
        }
        worst = max(need, key=lambda phase: need[phase])
        if need[worst] <= self.arena_bytes:
            return
        needed_mib, given_mib = mib_ceil(need[worst]), self.arena_bytes // MIB
        raise BudgetError(
            f"arena too small: {worst.value} needs {needed_mib} MiB, --kv-stream-arena-mib is {given_mib}; "
            "raise it",
            needed_mib=needed_mib,
            given_mib=given_mib,
        )


def required_bytes(
    request: PhaseRequest, *, slot_bytes: int, slots: int, persistent: tuple[RegionRequest, ...] = ()
) -> int:
    """The least arena, a multiple of the alignment, in which the phase leaves a pool of ``slots`` slots."""
    others = sum(align_up(region.size_bytes, ALIGNMENT) for region in (*persistent, *request.workspace))
    return others + align_up(slots * slot_bytes, ALIGNMENT)


def plan_phase(
    phase: Phase, *, arena_bytes: int, workspace_bytes: Mapping[Phase, int], slot_bytes: int, min_slots: int
) -> ArenaPlan:
    """The layout of ``phase`` where each phase's workspace is one region. ``BudgetError`` if any phase has no room."""
    prefill, decode = (PhaseRequest.of_bytes(each, workspace_bytes[each]) for each in Phase)
    return MemoryPlan(arena_bytes, slot_bytes, min_slots, prefill, decode).plan(phase)


class HandoverStep(Enum):
    """The steps of a hand-over, in their only legal order."""

    PREPARE = "prepare"  # reserve the new layout, allocate and compile what it needs
    DRAIN = "drain"  # admission closes, dirty pages are published, streams run empty
    DROP_GRAPHS = "drop_graphs"  # captured graphs hold the old addresses
    RELEASE = "release"  # leases on regions that change
    COMMIT = "commit"  # the arena's transaction
    BIND = "bind"  # views of the new layout
    ACTIVATE = "activate"  # admission opens in the new phase


class HandoverState(Enum):
    """How a hand-over stands."""

    RUNNING = "running"
    ACTIVE = "active"  # the new layout is in use
    ROLLED_BACK = "rolled_back"  # the old layout is intact and in use
    CLOSED = "closed"  # neither layout may be used; the host history is still valid


class HandoverOrder:
    """The order of one hand-over on ``arena``. What is done stands inside ``with order.step(...)``.

    running --step(the next one), left normally--> running; after ACTIVATE: active
    running --step left by an exception, or fail()--> rolled_back if the arena has not committed, else closed
    active, rolled_back and closed are final. A refused move raises ``ArenaError`` and changes nothing.
    Whether a commit has happened is asked of the arena, so an interrupt just after it is not taken for one before it.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._old_generation = arena.generation
        self._todo = list(HandoverStep)
        self._inside = False
        self._state = HandoverState.RUNNING

    @property
    def state(self) -> HandoverState:
        """How this hand-over stands."""
        return self._state

    @contextmanager
    def step(self, step: HandoverStep) -> Iterator[None]:
        """Do one step inside this block. An exception passes through, after the state has changed."""
        if self._state is not HandoverState.RUNNING or self._inside or step is not self._todo[0]:
            raise ArenaError(f"step {step.value} is not next: {self._describe()}")
        self._inside = True
        try:
            yield
            if step is HandoverStep.COMMIT and self._state is HandoverState.RUNNING and not self._committed:
                raise ArenaError("the step commit ended without a commit of the arena")
        except BaseException:
            if self._state is HandoverState.RUNNING:
                self.fail()
            raise
        finally:
            self._inside = False
        if self._state is HandoverState.RUNNING:
            self._todo.pop(0)
            if not self._todo:
                self._state = HandoverState.ACTIVE

    def fail(self) -> HandoverState:
        """Give the hand-over up. After rolled_back the caller goes on as before; closed has closed the arena too."""
        if self._state is not HandoverState.RUNNING:
            raise ArenaError(f"nothing to give up: {self._describe()}")
        if self._committed:
            self._state = HandoverState.CLOSED
            self._arena.close()
        else:
            self._state = HandoverState.ROLLED_BACK
        return self._state

    @property
    def _committed(self) -> bool:
        return self._arena.generation != self._old_generation

    def _describe(self) -> str:
        where = f", {'inside' if self._inside else 'before'} step {self._todo[0].value}" if self._todo else ""
        return f"the hand-over is {self._state.value}{where}"

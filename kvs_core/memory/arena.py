"""The arena's layout: named regions of one device allocation, changed by transactions. Pure data, no bytes.

    0                                                                        total_bytes
    | persistent regions | kv_pool ............................ | workspace of the phase |
      reserve ->           reserve_rest, grows and shrinks here     <- reserve(at_end=True)

The pool starts at the same offset under every plan, so pages whose slots lie in both pools stay where they are and
no change of plan copies KV. The allocation's base address is aligned for the largest alignment in use.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType

from kvs_core.memory.lease import ArenaError, Lease, View
from kvs_core.units import align_up

ALIGNMENT = 256  # what every CUDA allocation has, and enough for vector loads and bulk copies


@dataclass(frozen=True, slots=True)
class RegionRequest:
    """A region to be placed. ``alignment`` is a power of two; ``persistent``: see ``Region``."""

    id: str
    size_bytes: int
    alignment: int = ALIGNMENT
    persistent: bool = False

    def __post_init__(self) -> None:
        _check_shape(self.id, self.size_bytes, self.alignment)


@dataclass(frozen=True, slots=True)
class Region:
    """Arena bytes [offset, offset + size_bytes) under a name.

    A persistent region is in every later plan, at the same offset; only its end may move.
    """

    id: str
    offset: int
    size_bytes: int
    alignment: int
    persistent: bool

    def __post_init__(self) -> None:
        _check_shape(self.id, self.size_bytes, self.alignment)
        if self.offset < 0 or self.offset % self.alignment:
            raise ArenaError(f"region {self.id!r} at {self.offset} is not aligned to {self.alignment}")

    @property
    def end(self) -> int:
        """The first byte after the region."""
        return self.offset + self.size_bytes

    def covers(self, older: Region) -> bool:
        """Whether everything that used ``older`` may go on using this: the same start, and no byte fewer."""
        return self.offset == older.offset and self.size_bytes >= older.size_bytes


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """A whole layout: aligned regions with unique ids, disjoint, in order of offset, inside [0, total_bytes)."""

    total_bytes: int
    regions: tuple[Region, ...]

    def __post_init__(self) -> None:
        if self.total_bytes < 1:
            raise ArenaError(f"an arena of {self.total_bytes} bytes")
        if len({region.id for region in self.regions}) != len(self.regions):
            raise ArenaError("two regions have the same id")
        end = 0
        for region in self.regions:
            if region.offset < end:
                raise ArenaError(f"region {region.id!r} at {region.offset} overlaps the one that ends at {end}")
            end = region.end
        if end > self.total_bytes:
            raise ArenaError(f"the regions end at {end}, the arena at {self.total_bytes}")

    def find(self, region_id: str) -> Region | None:
        """The region of that name, if this plan has one."""
        return next((region for region in self.regions if region.id == region_id), None)

    def region(self, region_id: str) -> Region:
        """The region of that name; ``ArenaError`` if there is none."""
        region = self.find(region_id)
        if region is None:
            raise ArenaError(f"no region {region_id!r} in this plan")
        return region

    @property
    def free_bytes(self) -> int:
        """Bytes in no region, padding included."""
        return self.total_bytes - sum(region.size_bytes for region in self.regions)


@dataclass(frozen=True, slots=True)
class _Mapping:
    """All that a commit changes, in one value: an interrupt meets the old one or the new one, never a mixture."""

    plan: ArenaPlan
    generation: int
    since: Mapping[str, int]  # per region: the generation since which every byte of it is where it is


class Arena:
    """Owns the current plan of ``total_bytes`` and the leases on it. Used by one thread.

    idle --begin()--> open    one transaction at a time
    open --its commit()--> idle, generation + 1
    open --its rollback()--> idle, nothing changed
    any  --close()--> closed  every lease is stale, every other move is refused
    A refused move raises ``ArenaError`` and changes nothing.
    """

    def __init__(self, total_bytes: int) -> None:
        self._mapping = _Mapping(ArenaPlan(total_bytes, ()), 0, {})
        self._leases: set[Lease] = set()
        self._transaction: Transaction | None = None
        self._closed = False

    @property
    def plan(self) -> ArenaPlan:
        """The committed layout: without regions before the first commit and after ``close``."""
        return self._mapping.plan

    @property
    def generation(self) -> int:
        """The number of commits so far."""
        return self._mapping.generation

    def begin(self) -> Transaction:
        """Start a new layout; the current one stays in force until the commit."""
        if self._closed:
            raise ArenaError("the arena is closed")
        if self._transaction is not None:
            raise ArenaError("another transaction is open")
        self._transaction = Transaction(self)
        return self._transaction

    def view(self, region_id: str, *, first_byte: int = 0, size_bytes: int | None = None) -> View:
        """A window on a region, by default all of it. ``first_byte`` counts from the region's start."""
        region = self.plan.region(region_id)
        size_bytes = region.size_bytes - first_byte if size_bytes is None else size_bytes
        if first_byte < 0 or first_byte + size_bytes > region.size_bytes:
            raise ArenaError(f"{size_bytes} bytes at {first_byte} are not in {region_id!r} of {region.size_bytes}")
        return View(region_id, region.offset + first_byte, size_bytes, self.generation)

    def is_current(self, view: View) -> bool:
        """Whether the window's bytes have belonged to its region, in place, ever since the view was made."""
        region = self.plan.find(view.region_id)
        if region is None or not self._mapping.since[region.id] <= view.generation <= self.generation:
            return False
        return region.offset <= view.offset and view.end <= region.end

    def lease(self, where: View | str) -> Lease:
        """The right to use a view, or a whole region by its id, until released. A stale view is refused."""
        view = self.view(where) if isinstance(where, str) else where
        if not self.is_current(view):
            raise ArenaError(f"the view of {view.region_id!r} from generation {view.generation} is stale")
        lease = Lease(self, view)
        self._leases.add(lease)
        return lease

    def end_lease(self, lease: Lease) -> None:
        """Called by ``Lease.release``."""
        self._leases.discard(lease)

    def close(self) -> None:
        """The bytes are gone or not to be trusted: no view is current from here on. Closing twice is harmless."""
        self._closed = True
        self._mapping = _Mapping(ArenaPlan(self.plan.total_bytes, ()), self.generation, {})
        self._transaction = None

    def _adopt(self, plan: ArenaPlan) -> None:
        """Make ``plan`` the current one, or refuse because of a lease or a lost persistent region."""
        in_place: set[str] = set()
        for old in self.plan.regions:
            new = plan.find(old.id)
            if new is None and old.persistent:
                raise ArenaError(f"persistent region {old.id!r} is missing from the new plan")
            if new is not None and new.covers(old):
                in_place.add(old.id)
        held = sorted({lease.region_id for lease in self._leases} - in_place)
        if held:
            raise ArenaError(f"leases are held on regions that would move, shrink or vanish: {', '.join(held)}")
        generation = self.generation + 1
        since = {
            region.id: self._mapping.since[region.id] if region.id in in_place else generation
            for region in plan.regions
        }
        self._mapping = _Mapping(plan, generation, since)


class Transaction:
    """A layout in the making. Made by ``Arena.begin``; leaving a ``with`` block uncommitted rolls back.

    open --reserve(), reserve_rest()--> open
    open --commit()--> done          refused: still open, to be retried or rolled back
    open --rollback()--> done
    Regions are placed first-fit in the order of the calls. One that is persistent in the current plan keeps its offset
    and must find its place free: reserve persistent regions first.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._current = arena.plan
        self._regions: list[Region] = []  # in order of offset

    def reserve(self, request: RegionRequest, *, at_end: bool = False) -> Region:
        """Place a region in the lowest free place that fits, or with ``at_end`` in the highest."""
        kept = self._kept(request.id, request.persistent)
        for gap in self._gaps_from(kept, request.alignment, highest_first=at_end):
            if gap.stop - gap.start >= request.size_bytes:
                offset = gap.start
                if at_end and kept is None:
                    offset = (gap.stop - request.size_bytes) // request.alignment * request.alignment
                return self._place(request, offset)
        raise ArenaError(f"no free place for region {request.id!r} of {request.size_bytes} bytes")

    def reserve_rest(
        self, region_id: str, *, unit_bytes: int, alignment: int = ALIGNMENT, persistent: bool = False
    ) -> Region:
        """Place a region of as many whole units as the largest free place holds."""
        unit = RegionRequest(region_id, unit_bytes, alignment, persistent)
        kept = self._kept(region_id, persistent)
        gap = max(self._gaps_from(kept, alignment), key=lambda gap: len(gap) // unit_bytes, default=range(0))
        units = len(gap) // unit_bytes
        if units == 0:
            raise ArenaError(f"no free place for one unit of {unit_bytes} bytes of region {region_id!r}")
        return self._place(replace(unit, size_bytes=units * unit_bytes), gap.start)

    def commit(self) -> ArenaPlan:
        """Make the layout the arena's. Refused while a lease is held on a region that moves, shrinks or vanishes.

        The caller has seen to it that the device is done with every region that changes.
        """
        self._check_open()
        plan = ArenaPlan(self._current.total_bytes, tuple(self._regions))
        self._arena._adopt(plan)
        self._arena._transaction = None
        return plan

    def rollback(self) -> None:
        """Forget the layout; the arena's stays as it was."""
        self._check_open()
        self._arena._transaction = None

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._arena._transaction is self:
            self.rollback()

    def _check_open(self) -> None:
        if self._arena._transaction is not self:
            raise ArenaError("the transaction is over")

    def _kept(self, region_id: str, persistent: bool) -> Region | None:
        """The region whose offset a reservation must keep, after the checks that all reservations share."""
        self._check_open()
        if any(region.id == region_id for region in self._regions):
            raise ArenaError(f"region {region_id!r} is already reserved")
        current = self._current.find(region_id)
        if current is None or not current.persistent:
            return None
        if not persistent:
            raise ArenaError(f"persistent region {region_id!r} can not become temporary")
        return current

    def _gaps_from(self, kept: Region | None, alignment: int, *, highest_first: bool = False) -> Iterator[range]:
        """The free places, each from the first offset where a region may start. Only one if an offset is kept."""
        starts = [0, *(region.end for region in self._regions)]
        stops = [*(region.offset for region in self._regions), self._current.total_bytes]
        gaps = list(zip(starts, stops, strict=True))
        for start, stop in reversed(gaps) if highest_first else gaps:
            first = align_up(start, alignment) if kept is None else kept.offset
            if start <= first < stop:
                yield range(first, stop)

    def _place(self, request: RegionRequest, offset: int) -> Region:
        region = Region(request.id, offset, request.size_bytes, request.alignment, request.persistent)
        insort(self._regions, region, key=lambda region: region.offset)
        return region


def _check_shape(region_id: str, size_bytes: int, alignment: int) -> None:
    if not region_id:
        raise ArenaError("a region without a name")
    if size_bytes < 1:
        raise ArenaError(f"region {region_id!r} of {size_bytes} bytes")
    if alignment < 1 or alignment & (alignment - 1):
        raise ArenaError(f"region {region_id!r} with alignment {alignment}, which is no power of two")

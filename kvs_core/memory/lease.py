"""Views say where, leases say kept alive. Neither is a device pointer: the device turns a view into one.

While a lease is held, no commit may move, shrink or drop its region, so the bytes of its view stay what they are.
A view alone keeps nothing: ask ``Arena.is_current`` before trusting one that was kept across a commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol


class ArenaError(AssertionError):
    """A malformed layout or a move that is not legal now: a bug of the caller. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class View:
    """A bounded window on one region: arena bytes [offset, offset + size_bytes), as mapped at ``generation``."""

    region_id: str
    offset: int
    size_bytes: int
    generation: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.size_bytes < 1 or self.generation < 0:
            raise ArenaError(f"no such window: {self.region_id!r}, {self.size_bytes} bytes at {self.offset}")

    @property
    def end(self) -> int:
        """The first byte after the window."""
        return self.offset + self.size_bytes


class Lessor(Protocol):
    """What a lease asks of the arena that granted it."""

    def is_current(self, view: View) -> bool: ...

    def end_lease(self, lease: Lease) -> None: ...


class Lease:
    """The right to use a view until released. Made by ``Arena.lease``.

    held --release()--> released      release() again: no effect
    held --the arena closes--> stale  release(): no effect
    Leaving a ``with`` block releases.
    """

    __slots__ = ("_lessor", "_released", "_view")

    def __init__(self, lessor: Lessor, view: View) -> None:
        self._lessor = lessor
        self._view = view
        self._released = False

    @property
    def view(self) -> View:
        """The leased window. Raises ``ArenaError`` once the lease is released or its region is gone."""
        if self._released:
            raise ArenaError(f"the lease on {self._view.region_id!r} is released")
        if not self._lessor.is_current(self._view):
            raise ArenaError(f"the lease on {self._view.region_id!r} is stale: the arena is closed")
        return self._view

    @property
    def region_id(self) -> str:
        """The region that this lease holds or held."""
        return self._view.region_id

    def release(self) -> None:
        """Give the right back. The caller has waited for every device operation that uses the view."""
        if not self._released:
            self._released = True
            self._lessor.end_lease(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

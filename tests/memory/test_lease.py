"""Leases: held, released, stale."""

from __future__ import annotations

import pytest

from kvs_core.memory.arena import Arena, RegionRequest
from kvs_core.memory.lease import ArenaError, View


@pytest.fixture
def arena() -> Arena:
    arena = Arena(1024)
    with arena.begin() as transaction:
        transaction.reserve(RegionRequest("state", 100, persistent=True))
        transaction.reserve_rest("pool", unit_bytes=200, persistent=True)
        transaction.commit()
    return arena


def test_view_is_where_the_region_is(arena: Arena) -> None:
    """A lease by id covers the whole region, at the offset and generation of the current plan."""
    with arena.lease("pool") as lease:
        assert lease.view == View("pool", 256, 600, 1)


def test_block_releases_even_on_error(arena: Arena) -> None:
    """After the block the right is gone, whatever ended it, and a second release does no harm."""
    with pytest.raises(KeyError), arena.lease("pool") as lease:
        raise KeyError
    lease.release()
    with pytest.raises(ArenaError, match="released"):
        _ = lease.view


def test_two_leases_hold_independently(arena: Arena) -> None:
    """Releasing one lease twice does not give up another one on the same bytes."""
    first, second = arena.lease("pool"), arena.lease("pool")
    first.release()
    first.release()
    transaction = arena.begin()
    transaction.reserve(RegionRequest("state", 100, persistent=True))
    transaction.reserve(RegionRequest("pool", 400, persistent=True))
    with pytest.raises(ArenaError, match="pool"):
        transaction.commit()
    second.release()
    transaction.commit()


def test_closed_arena_makes_every_lease_stale(arena: Arena) -> None:
    """Closing leaves no way to an address: leases are stale, views not current, no layout and no transaction."""
    lease, view, transaction = arena.lease("pool"), arena.view("state"), arena.begin()
    arena.close()
    arena.close()
    with pytest.raises(ArenaError, match="stale"):
        _ = lease.view
    lease.release()
    assert not arena.is_current(view)
    assert arena.plan.regions == ()
    for move in (arena.begin, transaction.commit, lambda: arena.lease("pool"), lambda: arena.lease(view)):
        with pytest.raises(ArenaError):
            move()


@pytest.mark.parametrize(
    "view", [View("pool", 0, 10, 1), View("pool", 800, 57, 1), View("pool", 256, 10, 2), View("gone", 256, 10, 1)]
)
def test_view_outside_its_region_is_refused(arena: Arena, view: View) -> None:
    """A view before, past, from after, or without its region is not current and can not be leased."""
    assert not arena.is_current(view)
    with pytest.raises(ArenaError, match="stale"):
        arena.lease(view)


@pytest.mark.parametrize(("offset", "size_bytes", "generation"), [(-1, 1, 0), (0, 0, 0), (0, 1, -1)])
def test_malformed_view_is_not_born(offset: int, size_bytes: int, generation: int) -> None:
    """A window has a place, at least one byte, and a generation."""
    with pytest.raises(ArenaError):
        View("a", offset, size_bytes, generation)

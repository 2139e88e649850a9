"""The largest arena that works."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvs_cli.bench.arenas import find_arena, largest
from tests.bench.rows import FakeWorkers


@given(st.integers(1, 200_000), st.integers(0, 200_000), st.integers(0, 200_000))
def test_the_search_is_exact_and_short(works_mib: int, beyond: int, limit: int) -> None:
    """It finds the limit to the MiB, never tries what is known, and takes few tries where the estimate is good."""
    most = works_mib + beyond
    limit = min(works_mib + limit, most)
    tried: list[int] = []

    def works(mib: int) -> bool:
        tried.append(mib)
        return mib <= limit

    assert largest(works_mib, most, works) == limit
    assert all(works_mib < mib <= most for mib in tried)
    assert len(tried) == len(set(tried)) <= 2 * (most - limit + 1).bit_length() + 1


def test_the_estimate_comes_from_live_memory(tmp_path: Path) -> None:
    """The first probe tells arena and free memory; their sum is tried before anything else, and the flags are kept."""
    workers = FakeWorkers(most_arena_mib=127)
    assert find_arena(workers, ["--ctx-size", "1024"], tmp_path / "log").arena_mib == 127
    arenas = [int(job["arguments"][-1]) for job in workers.jobs[1:]]
    assert arenas[0] == 130
    assert all(job["arguments"][:2] == ["--ctx-size", "1024"] for job in workers.jobs)


def test_nothing_works(tmp_path: Path) -> None:
    """The error of the first probe is the answer, and there is no second one."""
    workers = FakeWorkers(fail_contexts=[1024])
    assert find_arena(workers, ["--ctx-size", "1024"], tmp_path / "log").error == "it broke, as asked for"
    assert workers.kinds == ["probe"]

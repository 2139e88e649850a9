"""A line of the table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvs_core.units import MIB


class Verdict(StrEnum):
    """ok, or it works but not as well as it could, or something does not work."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """found: what is there. advice: what to do, in one line; empty where there is nothing to do.

    fatal: kvs cannot run here because of it.
    """

    name: str
    found: str
    verdict: Verdict = Verdict.OK
    advice: str = ""
    fatal: bool = False

    def __post_init__(self) -> None:
        assert (self.verdict is Verdict.OK) == (not self.advice), "a problem says what to do, and only a problem"
        assert not self.fatal or self.verdict is Verdict.PROBLEM


def warning(name: str, found: str, advice: str) -> Check:
    """It works, but not as well as it could."""
    return Check(name, found, Verdict.WARNING, advice)


def problem(name: str, found: str, advice: str, *, fatal: bool = False) -> Check:
    """It does not work."""
    return Check(name, found, Verdict.PROBLEM, advice, fatal)


def told(name: str, line: str, otherwise: str) -> Check:
    """A problem as an error of kvs says it: what is wrong, and behind the first semicolon what to do.

    otherwise: what to do where the line does not say
    """
    found, _, advice = line.partition("; ")
    return problem(name, found, advice or otherwise)


def size(size_bytes: int) -> str:
    """In MiB, or in GiB where that reads better."""
    return f"{size_bytes / 2**30:,.1f} GiB" if size_bytes >= 10 * 2**30 else f"{size_bytes / MIB:,.0f} MiB"


def gb_per_s(rate: float) -> str:
    """A rate for people."""
    return f"{rate / 1e9:,.1f} GB/s"

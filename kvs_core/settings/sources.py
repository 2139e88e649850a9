"""Which model: a file, where one can be fetched from, or one that is made instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of a hub repository, ``user/model[:quant]``, or the file of that name in it."""

    repo: str
    file: str | None = None
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class UrlModel:
    """A model at an http or https address."""

    url: str


SYNTHETIC_PREFIX = "synthetic:"
"""Of the name that ``--model`` takes instead of a file."""


@dataclass(frozen=True, slots=True)
class SyntheticModel:
    """A model with random weights, made instead of read; the name is without its prefix."""

    name: str


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, and how its file is read.

    source       a file (part 00001 of a split one), where to fetch it from if the cache lacks it, or a synthetic model;
                 None: the demo model that comes with kvs
    offline      the cache alone is asked
    override_kv  ``key=type:value`` texts, read with the file
    scan         all weights are looked at for NaN and infinity first
    """

    source: Path | HubModel | UrlModel | SyntheticModel | None
    offline: bool = False
    override_kv: tuple[str, ...] = ()
    scan: bool = False

"""The report: a table for people, and all facts for ``--json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvs_cli.doctor.check import Check, Verdict
from kvs_cli.doctor.facts import Facts, GpuFacts
from kvs_cli.doctor.verdicts import can_run
from kvs_cli.ending import printable, writing
from kvs_core.device.cuda.nvml import PcieLink
from kvs_core.device.cuda.requirements import dotted

_WIDTH = 140   # of the table in files and pipes
_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "bold red"}

Section = dict[str, Any]


def print_report(facts: Facts, checks: Sequence[Check]) -> None:
    """The table, and a line that sums it up."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, ratio in (("check", None), ("verdict", None), ("found", 3), ("what to do", 2)):
        table.add_column(heading, ratio=ratio, overflow="fold")
    for check in checks:
        style = _STYLES[check.verdict]
        table.add_row(printable(check.name), Text(check.verdict, style=style), printable(check.found),
                      printable(check.advice))
    with writing():
        console.print(table)
        console.print()
        console.print(_sum(facts, checks), soft_wrap=True)


def as_json(facts: Facts, checks: Sequence[Check]) -> Section:
    """Every key is always there; null: not known. Sizes in bytes, rates in bytes per second."""
    host, cuda, cache = facts.host, facts.cuda, facts.cache
    return {
        "can_run": can_run(checks),
        "device": facts.device,
        "checks": [
            {"name": check.name, "verdict": check.verdict.value, "found": check.found, "advice": check.advice or None}
            for check in checks
        ],
        "host": asdict(host),
        "cuda": {
            "nvidia_cards": cuda.nvidia_cards,
            "driver_version": cuda.driver_version,
            "driver_cuda": _version(cuda.driver_cuda),
            "driver_problem": cuda.driver_problem,
            "source": cuda.source,
            "cupy_packages": None if cuda.cupy_packages is None else list(cuda.cupy_packages),
            "cupy_cuda": _version(cuda.cupy_cuda),
            "cupy_problem": cuda.cupy_problem,
            "nvrtc": _version(cuda.nvrtc),
            "nvrtc_problem": cuda.nvrtc_problem,
            "pinned": None if cuda.pinned is None else asdict(cuda.pinned),
            "gpus": [_gpu(each) for each in cuda.gpus],
        },
        "cache": None if cache is None else {**asdict(cache), "folder": str(cache.folder)},
        "settings": dict(facts.settings),
        "failed_probes": dict(facts.failed),
    }


def _gpu(facts: GpuFacts) -> Section:
    gpu, card, rates = facts.gpu, facts.card, facts.rates
    holders = None if card is None or card.holders is None else [asdict(holder) for holder in card.holders]
    return {
        "index": gpu.index,
        "name": gpu.name,
        "compute_capability": f"{gpu.arch // 10}.{gpu.arch % 10}",
        "pci_address": gpu.address,
        "problem": facts.problem,
        "memory_bytes": gpu.memory_bytes,
        "free_bytes": None if card is None else card.free_bytes,
        "holders": holders,
        "pcie": asdict(PcieLink()) if card is None else asdict(card.link),
        "to_device_bytes_per_s": None if rates is None else rates.to_device,
        "to_host_bytes_per_s": None if rates is None else rates.to_host,
        "within_bytes_per_s": None if rates is None else rates.within,
    }


def _version(version: tuple[int, int] | None) -> str | None:
    return None if version is None else dotted(version)


def _sum(facts: Facts, checks: Sequence[Check]) -> str:
    if not can_run(checks):
        fatal = ", ".join(check.name for check in checks if check.fatal)
        return f"kvs cannot run here: see {fatal}"
    counts = {verdict: sum(check.verdict is verdict for check in checks) for verdict in Verdict}
    found = [f"{counts[verdict]} {verdict}{'s' if counts[verdict] > 1 else ''}"
             for verdict in (Verdict.PROBLEM, Verdict.WARNING) if counts[verdict]]
    return f"kvs runs here, on {facts.device}" + (f"; {' and '.join(found)}" if found else "; nothing to do")

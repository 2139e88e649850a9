"""What a measurement ran on: facts for ``machine.json``. Whatever cannot be found out is None."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import kvs_core
from kvs_core.device.host.machine import available_cores, available_ram_bytes, cpu_model
from kvs_core.units import MIB

_PACKAGES = ("kvs-llm", "numpy", "cupy-cuda12x", "cupy-cuda13x", "transformers", "torch")
_GIT_S = 10


def host_facts(command: Sequence[str]) -> dict[str, Any]:
    """Of this machine, this program and the command that measures."""
    return {
        "command": " ".join(command),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": f"{cpu_model()} x {os.cpu_count()}",
        "cores": available_cores(),
        "ram_free_mib": available_ram_bytes() // MIB,
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }


def device_facts(name: str) -> dict[str, Any]:
    """Of the device in use, in the process that uses it."""
    facts: dict[str, Any] = {"device": name}
    if name != "cpu":
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        facts |= {
            "gpu": properties["name"].decode(),
            "gpu_memory_mib": properties["totalGlobalMem"] // MIB,
            "compute_capability": f"{properties['major']}.{properties['minor']}",
            "cuda_driver": cupy.cuda.runtime.driverGetVersion(),
            "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
        }
    return facts


def _commit() -> str | None:
    root = Path(kvs_core.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=root, capture_output=True,
                              text=True, timeout=_GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

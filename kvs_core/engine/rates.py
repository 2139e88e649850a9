"""Rates: what the device in use does per second, measured in a few seconds and kept for the next time.

    KVS_CACHE_DIR/rates/<hash>.json      the hash covers the device, its driver or threads, the processor, Python, and
                                         the code that runs on the device

On a GPU copies are measured, over the link and within its memory, and what the host does in a round while the GPU waits
for it. Kernels are known as shares of the copies within memory, as they were on an H200. On the host everything is
measured, a small model's steps among it: the forecast is as good as that model is like the one in question.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvs_core.device import cuda, host
from kvs_core.device.base import Device, Stream
from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.cuda.driver import Driver
from kvs_core.device.cuda.nvrtc import SOURCES, cache_root
from kvs_core.device.host.device import HostDevice
from kvs_core.device.host.machine import cpu_model
from kvs_core.device.operands import Buffer
from kvs_core.engine.forecast import Rates
from kvs_core.engine.host_part import measure_host_part
from kvs_core.engine.host_rates import host_rates, measure_products, measure_steps
from kvs_core.engine.measuring import seconds_of
from kvs_core.errors import SettingsError
from kvs_core.models.recurrent import MAX_ROWS
from kvs_core.settings.rooms import KvSettings
from kvs_core.units import MIB

LOGGER = logging.getLogger(__name__)

Numbers = Mapping[str, float]

_FORMAT = 2              # of a kept file
_COPY_BYTES = 512 * MIB  # no cache holds it
_LINK_BYTES = 64 * MIB
_COPIES = 8              # between two looks at the clock


@dataclass(frozen=True, slots=True)
class Found:
    """kept: measured earlier."""

    rates: Rates
    kept: bool


def find_rates(device: Device, kv: KvSettings) -> Found:
    """The rates of ``device`` with these K and V types: those that were kept, or measured now, in a few seconds.

    Takes up to 1 GiB of device memory for that moment.
    """
    facts = _facts(device)
    if not isinstance(device, HostDevice):
        numbers, kept = _find(facts, lambda: _measure_cuda(device), device.name)
        return Found(gpu_rates(numbers), kept)
    machine, machine_kept = _find(facts, lambda: measure_products(device), device.name)
    types = {"type_k": kv.type_k, "type_v": kv.type_v, "rotation": kv.rotation}
    steps, steps_kept = _find(
        facts | types, lambda: measure_steps(device, kv, machine),
        f"{device.name}'s attention over K {kv.type_k} and V {kv.type_v}",
    )
    return Found(host_rates(machine | steps), machine_kept and steps_kept)


def forget_rates(device: Device) -> None:
    """Drop all that was kept for ``device``, with whatever K and V types: it is measured when it is needed next.

    ``SettingsError`` if the folder does not let go of it.
    """
    facts = _facts(device)
    for path in _folder().glob("*.json"):
        try:
            is_of_device = facts.items() <= json.loads(json.loads(path.read_text())["key"]).items()
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue   # damaged, so nobody takes it
        if is_of_device:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise SettingsError(f"rates cannot be measured anew: {path}: {error.strerror}; remove it, or set "
                                    "KVS_CACHE_DIR to another folder") from None


# On a GPU.

# Ratios to what ``measure_gpu`` finds, and times, of decode steps of synthetic Qwen3.5-27B models on an H200, where
# copies within memory ran at 4,167 GB/s. benchmarks/results/gpu_check.json has most of these steps.
_ROWS_KNOWN = (1, 2, 3, 4, 6, 8)
_RECORDS = {
    # By type held: the rate of products with one row; and what so many rows cost, as multiples of that.
    "": (1.08, (1.0, 1.08, 1.115, 1.136, 1.287, 1.339)),   # Q4_K's, and that of others who read memory as fast
    "IQ4_XS": (1.04, (1.0, 1.087, 1.125, 1.137, 1.439, 1.507)),
}
_ATTENTION_SHARE = 0.96       # from 64 to 256 Ki, all pages resident
_ATTENTION_ROW = 0.18
_LAYER_S = 18e-6              # of models of 64 and of 12 layers
_LEAST_ATTENTION_S = 15e-6    # below some 32 Ki tokens
_RUN_S = 8.5e-6               # the same launches without copies, less all pages resident, at 128 and 256 Ki
_RUN_ROWS_S = 12e-6           # likewise, of 2 and 4 rows at 86 to 92 Ki
_COPY_S = 2e-6                # streamed steps less bytes / link, likewise
_PLAN_S = 4e-6


def _measure_cuda(device: Device) -> Numbers:
    assert isinstance(device, CudaDevice)
    numbers = measure_gpu(device)
    return {**numbers, **measure_host_part(device, numbers["memory"])}


def measure_gpu(device: Device) -> Numbers:
    """Bytes per second over the link to the device and back, and of copies within its memory: those read and those
    written."""
    size = min(_COPY_BYTES, device.free_bytes() // 8)
    source, target = device.allocate((size,), np.uint8), device.allocate((size,), np.uint8)
    pinned = device.allocate_pinned(min(_LINK_BYTES, size))

    def seconds(dst: Buffer, src: Buffer, stream: Stream) -> float:
        def copy() -> None:
            for _ in range(_COPIES):
                device.enqueue_copy(dst, src, stream)
            stream.synchronize()

        return seconds_of(copy) / _COPIES

    return {
        "link": pinned.nbytes / seconds(target[: pinned.nbytes], pinned, device.copy),
        "back": pinned.nbytes / seconds(pinned, source[: pinned.nbytes], device.publish),
        "memory": 2.0 * size / seconds(target, source, device.compute),
    }


def gpu_rates(numbers: Numbers) -> Rates:
    """Rates of the CUDA kernels on a GPU with these numbers, of ``measure_gpu`` and ``measure_host_part``."""
    memory, rows = numbers["memory"], range(1, MAX_ROWS + 1)
    return Rates(
        link_bytes_per_s=numbers["link"],
        weight_bytes_per_s={name: share * memory for name, (share, _) in _RECORDS.items()},
        row_costs={name: np.interp(rows, _ROWS_KNOWN, costs).tolist() for name, (_, costs) in _RECORDS.items()},
        attention_bytes_per_s=_ATTENTION_SHARE * memory,
        attention_row=_ATTENTION_ROW,
        layer_s=_LAYER_S,
        least_attention_s=_LEAST_ATTENTION_S,
        run_s=_RUN_S,
        run_rows_s=_RUN_ROWS_S,
        copy_s=_COPY_S,
        round_s=numbers["round"],
        plan_s=_PLAN_S,
        draft_s=numbers["draft"],
    )


# On disk.


def _facts(device: Device) -> dict[str, object]:
    """What numbers are true for."""
    facts: dict[str, object] = {
        "format": _FORMAT, "machine": platform.node(), "device": device.name,
        "cpu": cpu_model(),   # under a machine's name another may stand: machines are rebuilt
        "python": platform.python_version(),
    }
    if isinstance(device, HostDevice):
        code = [Path(host.__path__[0])]
        facts |= {"threads": device.threads, "numpy": np.__version__}
    else:
        code = [SOURCES, Path(cuda.__path__[0])]
        facts |= {"driver": Driver().cuda_version}
    digest = hashlib.sha256()
    for path in sorted(path for folder in code for name in ("*.py", "*.cu*") for path in folder.rglob(name)):
        digest.update(path.read_bytes())
    return facts | {"code": digest.hexdigest()}


def _folder() -> Path:
    return cache_root() / "rates"


def _find(facts: Mapping[str, object], measure: Callable[[], Numbers], what: str) -> tuple[dict[str, float], bool]:
    """Numbers that are true for ``facts``, and whether they were kept."""
    key = json.dumps(facts, sort_keys=True)
    path = _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    numbers = _read(path, key)
    if numbers is not None:
        return numbers, True
    LOGGER.info("measuring the speed of %s; it is kept for the next time", what)
    numbers = dict(measure())
    _keep(path, key, numbers)
    return numbers, False


def _read(path: Path, key: str) -> dict[str, float] | None:
    """Numbers kept for ``key``; None if there are none, or they are damaged."""
    try:
        kept = json.loads(path.read_text())
        numbers = {str(name): float(value) for name, value in kept["numbers"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    sound = kept.get("key") == key and all(math.isfinite(value) and value > 0.0 for value in numbers.values())
    return numbers if sound else None


def _keep(path: Path, key: str, numbers: Numbers) -> None:
    """Write them; a disk that takes nothing costs a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under another name first: another process that reads finds all or nothing.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
            beside = Path(file.name)
        try:
            beside.write_text(json.dumps({"key": key, "numbers": dict(numbers)}))
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        LOGGER.warning("measured rates cannot be kept in %s: %s; set KVS_CACHE_DIR", path.parent, error.strerror)

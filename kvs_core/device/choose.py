"""Which device a command runs on: the only place, with the commands themselves, that names one."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

from kvs_core.device.base import Device
from kvs_core.device.host.device import HostDevice
from kvs_core.errors import DeviceError
from kvs_core.settings.rooms import DeviceSettings
from kvs_core.units import counted

LOGGER = logging.getLogger(__name__)


def open_device(settings: DeviceSettings) -> Device:
    """The device that the settings ask for; ``auto`` takes a GPU that works, else the CPU, and says which.

    Raises ``DeviceError`` for a GPU that was asked for and cannot be used.
    """
    if settings.wants_cpu:
        return _open_host(settings)
    from kvs_core.device.cuda.modules import CudaFound, find_cuda

    index = settings.gpu_index
    found = find_cuda(index)
    if isinstance(found, CudaFound):
        from kvs_core.device.cuda.cupy_runtime import CupyRuntime
        from kvs_core.device.cuda.device import CudaDevice

        runtime = CupyRuntime(index)
        try:
            device = CudaDevice(runtime)
        except BaseException:
            runtime.close()
            raise
        LOGGER.info("device: cuda:%d, %s, %.1f GiB free", index, device.name, device.free_bytes() / 2**30)
        return device
    if settings.name != "auto":
        raise DeviceError(f"--device {settings.name}: {found}")
    LOGGER.info("device: no GPU is used: %s", found)
    return _open_host(settings)


def begin_opening(settings: DeviceSettings) -> None:
    """Begin, in the background, what ``open_device`` spends its time on: loading CuPy and NVIDIA's driver, and the
    driver's context. It leaves no word; what is wrong is said by ``open_device``."""
    if not settings.wants_cpu:
        threading.Thread(target=_load_driver, args=(settings.gpu_index,), name="kvs-driver", daemon=True).start()


def _load_driver(index: int) -> None:
    from kvs_core.device.cuda.driver import Driver
    from kvs_core.device.cuda.modules import CudaFound, find_cuda

    with suppress(Exception):
        if isinstance(find_cuda(index), CudaFound):
            Driver().primary_context(index)


def _open_host(settings: DeviceSettings) -> HostDevice:
    device = HostDevice(settings.threads)
    LOGGER.info("device: %s, %s", device.name, counted(device.threads, "thread"))
    return device

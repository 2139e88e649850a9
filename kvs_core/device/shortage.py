"""What is said where memory cannot be had, each in one line: for what, how many MiB, how many there are, what to do."""

from __future__ import annotations

from kvs_core.device.host.machine import available_ram_bytes, is_wsl, locked_limit_bytes, total_ram_bytes
from kvs_core.errors import LESS_MEMORY, DeviceMemoryError
from kvs_core.units import MIB, mib_ceil


def no_memory(kind: str, purpose: str, size_bytes: int, *, free_bytes: int, total_bytes: int) -> DeviceMemoryError:
    """For ``size_bytes`` of a kind of memory ("GPU memory"), of which so much is free."""
    return DeviceMemoryError(
        f"{mib_ceil(size_bytes)} MiB of {kind} for {purpose} cannot be had: {free_bytes // MIB} of "
        f"{total_bytes // MIB} MiB are free; {LESS_MEMORY}"
    )


def no_ram(purpose: str, size_bytes: int) -> DeviceMemoryError:
    """For RAM, pinned or not."""
    return no_memory("RAM", purpose, size_bytes, free_bytes=available_ram_bytes(), total_bytes=total_ram_bytes())


def no_pinned(purpose: str, size_bytes: int) -> DeviceMemoryError:
    """For RAM that the driver does not pin, though there may be more."""
    return DeviceMemoryError(
        f"{mib_ceil(size_bytes)} MiB of pinned RAM for {purpose} cannot be had: {ram_left()}; {pinning_advice_here()}"
    )


def ram_left() -> str:
    """For an error: how much RAM is free."""
    return f"{available_ram_bytes() // MIB} of {total_ram_bytes() // MIB} MiB of RAM are free"


def pinning_advice(*, is_wsl: bool, is_limited: bool) -> str:
    """How more memory can be pinned. ``is_limited``: the system has a limit for locked memory."""
    if is_wsl:
        return "give WSL more RAM by memory= under [wsl2] in %UserProfile%\\.wslconfig: it pins half of it at most"
    if is_limited:
        return "ulimit -l unlimited, or memlock in /etc/security/limits.conf; for a container --ulimit memlock=-1"
    return "end programs that pin memory, or lower --ctx-size"


def pinning_advice_here() -> str:
    """On this machine."""
    return pinning_advice(is_wsl=is_wsl(), is_limited=locked_limit_bytes() is not None)

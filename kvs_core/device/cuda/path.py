"""What GPU kernels are compiled and launched for: the one at hand, or an older one that it plays.

Environment:
    KVS_CUDA_PATH=sm_80    as on a GPU of compute capability 8.0 with 99 KiB of shared memory a block: tries on a newer
                           GPU what older ones run. Unset or empty: by the GPU's own capability
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvs_core.errors import SettingsError

VARIABLE = "KVS_CUDA_PATH"
"""The environment variable."""

_FORCED = {"sm_80": (80, 99 << 10)}   # arch, and the least shared memory that a block may have from there on
_OVERLAP = 90                         # the first arch with programmatic dependent launches


@dataclass(frozen=True, slots=True)
class KernelPath:
    """What the compiler and the launchers go by.

    arch          compute capability times ten that kernels are written for
    shared_bytes  of one block at most
    target        what NVRTC compiles for: code such as sm_90, or PTX such as compute_80, which the driver finishes
    forced        the variable says so
    """

    arch: int
    shared_bytes: int
    target: str
    forced: bool

    @property
    def can_overlap(self) -> bool:
        """Whether a kernel may start before the one launched before it has finished."""
        return self.arch >= _OVERLAP

    def named(self, gpu: str) -> str:
        """The GPU's name, and what it plays."""
        return f"{gpu}, kernels of sm_{self.arch}" if self.forced else gpu


def asked_path() -> str:
    """What the variable says; "" if nothing. Raises ``SettingsError`` for what it may not say."""
    asked = os.environ.get(VARIABLE, "")
    if asked and asked not in _FORCED:
        raise SettingsError(
            f"{VARIABLE}={asked} is no path of the kernels; set it to {' or '.join(_FORCED)}, or unset it for the "
            "GPU's own"
        )
    return asked


def kernel_path(arch: int, shared_bytes: int) -> KernelPath:
    """The path on a GPU of compute capability ``arch`` / 10 whose blocks have ``shared_bytes``.

    Raises ``SettingsError`` for one that this GPU cannot run.
    """
    asked = asked_path()
    if not asked:
        return KernelPath(arch, shared_bytes, f"sm_{arch}", forced=False)
    played, most_bytes = _FORCED[asked]
    if played > arch:
        raise SettingsError(
            f"{VARIABLE}={asked}: this GPU has compute capability {arch / 10}, {played / 10} or newer is needed; "
            "unset it"
        )
    target = f"sm_{played}" if played == arch else f"compute_{played}"
    return KernelPath(played, min(shared_bytes, most_bytes), target, forced=True)

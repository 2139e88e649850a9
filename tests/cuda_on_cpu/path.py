"""Devices of tests on a path of the kernels that ``KVS_CUDA_PATH`` names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvs_core.device.cuda.path import VARIABLE, kernel_path


@contextmanager
def on_path(path: str) -> Iterator[None]:
    """The variable says ``path`` while this is open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, path)
        yield


def launcher_on(path: str) -> dict[str, Any]:
    """What a ``CpuLauncher`` is told, so that it is on that path; "": as it is by itself."""
    if not path:
        return {}
    with on_path(path):
        chosen = kernel_path(90, 227 << 10)
    return {"arch": chosen.arch, "shared_bytes": chosen.shared_bytes}

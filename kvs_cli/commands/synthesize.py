"""``kvs synthesize``: a synthetic model as a file, so that other programs can be measured on it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from kvs_cli.render import Screen
from kvs_core.errors import SettingsError
from kvs_core.formats.gguf_writer import gguf_header, write_gguf
from kvs_core.models.registry import read_spec
from kvs_core.models.synthetic import synthetic_model
from kvs_core.settings import LoggingSettings
from kvs_core.settings.kinds import as_path
from kvs_core.settings.sources import SYNTHETIC_PREFIX
from kvs_core.units import MIB, mib_ceil

LOGGER = logging.getLogger(__name__)


def execute(name: str, place: str) -> None:
    """Write it. Raises ``KvsError`` for a name that is unknown, a file that exists and a disk that is too full."""
    out = _new_file(place)
    file = synthetic_model(name.removeprefix(SYNTHETIC_PREFIX))
    spec = read_spec(file)
    size = len(gguf_header(file.metadata, file.tensors)) + file.file_bytes
    _check_room(out, size)
    try:
        with Screen.of(LoggingSettings()).stage(f"writing the {spec.name}", "bytes") as progress:
            write_gguf(out, file.metadata, file.tensors, progress)
    except OSError as error:
        raise SettingsError(f"{out}: cannot be written: {error.strerror or error}; give another place") from None
    weights_bits = 8 * sum(info.n_bytes for info in file.tensors.values()) / spec.n_params
    LOGGER.info("%s: %s, %.2f million parameters of %.2f bits on average, %.1f MiB",
                out, spec.name, spec.n_params / 1e6, weights_bits, size / MIB)


def _new_file(place: str) -> Path:
    try:
        out = as_path(place)
    except ValueError as error:
        raise SettingsError(f"OUT.gguf: {error}") from None
    if out.exists() or out.is_symlink():
        raise SettingsError(f"{out}: is there already; give a name that is free, or delete it first")
    if not out.parent.is_dir():
        raise SettingsError(f"{out}: there is no folder {out.parent}; make it first")
    return out


def _check_room(out: Path, size_bytes: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if free < size_bytes:
        raise SettingsError(
            f"{out}: the model takes {mib_ceil(size_bytes)} MiB, and {free // MIB} MiB of the disk are free; "
            "give a place on another disk"
        )

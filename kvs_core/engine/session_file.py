"""Saved conversations: tokens, pages and recurrent state of a session in one file.

    magic "KVSSESS1" | u32 header bytes | header (JSON) | tokens int32 | pages, layer by layer | checkpoints | SHA-256

Of layers that slide only those pages are there that the history holds. The header says which. It also names the model,
the pages' layout, the checkpoints' positions and the arrays of each, so that a file of another model or another KV type
is refused before anything changes; so is one whose checksum, over all that stands before it, is wrong. The last
checkpoint stands at the end of the tokens. Files are written beside their place and then renamed; only their owner can
read them.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvs_core.engine.checkpoints import Checkpoint
from kvs_core.engine.engine import Engine
from kvs_core.engine.session import Session
from kvs_core.errors import SessionFileError
from kvs_core.formats.gguf import GgufFile
from kvs_core.models.recurrent import StateSnapshot
from kvs_core.paging.geometry import GROUP_PAGES
from kvs_core.settings.rooms import RopeSettings

_MAGIC = b"KVSSESS1"
_MOST_HEADER_BYTES = 64 << 20
_PIECE = 1 << 22
_SAMPLE = 4096   # bytes of a tensor: a fine-tune differs in nearly all of them


@dataclass(frozen=True, slots=True)
class SavedSession:
    """What was written or read.

    tail  tokens behind the others that have no rows yet: the one that was sampled last
    """

    tokens: int
    size_bytes: int
    tail: tuple[int, ...] = ()


def model_key(file: GgufFile, rope: RopeSettings, divisors: str | None) -> str:
    """A model as saved sessions know it: its tensors' names, types, shapes and the first bytes of each, its
    architecture's keys, and how positions are turned.

    divisors  the tensor of them that depends on the context, see ``models.rope.divisors_name``
    """
    digest = hashlib.sha256(repr(rope).encode() + (divisors or "").encode())
    for name, info in sorted(file.tensors.items()):
        digest.update(repr((name, info.quant.name, tuple(info.shape))).encode())
        digest.update(info.data[:_SAMPLE].tobytes())
    for key, value in sorted(file.metadata.items()):
        if key.startswith(f"{file.arch}."):
            digest.update(repr((key, _plain(value))).encode())
    return digest.hexdigest()


def save_session(session: Session, path: Path, key: str, tail: Sequence[int] = ()) -> SavedSession:
    """Write a session, between steps. ``SessionFileError`` if it cannot be written; then ``path`` is as it was."""
    engine = session.engine
    checkpoints = [held for held in session.checkpoints if held.position < engine.committed]
    checkpoints.append(engine.checkpoint())
    header = {
        "model": key,
        "layout": engine.shapes.layout_id(),
        "layers": engine.kv_layers,
        "tokens": engine.committed,
        "tail": list(tail),
        "positions": [held.position for held in checkpoints],
        "arrays": _shapes(checkpoints[-1]),
        "pages": [_ranges(page for page, _ in engine.pages_of(layer)) for layer in range(engine.kv_layers)],
    }
    encoded = json.dumps(header).encode()
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)   # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                out = _Hashed(file)
                out.write(_MAGIC + struct.pack("<I", len(encoded)) + encoded)
                out.write(np.asarray(session.tokens, np.int32).tobytes())
                for layer in range(engine.kv_layers):
                    for _, page in engine.pages_of(layer):
                        out.write(page.tobytes())
                for held in checkpoints:
                    for _, array in _arrays(held):
                        out.write(array.tobytes())
                file.write(out.digest.digest())
                size = file.tell()
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise SessionFileError(f"{path}: the session cannot be saved: {error.strerror or error}") from error
    return SavedSession(engine.committed, size, tuple(tail))


def load_session(
    session: Session, path: Path, key: str, *,
    leave: Callable[[Sequence[int], Callable[[int], bool]], None] | None = None,
) -> SavedSession:
    """Have the session go on where a saved one stood.

    leave  called once all of the file is known to fit, before the session becomes empty: with its tokens, and what
           tells whether it has the pages to go on behind so many of them

    ``SessionFileError`` if the file does not fit; then nothing has changed. If the history has no room for its pages,
    that error is raised and the session is empty.
    """
    engine = session.engine
    here = engine.checkpoint()
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SessionFileError(f"{path}: is no file; give one that kvs has saved")
            size = status.st_size
            _check_sum(file, size, path)
            header = _read_header(file, path)
            _check_header(header, session, here, key, path)
            count = header["tokens"]
            pages = _read_pages(header, engine, path)
            pages_bytes = sum(len(held) * size for held, size in zip(pages, engine.page_bytes, strict=True))
            expected = (
                file.tell() + 4 * count + pages_bytes
                + len(header["positions"]) * here.size_bytes + 32
            )
            if size != expected:
                raise SessionFileError(f"{path}: has {size} bytes where its header says {expected}; save it again")
            tokens = np.frombuffer(file.read(4 * count), np.int32).tolist()
            pages_at = file.tell()
            file.seek(pages_bytes, os.SEEK_CUR)
            checkpoints = [_read_checkpoint(file, header["arrays"], position) for position in header["positions"]]
            file.seek(pages_at)
            if leave is not None:
                leave(tokens, lambda count: _lacking(pages, engine, count) is None)
            session.take_up(tokens, _pages(file, engine.page_bytes, pages), checkpoints)
    except OSError as error:
        raise SessionFileError(f"{path}: the session cannot be read: {error.strerror or error}") from error
    return SavedSession(count, size, tuple(header["tail"]))


def _open_at_once(path: str, flags: int) -> int:
    """Opens what would keep us waiting, such as a pipe, too."""
    return os.open(path, flags | os.O_NONBLOCK)


class _Hashed:
    """Writes and sums up."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.digest.update(data)
        self._file.write(data)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _arrays(checkpoint: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    for index, (state, ring_x) in sorted(checkpoint.state.layers.items()):
        yield f"state.{index}", state
        yield f"ring_x.{index}", ring_x
    if checkpoint.hidden is not None:
        yield "hidden", checkpoint.hidden


def _shapes(checkpoint: Checkpoint) -> list[list[Any]]:
    return [[name, array.dtype.str, list(array.shape)] for name, array in _arrays(checkpoint)]


def _read_checkpoint(file: BinaryIO, shapes: list[list[Any]], position: int) -> Checkpoint:
    arrays = {}
    for name, kind, shape in shapes:
        dtype = np.dtype(kind)
        arrays[name] = np.frombuffer(file.read(dtype.itemsize * prod(shape)), dtype).reshape(shape)
    layers = {
        int(name.removeprefix("state.")): (array, arrays[name.replace("state.", "ring_x.")])
        for name, array in arrays.items() if name.startswith("state.")
    }
    return Checkpoint(StateSnapshot(position, layers), arrays.get("hidden"))


def _pages(
    file: BinaryIO, page_bytes: Sequence[int], pages: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, bytes]]:
    for layer, (size, held) in enumerate(zip(page_bytes, pages, strict=True)):
        for page in held:
            yield layer, page, file.read(size)


def _ranges(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as [first, end) of those that follow each other."""
    ranges: list[tuple[int, int]] = []
    for page in pages:
        first = ranges.pop()[0] if ranges and ranges[-1][1] == page else page
        ranges.append((first, page + 1))
    return ranges


def _check_sum(file: BinaryIO, size: int, path: Path) -> None:
    if size < len(_MAGIC) + 4 + 32 or file.read(len(_MAGIC)) != _MAGIC:
        raise SessionFileError(f"{path}: is no saved session of kvs; give a file that kvs has saved")
    file.seek(0)
    digest, left = hashlib.sha256(), size - 32
    while left > 0:
        piece = file.read(min(_PIECE, left))
        if not piece:
            break
        digest.update(piece)
        left -= len(piece)
    if left or file.read(32) != digest.digest():
        raise SessionFileError(f"{path}: is damaged: its checksum is wrong; save it again")
    file.seek(len(_MAGIC))


def _read_header(file: BinaryIO, path: Path) -> dict[str, Any]:
    (length,) = struct.unpack("<I", file.read(4))
    if length > _MOST_HEADER_BYTES:
        raise SessionFileError(f"{path}: a header of {length} bytes; is it a saved session of kvs?")
    try:
        header: dict[str, Any] = json.loads(file.read(length))
        header["tokens"] = count = int(header["tokens"])
        header["tail"] = [int(token) for token in header["tail"]]
        header["positions"] = places = [int(position) for position in header["positions"]]
        in_order = all(0 <= first < last for first, last in pairwise(places)) and places[-1] == count >= 0
        if in_order and {"model", "layout", "layers", "arrays"} <= header.keys():
            return header
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        pass
    raise SessionFileError(f"{path}: its header cannot be read; save it again")


def _read_pages(header: dict[str, Any], engine: Engine, path: Path) -> list[list[int]]:
    """The numbers of the pages that the file has of each layer, whole groups. ``SessionFileError`` where some are
    missing."""
    tokens = header["tokens"]
    every = range(engine.geometry.pages_of(tokens))
    ranges = header.get("pages", [_ranges(every)] * engine.kv_layers)
    try:
        pages = [[page for first, end in held for page in every[first:end]] for held in ranges]
        can_be_read = len(pages) == engine.kv_layers and all(
            _ranges(held) == list(map(tuple, said))
            and all(first % GROUP_PAGES == 0 and (end % GROUP_PAGES == 0 or end == len(every)) for first, end in said)
            for held, said in zip(pages, ranges, strict=True)
        )
    except (ValueError, TypeError):
        can_be_read = False
    if not can_be_read:
        raise SessionFileError(f"{path}: its header cannot be read; save it again")
    lacking = _lacking(pages, engine, tokens)
    if lacking is not None:
        raise SessionFileError(
            f"{path}: has {len(lacking)} of {len(every)} pages of a layer, and this session needs more; save it with "
            "--swa-full, or leave out --context-shift"
        )
    return pages


def _lacking(pages: Sequence[Sequence[int]], engine: Engine, tokens: int) -> Sequence[int] | None:
    """The first layer's pages of which some are missing for a session that goes on behind ``tokens`` tokens."""
    needed = (set(engine.needed_pages(layer, tokens)) for layer in range(engine.kv_layers))
    return next((held for held, wanted in zip(pages, needed, strict=True) if not wanted.issubset(held)), None)


def _check_header(
    header: dict[str, Any], session: Session, here: Checkpoint, key: str, path: Path
) -> None:
    engine = session.engine
    if header["model"] != key:
        raise SessionFileError(f"{path}: was saved with another model; load that one, or start anew")
    if header["layout"] != engine.shapes.layout_id() or header["layers"] != engine.kv_layers:
        raise SessionFileError(
            f"{path}: was saved with pages {header['layout']} of {header['layers']} layers, this session has "
            f"{engine.shapes.layout_id()} of {engine.kv_layers}; use the same --cache-type-k, --cache-type-v, "
            "--kv-page-tokens, --spec-type and --device"
        )
    if header["tokens"] > engine.context.context_tokens:
        raise SessionFileError(
            f"{path}: holds {header['tokens']} tokens, the context has room for {engine.context.context_tokens}; "
            "raise --ctx-size"
        )
    if _shapes(here) != header["arrays"]:
        raise SessionFileError(
            f"{path}: holds other recurrent state than this session has; use the same --spec-type and --device"
        )

"""What the CUDA device needs of a CUDA runtime: memory, streams, events, copies, graphs. ``CupyRuntime`` has it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from kvs_core.device.cuda.kernel import Gemm, Launcher
from kvs_core.device.operands import Buffer


class Event(Protocol):
    """A reusable mark in a stream."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...


class RawStream(Protocol):
    """A queue of work."""

    def record(self, event: Event) -> None: ...

    def wait(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...


class Graph(Protocol):
    """Captured work."""

    def launch(self) -> None:
        """Enqueue it on the stream it was captured from. ``DeviceMemoryError`` where it finds no memory: nothing is."""
        ...


class Runtime(Protocol):
    """One GPU. Errors of the runtime are ``DeviceError``s, those for want of memory ``DeviceMemoryError``s.

    compute, copy, publish  its streams; the launcher and the products work on ``compute``
    overcommits             managed memory may be larger than the device's: the rest of it is in the host's
    """

    name: str
    overcommits: bool
    launcher: Launcher
    gemm: Gemm
    compute: RawStream
    copy: RawStream
    publish: RawStream

    def allocate(self, size_bytes: int, purpose: str) -> Buffer:
        """Zeroed device memory, uint8 [size_bytes]. ``DeviceMemoryError`` naming ``purpose`` if there is none."""
        ...

    def allocate_managed(self, size_bytes: int, purpose: str) -> Buffer:
        """The same of unified memory, on the device while there is room."""
        ...

    def allocate_pinned(self, size_bytes: int, purpose: str) -> np.ndarray:
        """Host memory that copies move fast, and that kernels can read. ``DeviceMemoryError`` if there is none."""
        ...

    def view(self, memory: Buffer, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        """A window on device memory."""
        ...

    def event(self, *, timed: bool = False) -> Event:
        """A new event. ``timed``: one for ``seconds_between``."""
        ...

    def seconds_between(self, first: Event, last: Event) -> float:
        """Of two timed events that are done."""
        ...

    def enqueue_copy(self, dst: int, src: int, size_bytes: int, stream: RawStream) -> None:
        """Copy between addresses of device or pinned memory. Outside of captures, host memory that is not pinned may
        take the place of that which is: the call then blocks while its bytes are read, or until they are there."""
        ...

    def begin_capture(self) -> None:
        """Record what is enqueued on ``compute`` from now on, and on streams that wait for it."""
        ...

    def end_capture(self) -> Graph:
        """The recorded work, ready to be launched. ``DeviceMemoryError`` where a graph of it finds no memory."""
        ...

    def abandon_capture(self) -> None:
        """Stop recording; nothing comes of it."""
        ...

    def measure_copies(self, size_bytes: int, times: int) -> float:
        """Bytes per second of copies from pinned memory to the device: the median. Blocks; uses memory of its own."""
        ...

    def free_bytes(self) -> int:
        """Device memory that could be had now."""
        ...

    def another(self) -> Runtime:
        """One of its own on the same GPU."""
        ...

    def close(self) -> None:
        """Release what the runtime holds."""
        ...

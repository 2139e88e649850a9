"""Kernel arguments, packed by the types of a ``Kernel`` into memory that a launch points to."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

from kvs_core.device.cuda.kernel import Arg, Kernel, address

_FORMATS = {Arg.PTR: "Q", Arg.I32: "i", Arg.I64: "q", Arg.U32: "I", Arg.F32: "f"}


class ArgumentBlock:
    """The arguments of one kernel's launches, one after the other: when a launch returns, they have been copied."""

    __slots__ = ("_kernel", "_memory", "_pack_into", "_pointer_slots", "pointers")

    def __init__(self, kernel: Kernel) -> None:
        """``pointers``: void* [arguments], where each argument lies."""
        self._kernel = kernel
        # Native alignment, so that every argument lies as C would have it.
        form = struct.Struct("".join(_FORMATS[arg] for arg in kernel.args))
        self._pack_into = form.pack_into
        self._memory = ctypes.create_string_buffer(max(form.size, 1))
        self._pointer_slots = tuple(i for i, arg in enumerate(kernel.args) if arg is Arg.PTR)
        start = ctypes.addressof(self._memory)
        ends = [struct.calcsize("".join(_FORMATS[a] for a in kernel.args[: i + 1])) for i in range(len(kernel.args))]
        places = [start + end - struct.calcsize(_FORMATS[a]) for end, a in zip(ends, kernel.args, strict=True)]
        self.pointers = (ctypes.c_void_p * max(len(places), 1))(*places)

    def pack(self, args: Sequence[Any]) -> ctypes.Array[ctypes.c_void_p]:
        """``pointers``, with ``args`` behind them. Raises ``TypeError`` for what the kernel does not take."""
        values = list(args)
        try:
            for slot in self._pointer_slots:
                if type(values[slot]) is not int:
                    values[slot] = address(values[slot])
            self._pack_into(self._memory, 0, *values)
        except (struct.error, IndexError, AttributeError) as error:
            kinds = ", ".join(arg.name for arg in self._kernel.args)
            given = ", ".join(type(value).__name__ for value in args)
            raise TypeError(f"{self._kernel.name} takes ({kinds}), was given ({given}): {error}") from error
        return self.pointers

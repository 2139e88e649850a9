"""What the op families of the CUDA device share: the launcher, the step's facts, and their scratch of the phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvs_core.device.cuda.kernel import Launcher
from kvs_core.device.operands import Buffer
from kvs_core.memory.phases import Phase


@dataclass(slots=True)
class Context:
    """One per device; ``CudaOps`` keeps it up to date.

    step     int32 [STEP_WORDS], see ``tables``: kernels of a DECODE step take positions from here, never by value
    tokens   int32 [most rows]: tokens of a prefill step
    rows     T of the step, or of the tile in use
    first_row  of that tile in the step; else 0
    position of row 0: for PREFILL launches only
    scratch  the families' own buffers of the phase in use, by name
    forms    by address: rows that their producer left in another form than float32 (``ops.row_forms``), for the
             product that takes them next
    """

    launcher: Launcher
    step: Buffer
    tokens: Buffer = None
    rows: int = 0
    first_row: int = 0
    position: int = 0
    phase: Phase = Phase.PREFILL
    scratch: Mapping[str, Buffer] = field(default_factory=dict)
    forms: dict[int, Any] = field(default_factory=dict)

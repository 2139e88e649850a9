"""Handover: takes the arena from one phase's layout to the other's, or changes nothing.

Both layouts have the KV pool at one offset, so the pages whose slots lie in both pools stay where they are; those at
the end of a pool that shrinks are streamed from then on, or move down, before anything is committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvs_core.device.base import Device
from kvs_core.device.operands import Buffer
from kvs_core.device.workspace import BufferSpec, Workspace, workspace_bytes
from kvs_core.errors import DeviceError
from kvs_core.memory.arena import Arena
from kvs_core.memory.lease import Lease, View
from kvs_core.memory.phases import KV_POOL, HandoverOrder, HandoverState, HandoverStep, MemoryPlan, Phase
from kvs_core.streaming.kv_stream import KvStream
from kvs_core.streaming.layer_kv import AttentionScratch

WORKSPACE = "workspace"
"""The region of a phase's activations and attention scratch."""

SLIDING_POOL = "sliding_pool"
"""The region of the pages of layers that slide, where they have a pool of their own: the same in both phases."""

_CLOSED = "the session is closed, what was published to the host history is valid: start again"


@dataclass(frozen=True, slots=True)
class PhaseBuffers:
    """What a phase keeps in its workspace.

    specs       the model's, attention's and the device's own buffers
    scratch     of "groups", "segments", "running": attention's flat float32 buffers
    group_rows  see ``AttentionScratch``
    """

    specs: tuple[BufferSpec, ...]
    scratch: tuple[str, ...]
    group_rows: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the workspace."""
        return workspace_bytes(self.specs)


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout: its phase, the leases that keep it alive, and the buffers bound to it."""

    phase: Phase
    leases: tuple[Lease, ...]
    workspace: Workspace
    pool: Buffer
    pool_offset: int   # in the arena
    scratch: AttentionScratch

    def release(self) -> None:
        """Give the leases back."""
        for lease in self.leases:
            lease.release()


def scratch_name(name: str) -> str:
    """Name, in a workspace, of one of attention's scratch buffers."""
    return f"attention_{name}"


class Handover:
    """Owns the layout in use, and carries out phase changes on one arena, its KV and a device."""

    def __init__(
        self, device: Device, arena: Arena, memory: MemoryPlan, kv: KvStream, buffers: Mapping[Phase, PhaseBuffers]
    ) -> None:
        self._device = device
        self._arena = arena
        self._memory = memory
        self._kv = kv
        self._buffers = buffers
        with arena.begin() as transaction:
            memory.reserve(transaction, Phase.PREFILL)
            transaction.commit()
        self._layout: Layout | None = self._bind(Phase.PREFILL)

    @property
    def layout(self) -> Layout:
        """The layout in use: prefill's at first. ``DeviceError`` after a change that failed behind its commit."""
        if self._layout is None:
            raise DeviceError(f"a change of phase failed; {_CLOSED}")
        return self._layout

    def change(self, phase: Phase) -> None:
        """Go to ``phase``, between steps. After an error before the commit the old layout is in use as before.

        An error after it closes the arena: no layout may be used, and the host history is still valid.
        """
        old = self.layout
        order = HandoverOrder(self._arena)
        transaction = None
        try:
            with order.step(HandoverStep.PREPARE):
                transaction = self._arena.begin()
                self._memory.reserve(transaction, phase)
            with order.step(HandoverStep.DRAIN):
                self._kv.vacate(self._memory.slots(phase))
                self._kv.drain()
            with order.step(HandoverStep.DROP_GRAPHS):
                self._device.drop_captured()
            with order.step(HandoverStep.RELEASE):
                old.release()
            with order.step(HandoverStep.COMMIT):
                transaction.commit()
            with order.step(HandoverStep.BIND):
                layout = self._bind(phase)
            with order.step(HandoverStep.ACTIVATE):
                self._layout = layout
        except BaseException as error:
            if order.state is HandoverState.ROLLED_BACK:
                if transaction is not None:
                    transaction.rollback()
                self._layout = None   # unless it can be bound again
                old.release()
                self._layout = self._bind(old.phase)
                raise
            if order.state is HandoverState.CLOSED:
                self._layout = None
                self._kv.unbind()
                if isinstance(error, Exception):
                    raise DeviceError(f"the change to the {phase.value} phase failed ({error}); {_CLOSED}") from error
            raise

    def _bind(self, phase: Phase) -> Layout:
        sliding = [region.id for region in self._memory.persistent if region.id == SLIDING_POOL]
        regions = [KV_POOL, WORKSPACE, *sliding]
        leases = tuple(self._arena.lease(region) for region in regions)
        pool_view, ws_view, *others = (lease.view for lease in leases)
        buffers = self._buffers[phase]
        workspace = Workspace(self._device, ws_view.offset, ws_view.size_bytes, buffers.specs)
        page_bytes = self._kv.geometry.page_bytes
        pool = self._slots(pool_view, page_bytes)
        sliding_pool = self._slots(others[0], self._kv.sliding_page_bytes) if others else None
        scratch = AttentionScratch(
            buffers.group_rows, **{name: workspace[scratch_name(name)] for name in buffers.scratch}
        )
        self._device.bind_scratch(workspace, phase)
        self._kv.bind(pool, scratch, sliding_pool)
        return Layout(phase, leases, workspace, pool, pool_view.offset, scratch)

    def _slots(self, view: View, page_bytes: int) -> Buffer:
        """A window on the arena as slots of pages."""
        return self._device.arena_view(view.offset, (view.size_bytes // page_bytes, page_bytes), np.uint8)


def attention_scratch(
    phase: Phase, *, rows: int, heads: int, v_dim: int, groups: int, segments: int
) -> Sequence[tuple[str, BufferSpec]]:
    """The attention buffers of a phase for steps of up to ``rows`` rows, by the field of ``AttentionScratch``."""
    partial = rows * heads * (v_dim + 2)
    if phase is Phase.PREFILL:
        sizes = {"running": partial}
    else:
        sizes = {"groups": groups * partial, "segments": segments * partial}
    return [(name, BufferSpec(scratch_name(name), (size,), np.float32)) for name, size in sizes.items()]

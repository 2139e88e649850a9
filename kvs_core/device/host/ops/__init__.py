"""The host's ops, assembled: the reference numbers that every other device is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from kvs_core.device.base import Buffer, Weight
from kvs_core.device.host.ops import attention, basic, gdn, kv_write
from kvs_core.device.host.workers import Team
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import PageGeometry
from kvs_core.paging.spans import GroupPart, PageRef


class HostOps:
    """``Ops`` on NumPy arrays. An op is done when it returns; no bit depends on the team's number of threads."""

    def __init__(self, team: Team, *, round_q: bool = False) -> None:
        """``round_q``: attention rounds queries to q8_0 when keys are quantised, as llama.cpp's CPU code does."""
        self._team = team
        self._round_q = round_q

    embed = staticmethod(basic.embed)
    rms_norm = staticmethod(basic.rms_norm)
    add = staticmethod(basic.add)
    add_bias = staticmethod(basic.add_bias)
    swiglu = staticmethod(basic.swiglu)
    gate_heads = staticmethod(basic.gate_heads)
    rope = staticmethod(basic.rope)
    hadamard = staticmethod(basic.hadamard)
    scale = staticmethod(basic.scale)
    zero_page = staticmethod(kv_write.zero_page)
    kv_write = staticmethod(kv_write.kv_write)
    fold = staticmethod(attention.fold)
    finish_decode = staticmethod(attention.finish_decode)
    finish_prefill = staticmethod(attention.finish_prefill)
    gdn_decode = staticmethod(gdn.gdn_decode)
    gdn_apply = staticmethod(gdn.gdn_apply)
    gdn_prefill = staticmethod(gdn.gdn_prefill)

    def matmul(self, x: Buffer, weight: Weight, out: Buffer, *, phase: Phase) -> None:
        """See ``Ops.matmul``."""
        basic.matmul(x, weight, out, phase=phase, team=self._team)

    def attend_decode(
        self, q: Buffer, pool: Buffer, geometry: PageGeometry, parts: Sequence[GroupPart], scratch: Buffer,
        *, first_position: int
    ) -> None:
        """See ``Ops.attend_decode``."""
        attention.attend_decode(
            q, pool, geometry, parts, scratch, first_position=first_position, round_q=self._round_q
        )

    def attend_prefill(
        self, q: Buffer, pool: Buffer, geometry: PageGeometry, pages: Sequence[PageRef], running: Buffer,
        *, fresh: bool, first_position: int
    ) -> None:
        """See ``Ops.attend_prefill``."""
        attention.attend_prefill(
            q, pool, geometry, pages, running, fresh=fresh, first_position=first_position, round_q=self._round_q
        )

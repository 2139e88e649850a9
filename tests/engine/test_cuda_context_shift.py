"""Context shift on the CUDA engine: the same bits wherever pages are, in both orders of bytes, and no new memory.

Every test runs on the CPU stand-in, with small cases, and on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from kvs_core.device.host.ops import kv_shift
from kvs_core.engine.engine import Engine
from kvs_core.engine.session import Session
from kvs_core.paging.geometry import PageOrder
from kvs_core.paging.shift import plan_shift
from kvs_core.streaming import shift
from tests.engine.machines import MACHINES, Machine, machine_of
from tests.engine.tiny import engine, kv_settings, text
from tests.reference import kv_fragments
from tests.support.compare import log_probs
from tests.support.tiny_gguf import write_tiny_llama


@pytest.fixture(scope="module", params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    """See ``MACHINES``."""
    return machine_of(request.param)


def pages_of(built: Engine) -> list[np.ndarray]:
    """Copies of all pages, in ROWS order, layer by layer."""
    pages = [page.copy() for _, _, page in built.pages()]
    if built.geometry.order is PageOrder.FRAGMENTS:
        pages = [kv_fragments.unpack(page, built.geometry.kv_heads) for page in pages]
    return pages


def shifted_on_host(built: Engine, keep: int, discard: int) -> list[bytes]:
    """The pages as the host's op makes them of what is there."""
    geometry, held = replace(built.geometry, order=PageOrder.ROWS), pages_of(built)
    count, left = len(held) // built.kv_layers, geometry.pages_of(built.committed - discard)
    wanted = []
    for layer, params in enumerate(built._model.attention):
        pages = held[layer * count : (layer + 1) * count]
        table = getattr(params.rope, "table", params.rope)
        for move in plan_shift(keep, discard, built.committed, geometry.page_tokens):
            sources = [pages[source] for source in move.sources]
            kv_shift.shift_rows(pages[move.page], sources, geometry, table, move, positions=-discard)
        wanted += [page.tobytes() for page in pages[:left]]
    return wanted


@pytest.mark.parametrize(("types", "head_dim", "page"), [(("q8_0", "q4_0"), 256, 256), (("f16", "f16"), 64, 32)],
                         ids=["fragments", "rows"])
def test_bits_and_numbers(
    machine: Machine, tmp_path: Path, types: tuple[str, str], head_dim: int, page: int
) -> None:
    """Captured steps before and behind two shifts: resident and streamed have the same bits, the host nearly the same
    numbers; pages have the bits of the host's op, and the device gives no memory after the start."""
    path = write_tiny_llama(
        tmp_path / "llama.gguf", seed=2, n_layer=2, weight_type="q8_0", embd=32, heads=2, kv_heads=1, ffn=32,
        head_dim=head_dim,
    )
    streams = machine.on_gpu or page == 32   # the stand-in takes a minute for so many large pages
    tokens = (13 if streams else 3) * page // 2 + 7
    made: list[list[np.ndarray]] = []
    for pool, on_host in ((None, False), (0.0, False), (None, True)):
        runtime = machine.runtime()
        with engine(
            path, kv=kv_settings(*types, page_tokens=page), pool=pool, fixed=True, context=8 * page, shift=True,
            device=None if on_host else lambda runtime=runtime: machine.device(runtime),
        ) as built:
            order = PageOrder.FRAGMENTS if page == 256 and not on_host else PageOrder.ROWS
            assert built.geometry.order is order
            session = Session(built)
            logits = [session.prefill(text(256, tokens))[0]]
            logits += [np.asarray(session.decode(token)) for token in (5, 6)]
            before = runtime.allocations
            for keep, discard in ((page // 2 + 1, page // 3), (3, 11)):
                wanted = shifted_on_host(built, keep, discard)
                with patch.object(shift, "_BATCH_BYTES", 1):
                    session.shift(keep, discard)
                assert [row.tobytes() for row in pages_of(built)] == wanted
                logits += [np.asarray(session.decode(token)) for token in (7, 8)]
            assert runtime.allocations == before
            assert (built.report().stats.streamed_pages_per_step > 0) == (streams and pool is not None)
            made.append(logits)
    resident, streamed, host = (np.stack(logits) for logits in made)
    assert resident.tobytes() == streamed.tobytes()
    assert np.abs(log_probs(resident) - log_probs(host)).max() < 0.02

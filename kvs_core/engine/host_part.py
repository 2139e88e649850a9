"""What of a round no work of a GPU hides: rounds of a small model, with all that the host and the driver do for them.

    host    propose ─ plan, inputs ─ launch ┄ enqueue picking ┐    guess ─ launch ┄ ... ┐    judge, settle, next round
    GPU                                     └ draft ──────────┘ids               └ step ┘ids

Whatever stands between ids that arrive and the next launch, the host does while the GPU has nothing to do: once per
round, and once per drafted row. It depends on the processor and on Python, not on the model: steps of one layer and of
many take it alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from statistics import median
from time import perf_counter

import numpy as np

from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.cuda.hollow import hollow_device
from kvs_core.engine.budget import Drafting
from kvs_core.engine.engine import Engine
from kvs_core.engine.measuring import greedy_sampler, launch_seconds
from kvs_core.engine.round import run_round
from kvs_core.engine.session import Session
from kvs_core.engine.speculation import Speculation, make_speculation
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.phases import Phase
from kvs_core.models.synthetic import synthetic_model
from kvs_core.sampling.chain import Sampler
from kvs_core.settings.drafters import ModelDraftSettings, SpeculativeSettings
from kvs_core.settings.rooms import ContextSettings, KvSettings, RopeSettings

_MODEL = "tiny:q8_0:mtp"
_CONTEXT_TOKENS = 512
_DRAFTS = 3
_LOAD_S = 1e-3      # of each launch: longer than what the host does behind it
_WARM_ROUNDS = 4
_ROUNDS = 24        # all of them, with their drafts, within a page
_LEAST_S = 1e-6     # where something disturbed, a time is still above 0


def measure_host_part(device: CudaDevice, memory_bytes_per_s: float) -> Mapping[str, float]:
    """Seconds of the host while the GPU waits for it: ``round``, of a round that drafts nothing; ``draft``, that each
    drafted row adds. Takes a moment, and some 200 MiB of the GPU. Raises ``DeviceError`` as engines do.

    memory_bytes_per_s  of copies within the GPU's memory, bytes read and bytes written
    """
    load_bytes = max(1, round(_LOAD_S * memory_bytes_per_s / 2))
    file = synthetic_model(_MODEL)
    hollow = hollow_device(device, load_bytes)
    with closing(hollow):
        engine = Engine(
            file, hollow, context=ContextSettings(ctx_size=_CONTEXT_TOKENS, ubatch=64, batch=64),
            kv=KvSettings("q8_0", "q4_0", fit=False), rope=RopeSettings(), drafting=Drafting(nextn=True),
        )
        with closing(engine):
            engine.warm_up()
            _draw_logits(engine)
            plain, drafting = _rounds_s(engine, file, (0, _DRAFTS))
    return {"round": max(_LEAST_S, plain), "draft": max(_LEAST_S, (drafting - plain) / _DRAFTS)}


def _draw_logits(engine: Engine) -> None:
    """Where a step would leave them, for no kernel does: what tokens are picked from is not all equal."""
    engine.enter(Phase.DECODE)
    logits = engine._handover.layout.workspace["logits"]
    values = np.random.default_rng(0).normal(0.0, 1.0, logits.shape).astype(np.float32)
    engine._device.upload(logits, values)


def _rounds_s(engine: Engine, file: GgufFile, drafts: Sequence[int]) -> list[float]:
    """Of rounds with so many drafts, all accepted, by turns: the median of what no launch covers."""
    session, sampler = Session(engine), greedy_sampler(file)
    drafters = [_drafter(engine, sampler, count) for count in drafts]
    taken: list[list[float]] = [[] for _ in drafts]
    with launch_seconds(engine) as spent_s:
        for _ in range(_WARM_ROUNDS + _ROUNDS):
            for drafter, seconds in zip(drafters, taken, strict=True):
                start = perf_counter()
                run_round(session, sampler, 0, None, 0, drafter)
                seconds.append(perf_counter() - start - spent_s())
    return [median(seconds[_WARM_ROUNDS:]) for seconds in taken]


def _drafter(engine: Engine, sampler: Sampler, drafts: int) -> Speculation | None:
    if not drafts:
        return None
    settings = SpeculativeSettings(
        ("draft-mtp",), draft=ModelDraftSettings(n_max=drafts), synth_rates=(1.0,) * drafts
    )
    return make_speculation(engine, settings, sampler, ())

"""Engines on a synthetic model at any context, without reading a prompt of that length: the pages of a short prompt,
repeated in the history, stand for the long one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.gpu.rates import milliseconds
from kvs_core.device.base import StepInputs
from kvs_core.device.cuda.cupy_runtime import CupyRuntime
from kvs_core.device.cuda.device import CudaDevice
from kvs_core.engine.budget import NO_DRAFTING, Drafting
from kvs_core.engine.engine import Engine
from kvs_core.engine.measuring import fill_context
from kvs_core.engine.measuring import random_tokens as tokens_of
from kvs_core.engine.round import generate
from kvs_core.engine.session import Session
from kvs_core.engine.speculation import make_speculation
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.memory.phases import Phase
from kvs_core.models.blocks import Attention, attention_buffer
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.params import SamplingParams
from kvs_core.settings.drafters import SpeculativeSettings
from kvs_core.settings.rooms import ContextSettings, KvSettings, RopeSettings
from kvs_core.streaming.layer_kv import cut

PROMPT = 4096   # tokens that are really read


@contextmanager
def engine_on(
    file: GgufFile, *, context: int, ubatch: int, arena_mib: int | None = None, drafting: Drafting = NO_DRAFTING,
    gpu_layers: int | None = None,
) -> Iterator[Engine]:
    """An engine of its own. Without ``arena_mib`` the arena holds every page; without ``gpu_layers`` weights stay."""
    kv = KvSettings(type_k="q8_0", type_v="q4_0", arena_mib=arena_mib, fit=False)
    engine = Engine(
        file, CudaDevice(CupyRuntime()), context=ContextSettings(ctx_size=context, ubatch=ubatch, batch=ubatch), kv=kv,
        rope=RopeSettings(), drafting=drafting, gpu_layers=gpu_layers,
    )
    try:
        engine.warm_up()
        yield engine
    finally:
        engine.close()


def fill(engine: Engine, tokens: int) -> None:
    """Bring the engine to ``tokens`` committed tokens, whole pages."""
    fill_context(engine, tokens, tokens_of(engine, PROMPT).tolist())


@dataclass(frozen=True)
class Steps:
    """Times of some decode steps of one width, medians in milliseconds.

    gpu_ms   from the first to the last work of a step on the GPU
    wall_ms  per step, by the host's clock
    host_ms  of that, what the host does while the GPU has nothing to do
    host_parts_ms  the same, in parts: before the launch, the launch, behind it, and once the ids are there
    """

    gpu_ms: float
    wall_ms: float
    host_ms: float
    host_parts_ms: tuple[float, ...]
    streamed_bytes: int
    copies: int
    recorded: int


def decode(engine: Engine, rows: int, steps: int, *, keep: int | None = None) -> Steps:
    """Real steps: captured work, inputs, the best id of the last row, bookkeeping. Warm-up steps are not counted."""
    import cupy

    device: Any = engine._device
    stream = device._runtime.compute.raw
    ids = tokens_of(engine, rows, 1)
    gpu, host, wall, moved = [], [], [], []
    recorded = 0
    launches: Any = device._launches
    launch = launches.launch
    events = [cupy.cuda.Event(), cupy.cuda.Event()]
    launched = [0.0, 0.0]

    def timed_launch(*args: Any) -> None:
        launched[0] = perf_counter()
        events[0].record(stream)
        launch(*args)
        events[1].record(stream)
        launched[1] = perf_counter()

    launches.launch = timed_launch
    try:
        for number in range(steps + 3):
            if number == 3:
                recorded = engine._captured.recorded
            before = device.counters()
            start = perf_counter()
            with engine.step(ids, Phase.DECODE) as step:
                enqueued = perf_counter()
                best = step.best(1)
                assert best is not None
                got = perf_counter()
                step.settle(rows if keep is None else keep)
                ids[0] = best[0].ids[0]
            done = perf_counter()
            after = device.counters()
            if number >= 3:
                gpu.append(cupy.cuda.get_elapsed_time(*events))
                host.append((launched[0] - start, launched[1] - launched[0], enqueued - launched[1], done - got))
                wall.append(1e3 * (done - start))
                moved.append((after.copy_bytes - before.copy_bytes, after.copy_calls - before.copy_calls))
    finally:
        del launches.launch
    parts = tuple(1e3 * float(np.median(part)) for part in zip(*host, strict=True))
    return Steps(
        float(np.median(gpu)), float(np.median(wall)), sum(parts), parts, int(np.median([each[0] for each in moved])),
        int(np.median([each[1] for each in moved])), engine._captured.recorded - recorded,
    )


def weight_bytes(engine: Engine) -> int:
    """Bytes of matrices that a decode step reads."""
    device: Any = engine._device
    return int(device._weights.held_bytes)


@dataclass(frozen=True)
class Text:
    """Some generated text: its tokens and rounds, and what a round took by the host's clock (median)."""

    tokens_per_s: float
    rounds: int
    tokens: int
    round_ms: float
    drafted: int
    accepted: int


def text(engine: Engine, vocab: Tokenizer, settings: SpeculativeSettings, tokens: int) -> Text:
    """Greedy text behind what is committed, drafted as ``settings`` say."""
    session = Session(engine)
    session.tokens = tokens_of(engine, engine.committed).tolist()
    sampler = Sampler(
        SamplingParams(temperature=0.0, seed=1), n_vocab=engine.spec.n_vocab, vocab=vocab, eog_ids=()
    )
    speculation = make_speculation(engine, settings, sampler, ())
    first = np.zeros(engine.spec.n_vocab, np.float32)
    first[1] = 1.0
    times = []
    for token in generate(
        session, sampler, first, n_predict=tokens, eog_ids=frozenset(), speculation=speculation
    ):
        times.append(perf_counter())
        assert token.id >= 0
    skipped = len(times) // 4   # recordings, and the policy settles
    # Tokens of one round come at once: a pause is a round.
    pauses = np.diff(times[skipped:])
    rounds = pauses[pauses > 1e-3]
    stats = list(speculation.stats.values()) if speculation else []
    return Text(
        len(pauses) / (times[-1] - times[skipped]), len(rounds), len(pauses), 1e3 * float(np.median(rounds)),
        sum(each.drafted_tokens for each in stats), sum(each.accepted_tokens for each in stats),
    )


def resident_draft_ms(engine: Engine, drafts: int) -> float:
    """Milliseconds of one row drafted on resident pages, by the host's clock, its guess included."""
    taken = []
    for _ in range(4):
        with engine.open(1 + drafts) as step:
            token = 1
            for _ in range(drafts):
                start = perf_counter()
                step.draft_resident(token)
                best = step.best(1)
                assert best is not None
                token = int(best[0].ids[0])
                taken.append(1e3 * (perf_counter() - start))
            step.run([1])
            step.settle(0)
    return float(np.median(taken[drafts:]))


def tiles_ms(engine: Engine, rows: int) -> float:
    """Milliseconds of a step of so many rows, guesses of all of them included, by the host's clock; the step before it
    was as wide."""
    ids, taken = tokens_of(engine, rows, 3), []
    assert engine.widest(rows) == rows, f"no room for {rows} rows"
    for _ in range(5):
        start = perf_counter()
        with engine.open(rows) as step:
            step.run(ids)
            best = step.best(1, 0)
            assert best is not None
            assert len(best) == rows
            step.settle(1)
        taken.append(1e3 * (perf_counter() - start))
    return float(np.median(taken[1:]))


def prefill_ms(engine: Engine, tokens: int, ubatch: int) -> float:
    """Milliseconds to read ``tokens`` more, on the GPU, in ubatches."""
    import cupy

    device: Any = engine._device
    stream = device._runtime.compute.raw
    prompt = tokens_of(engine, tokens, 2)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    engine.enter(Phase.PREFILL)
    device.compute.synchronize()
    begin.record(stream)
    for first in range(0, tokens, ubatch):
        with engine.step(prompt[first : first + ubatch], Phase.PREFILL) as step:
            step.settle()
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end))


def matmuls_ms(engine: Engine, rows: int) -> tuple[float, float]:
    """Milliseconds of all prefill products of a step, norms and SwiGLU with them, and their operations."""
    device: Any = engine._device
    ops, stream = device.ops, device._runtime.compute.raw
    engine.enter(Phase.PREFILL)
    workspace = engine._handover.layout.workspace
    device.begin_step(StepInputs(tokens_of(engine, rows), 0, 0, Phase.PREFILL))
    x = workspace.rows("x", rows)
    operations = 0.0
    eps = engine.spec.rms_eps
    work = []
    for layer in engine._model._layers:
        mixer, forward = layer.mixer, layer.feed_forward
        attention = isinstance(mixer, Attention)
        joint, y, mixed = (
            (mixer.qkv, *(attention_buffer(mixer.layer, name) for name in ("qkv", "attended")))
            if attention else (mixer.joint, "joint", "mixed")
        )
        work.append((mixer.norm, joint, workspace.rows(y, rows), workspace.rows(mixed, rows), mixer.out, forward))
        for weight in (joint, mixer.out, forward.gate_up, forward.down):
            operations += 2.0 * rows * weight.n_in * weight.n_out

    def multiply() -> None:
        for norm, joint, y, mixed, out, forward in work:
            ops.project(x, norm, joint, y, eps=eps, phase=Phase.PREFILL)
            ops.add_projected(mixed, out, x, phase=Phase.PREFILL)
            rows_of = workspace.rows(f"ffn {forward.down.n_in}", rows)
            ops.project_gated(x, forward.norm, forward.gate_up, rows_of, eps=eps, phase=Phase.PREFILL)
            ops.add_projected(rows_of, forward.down, x, phase=Phase.PREFILL)

    return milliseconds(multiply, stream, 3), operations


def attention_ms(engine: Engine, rows: int) -> tuple[float, float]:
    """Milliseconds per layer of decode attention over all resident pages: reading them; reading and the final merge.

    All layers, three times, are enqueued as one, so that the GPU never waits for a launch to be made.
    """
    device: Any = engine._device
    stream = device._runtime.compute.raw
    engine.enter(Phase.DECODE)
    ids = tokens_of(engine, rows, 1)
    with engine.step(ids, Phase.DECODE) as step:
        kv, workspace = step._kv, engine._handover.layout.workspace
        mixers = [layer.mixer for layer in engine._model._layers if isinstance(layer.mixer, Attention)]
        layers = [(mixer.params, kv.plan(mixer.layer.kv_index)) for mixer in mixers]
        qkv, q, attended = (attention_buffer(mixers[0].layer, name) for name in ("qkv", "q", "attended"))
        pool = engine._handover.layout.pool
        scratch = cut(kv.scratch.groups, rows, layers[0][0].heads, engine.geometry.v_dim + 2)
        segments = cut(kv.scratch.segments, rows, layers[0][0].heads, engine.geometry.v_dim + 2)

        def attend(*, merge: bool) -> None:
            for params, planned in 3 * layers:
                for call in range(len(planned.plan.calls)):
                    device.ops.attend_decode(
                        workspace[q], params, pool, engine.geometry, planned.loaded, call, scratch
                    )
                if merge:
                    device.ops.finish_decode(
                        workspace.rows(qkv, rows), params, engine.geometry, planned.loaded, scratch, segments,
                        workspace.rows(attended, rows),
                    )

        read_ms, all_ms = (
            milliseconds(lambda merge=merge: attend(merge=merge), stream) / (3 * len(layers))
            for merge in (False, True)
        )
        return read_ms, all_ms


def decode_workspace_bytes(engine: Engine) -> int:
    """Of the arena, beside the pool."""
    return sum(region.size_bytes for region in engine.memory.request(Phase.DECODE).workspace)


def matmul_operations(engine: Engine, rows: int) -> float:
    """Operations of the matrices of ``rows`` rows; embedding and output head aside."""
    spec = engine.spec
    return 2.0 * rows * (spec.n_params - 2 * spec.n_vocab * spec.n_embd)

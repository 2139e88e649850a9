"""Rates of the host: products with matrices, and steps of a small model. See ``rates.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

import numpy as np
from gguf.constants import GGMLQuantizationType as Quant

from kvs_core.device.host.device import HostDevice
from kvs_core.engine.budget import Drafting
from kvs_core.engine.engine import Engine
from kvs_core.engine.forecast import IN_FILE, Rates
from kvs_core.engine.held import FLOATS, held_weights
from kvs_core.engine.measuring import greedy_sampler, seconds_of, seconds_of_each
from kvs_core.engine.round import run_round
from kvs_core.engine.session import Session
from kvs_core.formats.gguf import TensorInfo
from kvs_core.formats.quants import row_bytes
from kvs_core.memory.phases import Phase
from kvs_core.models.recurrent import MAX_ROWS
from kvs_core.models.synthetic import synthetic_model
from kvs_core.settings.rooms import ContextSettings, KvSettings, RopeSettings
from kvs_core.speculative.picker import KEPT

Numbers = Mapping[str, float]

_HOST_MATRIX = (2048, 8192)   # n_in, n_out: 64 MiB of float32
_HOST_ROWS = (1, 2, 4, 8)
_HOST_MODEL = "tiny:f16:mtp"
_HOST_CONTEXTS = (2048, 12288)
_STEP_ROWS = 4
_DRAFTED = (1, 5)             # rows, whose difference tells what one takes


def measure_products(device: HostDevice) -> Numbers:
    """Bytes per second: of copies, and of products of one row and of several with matrices of both kinds."""
    numbers = {"link": device.link_bytes_per_s()}
    for name, quant in ((FLOATS, Quant.F32), (IN_FILE, Quant.Q8_0)):
        n_in, n_out = _HOST_MATRIX
        data = np.ones(n_out * row_bytes(quant, n_in), np.uint8)   # written, so that there is memory behind it
        info = TensorInfo("probe", (n_in, n_out), quant, n_in * n_out, data.nbytes, data)
        bare = HostDevice(device.threads, memory_limit_bytes=0)
        with closing(bare):
            weight = bare.load_matrix([info])
            for rows in _HOST_ROWS:
                x, out = np.ones((rows, n_in), np.float32), np.empty((rows, n_out), np.float32)
                multiply = partial(
                    bare.ops.project, x, np.ones(n_in, np.float32), weight, out, eps=1e-6, phase=Phase.DECODE
                )
                numbers[f"{name} {rows}"] = 4.0 * n_in * n_out / seconds_of(multiply)
    return numbers


def measure_steps(device: HostDevice, kv: KvSettings, products: Numbers) -> Numbers:
    """Rounds of a small model at two contexts, and rows that its MTP block drafts. Seconds, and bytes per second.

    attention  the longer context's rounds read more K and V, and take longer
    row        of the time that takes, the part that a further row adds
    layer      beside bytes: a round has layers that a draft has not
    call       what is left of a draft: of a step, and of each drafted row, beside layers and bytes
    """
    file = synthetic_model(_HOST_MODEL)
    sizes = ContextSettings(ctx_size=2 * max(_HOST_CONTEXTS))
    plain, drafting = KvSettings(kv.type_k, kv.type_v, rotation=kv.rotation, fit=False), Drafting(nextn=True)
    with ExitStack() as open_engines:
        engines = []
        for tokens in _HOST_CONTEXTS:
            engine = Engine(
                file, HostDevice(device.threads), context=sizes, kv=plain, rope=RopeSettings(), drafting=drafting
            )
            open_engines.enter_context(closing(engine))
            blank = engine.checkpoint()
            at = replace(blank, state=replace(blank.state, position=tokens))
            engine.take_up(_blank_pages(engine, tokens), at, tokens)
            engines.append(engine)
        few, many = _DRAFTED
        short_s, long_s, short_rows_s, long_rows_s, few_s, many_s = seconds_of_each([
            *(partial(run_round, Session(engine), greedy_sampler(file), 0, None, 0, None) for engine in engines),
            *(partial(_step, engine, _STEP_ROWS) for engine in engines),
            *(partial(_draft, engines[0], count) for count in (few, many)),
        ])
        spec = engine.spec
        token_bytes = engine.shapes.token_bytes(drafting.kv_layers(spec))
    weights = held_weights(file, spec, lambda info: (FLOATS, 4 * info.n_elements), nextn=True)
    drafted, layers = [*weights.nextn.values(), *weights.head.values()], spec.n_layer + 1
    return step_numbers(
        products[f"{FLOATS} 1"], _HOST_CONTEXTS, (short_s, long_s), (short_rows_s, long_rows_s),
        (many_s - few_s) / (many - few), rows=_STEP_ROWS, layers=layers,
        read_bytes=sum(drafted) + sum(weights.trunk.values()), drafted_bytes=sum(drafted), token_bytes=token_bytes,
    )


def step_numbers(
    weights_per_s: float, contexts: tuple[int, int], rounds_s: tuple[float, float], steps_s: tuple[float, float],
    draft_s: float, *, rows: int, layers: int, read_bytes: int, drafted_bytes: int, token_bytes: Sequence[int],
) -> Numbers:
    """See ``measure_steps``. What disturbs one of the measurements must not make a rate that is absurd.

    weights_per_s               bytes of weights that a row reads in a second
    contexts, rounds_s          of two rounds that draft nothing, the shorter context first
    steps_s                     of steps of ``rows`` rows there
    draft_s                     of a drafted row at the shorter context
    layers                      of a round, the MTP block's among them
    read_bytes, drafted_bytes   of weights, by a round and by a drafted row
    token_bytes                 of K and V, of each layer that has them; the MTP block's is the last
    """
    (short, long), (short_s, long_s) = contexts, rounds_s
    per_token_s = max((long_s - short_s) / (long - short), 0.1 * long_s / long)
    attention = sum(token_bytes) / per_token_s
    further = (steps_s[1] - steps_s[0]) / (long - short) / per_token_s - 1.0
    round_rest_s = max(0.1 * short_s, short_s - per_token_s * short - read_bytes / weights_per_s)
    draft_rest_s = max(0.1 * draft_s, draft_s - token_bytes[-1] * short / attention - drafted_bytes / weights_per_s)
    layer_s = max((round_rest_s - draft_rest_s) / (layers - 1), 0.1 * round_rest_s / layers)
    return {
        "attention": attention, "row": min(1.0, max(0.01, further / (rows - 1))), "layer": layer_s,
        "call": max(0.1 * draft_rest_s, draft_rest_s - layer_s),
    }


def _step(engine: Engine, rows: int) -> None:
    with engine.open(rows) as step:
        step.run([0] * rows)


def _draft(engine: Engine, count: int) -> None:
    with engine.open(count) as step:
        for _ in range(count):
            step.draft_next(0)
            step.best(KEPT)


def _blank_pages(engine: Engine, tokens: int) -> Iterator[tuple[int, int, bytes]]:
    for layer, size in enumerate(engine.page_bytes):
        page = bytes(size)
        for number in range(engine.geometry.pages_of(tokens)):
            yield layer, number, page


def host_rates(numbers: Numbers) -> Rates:
    """Rates of the host with these numbers. Its copies run beside its products; what single runs cost is not told
    apart."""
    costs = {}
    for name in (FLOATS, IN_FILE):
        known = [numbers[f"{name} 1"] / numbers[f"{name} {rows}"] for rows in _HOST_ROWS]
        # More rows take no less time; where they seem to, something disturbed.
        costs[name] = np.interp(range(1, MAX_ROWS + 1), _HOST_ROWS, np.maximum.accumulate(known)).tolist()
    return Rates(
        link_bytes_per_s=numbers["link"],
        weight_bytes_per_s={"": numbers[f"{FLOATS} 1"], IN_FILE: numbers[f"{IN_FILE} 1"]},
        row_costs={"": costs[FLOATS], IN_FILE: costs[IN_FILE]},
        attention_bytes_per_s=numbers["attention"],
        attention_row=numbers["row"],
        layer_s=numbers["layer"],
        least_attention_s=0.0,
        run_s=0.0,
        run_rows_s=0.0,
        copy_s=0.0,
        round_s=numbers["call"],
        plan_s=0.0,
        draft_s=numbers["call"],
    )

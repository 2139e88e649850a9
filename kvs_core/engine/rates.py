"""Rates: what the device in use does per second, measured in a few seconds and kept for the next time.

    KVS_CACHE_DIR/rates/<hash>.json      the hash covers the device, its driver or threads, and the code that runs on it

On a GPU copies are measured, over the link and within its memory, and what the host does in a round while the GPU waits
for it. Kernels are known as shares of the copies within memory, as they were on an H200. On the host everything is
measured, a small model's steps among it: the forecast is as good as that model is like the one in question.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
from gguf.constants import GGMLQuantizationType as Quant

from kvs_core.device import cuda, host
from kvs_core.device.base import Buffer, Device, Stream
from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.cuda.driver import Driver
from kvs_core.device.cuda.nvrtc import SOURCES, cache_root
from kvs_core.device.host.device import HostDevice
from kvs_core.device.host.machine import cpu_model
from kvs_core.engine.budget import Drafting
from kvs_core.engine.engine import Engine
from kvs_core.engine.forecast import IN_FILE, Rates
from kvs_core.engine.held import FLOATS, held_weights
from kvs_core.engine.host_part import measure_host_part
from kvs_core.engine.measuring import greedy_sampler
from kvs_core.engine.round import run_round
from kvs_core.engine.session import Session
from kvs_core.errors import SettingsError
from kvs_core.formats.gguf import TensorInfo
from kvs_core.formats.quants import row_bytes
from kvs_core.memory.phases import Phase
from kvs_core.models.recurrent import MAX_ROWS
from kvs_core.models.synthetic import synthetic_model
from kvs_core.settings.rooms import ContextSettings, KvSettings, RopeSettings
from kvs_core.speculative.picker import KEPT
from kvs_core.units import MIB

LOGGER = logging.getLogger(__name__)

Numbers = Mapping[str, float]

_FORMAT = 2              # of a kept file
_COPY_BYTES = 512 * MIB  # no cache holds it
_LINK_BYTES = 64 * MIB
_COPIES = 8              # between two looks at the clock
_TIMES = 8

_HOST_MATRIX = (2048, 8192)   # n_in, n_out: 64 MiB of float32
_HOST_ROWS = (1, 2, 4, 8)
_HOST_MODEL = "tiny:f16:mtp"
_HOST_CONTEXTS = (2048, 12288)
_DRAFTED = (1, 5)             # rows, whose difference tells what one takes


@dataclass(frozen=True, slots=True)
class Found:
    """kept: measured earlier."""

    rates: Rates
    kept: bool


def find_rates(device: Device, kv: KvSettings) -> Found:
    """The rates of ``device`` with these K and V types: those that were kept, or measured now, in a few seconds.

    Takes up to 1 GiB of device memory for that moment.
    """
    facts = _facts(device)
    if not isinstance(device, HostDevice):
        numbers, kept = _find(facts, lambda: _measure_cuda(device), device.name)
        return Found(gpu_rates(numbers), kept)
    machine, machine_kept = _find(facts, lambda: measure_products(device), device.name)
    types = {"type_k": kv.type_k, "type_v": kv.type_v, "rotation": kv.rotation}
    steps, steps_kept = _find(
        facts | types, lambda: measure_steps(device, kv, machine),
        f"{device.name}'s attention over K {kv.type_k} and V {kv.type_v}",
    )
    return Found(host_rates(machine | steps), machine_kept and steps_kept)


def forget_rates(device: Device) -> None:
    """Drop all that was kept for ``device``, with whatever K and V types: it is measured when it is needed next.

    ``SettingsError`` if the folder does not let go of it.
    """
    facts = _facts(device)
    for path in _folder().glob("*.json"):
        try:
            is_of_device = facts.items() <= json.loads(json.loads(path.read_text())["key"]).items()
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue   # damaged, so nobody takes it
        if is_of_device:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise SettingsError(f"rates cannot be measured anew: {path}: {error.strerror}; remove it, or set "
                                    "KVS_CACHE_DIR to another folder") from None


# On a GPU.

# Ratios to what ``measure_gpu`` finds, and times, of decode steps of synthetic Qwen3.5-27B models on an H200, where
# copies within memory ran at 4,167 GB/s. benchmarks/results/gpu_check.json has most of these steps.
_ROWS_KNOWN = (1, 2, 3, 4, 6, 8)
_RECORDS = {
    # By type held: the rate of products with one row; and what so many rows cost, as multiples of that.
    "": (0.99, (1.0, 1.026, 1.06, 1.08, 1.20, 1.26)),   # Q4_K's, and that of others who read memory as fast
    "IQ4_XS": (0.96, (1.0, 1.044, 1.087, 1.092, 1.34, 1.40)),
}
_ATTENTION_SHARE = 0.96       # from 64 to 256 Ki, all pages resident
_ATTENTION_ROW = 0.18
_LAYER_S = 18e-6              # of models of 64 and of 12 layers
_LEAST_ATTENTION_S = 15e-6    # below some 32 Ki tokens
_RUN_S = 10e-6                # the same launches without copies, less all pages resident, at 90, 128 and 256 Ki
_RUN_ROWS_S = 12e-6           # likewise, of 2 and 4 rows at 86 to 92 Ki
_COPY_S = 7.5e-6              # streamed steps less bytes / link, likewise
_PLAN_S = 4e-6


def _measure_cuda(device: Device) -> Numbers:
    assert isinstance(device, CudaDevice)
    numbers = measure_gpu(device)
    return {**numbers, **measure_host_part(device, numbers["memory"])}


def measure_gpu(device: Device) -> Numbers:
    """Bytes per second over the link to the device and back, and of copies within its memory: those read and those
    written."""
    size = min(_COPY_BYTES, device.free_bytes() // 8)
    source, target = device.allocate((size,), np.uint8), device.allocate((size,), np.uint8)
    pinned = device.allocate_pinned(min(_LINK_BYTES, size))

    def seconds(dst: Buffer, src: Buffer, stream: Stream) -> float:
        def copy() -> None:
            for _ in range(_COPIES):
                device.enqueue_copy(dst, src, stream)
            stream.synchronize()

        return _seconds(copy) / _COPIES

    return {
        "link": pinned.nbytes / seconds(target[: pinned.nbytes], pinned, device.copy),
        "back": pinned.nbytes / seconds(pinned, source[: pinned.nbytes], device.publish),
        "memory": 2.0 * size / seconds(target, source, device.compute),
    }


def gpu_rates(numbers: Numbers) -> Rates:
    """Rates of the CUDA kernels on a GPU with these numbers, of ``measure_gpu`` and ``measure_host_part``."""
    memory, rows = numbers["memory"], range(1, MAX_ROWS + 1)
    return Rates(
        link_bytes_per_s=numbers["link"],
        weight_bytes_per_s={name: share * memory for name, (share, _) in _RECORDS.items()},
        row_costs={name: np.interp(rows, _ROWS_KNOWN, costs).tolist() for name, (_, costs) in _RECORDS.items()},
        attention_bytes_per_s=_ATTENTION_SHARE * memory,
        attention_row=_ATTENTION_ROW,
        layer_s=_LAYER_S,
        least_attention_s=_LEAST_ATTENTION_S,
        run_s=_RUN_S,
        run_rows_s=_RUN_ROWS_S,
        copy_s=_COPY_S,
        round_s=numbers["round"],
        plan_s=_PLAN_S,
        draft_s=numbers["draft"],
    )


# On the host.


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
                numbers[f"{name} {rows}"] = 4.0 * n_in * n_out / _seconds(multiply)
    return numbers


def measure_steps(device: HostDevice, kv: KvSettings, products: Numbers) -> Numbers:
    """Rounds of a small model at two contexts, and rows that its MTP block drafts. Seconds, and bytes per second.

    attention  the longer context's rounds read more K and V, and take longer
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
        short_s, long_s, few_s, many_s = _seconds_each([
            *(partial(run_round, Session(engine), greedy_sampler(file), 0, None, 0, None) for engine in engines),
            *(partial(_draft, engines[0], count) for count in (few, many)),
        ])
        spec = engine.spec
        token_bytes = engine.shapes.token_bytes(drafting.kv_layers(spec))
    weights = held_weights(file, spec, lambda info: (FLOATS, 4 * info.n_elements), nextn=True)
    drafted, layers = [*weights.nextn.values(), *weights.head.values()], spec.n_layer + 1
    return step_numbers(
        products[f"{FLOATS} 1"], _HOST_CONTEXTS, (short_s, long_s), (many_s - few_s) / (many - few), layers=layers,
        read_bytes=sum(drafted) + sum(weights.trunk.values()), drafted_bytes=sum(drafted), token_bytes=token_bytes,
    )


def step_numbers(
    weights_per_s: float, contexts: tuple[int, int], rounds_s: tuple[float, float], draft_s: float, *, layers: int,
    read_bytes: int, drafted_bytes: int, token_bytes: Sequence[int],
) -> Numbers:
    """See ``measure_steps``. What disturbs one of the measurements must not make a rate that is absurd.

    weights_per_s               bytes of weights that a row reads in a second
    contexts, rounds_s          of two rounds that draft nothing, the shorter context first
    draft_s                     of a drafted row at the shorter context
    layers                      of a round, the MTP block's among them
    read_bytes, drafted_bytes   of weights, by a round and by a drafted row
    token_bytes                 of K and V, of each layer that has them; the MTP block's is the last
    """
    (short, long), (short_s, long_s) = contexts, rounds_s
    per_token_s = max((long_s - short_s) / (long - short), 0.1 * long_s / long)
    attention = sum(token_bytes) / per_token_s
    round_rest_s = max(0.1 * short_s, short_s - per_token_s * short - read_bytes / weights_per_s)
    draft_rest_s = max(0.1 * draft_s, draft_s - token_bytes[-1] * short / attention - drafted_bytes / weights_per_s)
    layer_s = max((round_rest_s - draft_rest_s) / (layers - 1), 0.1 * round_rest_s / layers)
    return {"attention": attention, "layer": layer_s, "call": max(0.1 * draft_rest_s, draft_rest_s - layer_s)}


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
        attention_row=1.0,
        layer_s=numbers["layer"],
        least_attention_s=0.0,
        run_s=0.0,
        run_rows_s=0.0,
        copy_s=0.0,
        round_s=numbers["call"],
        plan_s=0.0,
        draft_s=numbers["call"],
    )


def _seconds(work: Callable[[], object]) -> float:
    """See ``_seconds_each``."""
    return _seconds_each([work])[0]


def _seconds_each(works: Sequence[Callable[[], object]]) -> list[float]:
    """Of each the shortest of some runs, by turns, after one that does not count: what disturbs makes it longer."""
    taken = []
    for _ in range(_TIMES + 1):
        taken.append([_timed(work) for work in works])
    return [min(each) for each in zip(*taken[1:], strict=True)]


def _timed(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


# On disk.


def _facts(device: Device) -> dict[str, object]:
    """What numbers are true for."""
    facts: dict[str, object] = {
        "format": _FORMAT, "machine": platform.node(), "device": device.name,
        "cpu": cpu_model(),   # under a machine's name another may stand: machines are rebuilt
        "python": platform.python_version(),
    }
    if isinstance(device, HostDevice):
        code = [Path(host.__path__[0])]
        facts |= {"threads": device.threads, "numpy": np.__version__}
    else:
        code = [SOURCES, Path(cuda.__path__[0])]
        facts |= {"driver": Driver().cuda_version}
    digest = hashlib.sha256()
    for path in sorted(path for folder in code for name in ("*.py", "*.cu*") for path in folder.rglob(name)):
        digest.update(path.read_bytes())
    return facts | {"code": digest.hexdigest()}


def _folder() -> Path:
    return cache_root() / "rates"


def _find(facts: Mapping[str, object], measure: Callable[[], Numbers], what: str) -> tuple[dict[str, float], bool]:
    """Numbers that are true for ``facts``, and whether they were kept."""
    key = json.dumps(facts, sort_keys=True)
    path = _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    numbers = _read(path, key)
    if numbers is not None:
        return numbers, True
    LOGGER.info("measuring the speed of %s; it is kept for the next time", what)
    numbers = dict(measure())
    _keep(path, key, numbers)
    return numbers, False


def _read(path: Path, key: str) -> dict[str, float] | None:
    """Numbers kept for ``key``; None if there are none, or they are damaged."""
    try:
        kept = json.loads(path.read_text())
        numbers = {str(name): float(value) for name, value in kept["numbers"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    sound = kept.get("key") == key and all(math.isfinite(value) and value > 0.0 for value in numbers.values())
    return numbers if sound else None


def _keep(path: Path, key: str, numbers: Numbers) -> None:
    """Write them; a disk that takes nothing costs a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under another name first: another process that reads finds all or nothing.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
            beside = Path(file.name)
        try:
            beside.write_text(json.dumps({"key": key, "numbers": dict(numbers)}))
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        LOGGER.warning("measured rates cannot be kept in %s: %s; set KVS_CACHE_DIR", path.parent, error.strerror)

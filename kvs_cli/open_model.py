"""From settings to a model's file, a device and an engine: what ``run``, ``info`` and a server have in common.

    open_model    fetch, map, override; specification and tokenizer checked      no weights yet
    open_engine   device, weights, arena                                         closed when the block ends
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kvs_cli.render import Screen
from kvs_core.demo import DEMO_MODEL
from kvs_core.device.base import Device
from kvs_core.device.choose import open_device
from kvs_core.engine.budget import Drafting
from kvs_core.engine.context_shift import most_kept
from kvs_core.engine.engine import Engine
from kvs_core.engine.levers import UNBOUND, Bounds
from kvs_core.errors import SettingsError
from kvs_core.formats.finite import check_finite
from kvs_core.formats.gguf import GgufFile, parse_override
from kvs_core.formats.hub import fetch_url, resolve_hf
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.models.registry import read_spec
from kvs_core.models.spec import ModelSpec
from kvs_core.models.synthetic import synthetic_model
from kvs_core.settings import (
    ContextPlan,
    ContextSettings,
    DeviceSettings,
    EngineSettings,
    HubModel,
    ModelSettings,
    RopeSettings,
    SyntheticModel,
    UrlModel,
)
from kvs_core.settings.rooms import AS_IN_FILE, CONTEXT_STEP_TOKENS
from kvs_core.speculative.drafter import verify_width
from kvs_core.units import MIB

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model's file, its sizes and its tokenizer, all checked."""

    file: GgufFile
    spec: ModelSpec
    tokenizer: Tokenizer


def open_model(settings: ModelSettings, screen: Screen, rope: RopeSettings = AS_IN_FILE) -> OpenModel:
    """Open the file, fetching it if it is not there. Raises the ``KvsError`` that says what is wrong with it.

    rope  what the user says of positions, on which the longest context depends
    """
    source = settings.source
    if isinstance(source, SyntheticModel):
        found = synthetic_model(source.name)
    else:
        found = GgufFile.open(_find(source, settings, screen))
    file = found.override(parse_override(text) for text in settings.override_kv)
    if file.synthetic:
        LOGGER.info("synthetic model %s: its weights are random, its text means nothing", file.path)
    spec = read_spec(file, rope)
    tokenizer = Tokenizer.from_metadata(file.metadata, source=str(file.path))
    if settings.scan:
        with screen.stage("checking weights", "bytes") as progress:
            check_finite(file, progress)
    return OpenModel(file, spec, tokenizer)


def plan_context(model: OpenModel, settings: EngineSettings) -> ContextPlan:
    """The context that holds for this model; says so if that is less than was asked for."""
    plan = settings.context.plan(model.spec.n_ctx_train, model.spec.n_ctx_most)
    if plan.capped:
        LOGGER.warning(
            "--ctx-size %d: the model was trained for %d tokens; the context is %d "
            "(--override-kv %s.context_length=int:N says otherwise)",
            settings.context.ctx_size, model.spec.n_ctx_train, plan.context_tokens, model.spec.arch,
        )
    elif 0 < settings.context.ctx_size < plan.context_tokens:
        is_step = plan.context_tokens % CONTEXT_STEP_TOKENS == 0
        LOGGER.info(
            "context: %d tokens; --ctx-size %d is rounded up to %s", plan.context_tokens, settings.context.ctx_size,
            f"a multiple of {CONTEXT_STEP_TOKENS}" if is_step else "the longest context of the model",
        )
    return plan


def check_keep(settings: ContextSettings, context: ContextPlan, *, bos: bool) -> None:
    """``SettingsError`` for a ``--keep`` that leaves context shifts no room; -1 is what there is room for.

    bos  one token more stays
    """
    most = most_kept(context.context_tokens, bos=bos)
    if settings.shift and settings.keep > most:
        raise SettingsError(
            f"--keep {settings.keep} leaves --context-shift no room in a context of {context.context_tokens} tokens; "
            f"keep at most {most}, or raise --ctx-size"
        )


def text_bounds(
    settings: ContextSettings, context: ContextPlan, *, prompt_tokens: int, bos: bool, is_saved: bool
) -> Bounds:
    """What a text asks of the context, whatever the memory: room for its prompt and for what context shifts keep.

    is_saved  it goes on in a session's file, which has pages of one kind, and so far no one knows how many
    bos       see ``check_keep``
    """
    if is_saved:
        return Bounds(context_tokens=context.context_tokens, pages_fixed=True)
    not_kept = context.context_tokens - most_kept(context.context_tokens, bos=bos)
    shifted = settings.keep + not_kept if settings.shift and settings.keep >= 0 else 0   # -1 is cut down
    return Bounds(context_tokens=max(prompt_tokens + 1, shifted))


@contextmanager
def open_engine(
    model: OpenModel, settings: EngineSettings, screen: Screen, *, pool_bytes: int | None = None,
    bounds: Bounds = UNBOUND,
) -> Iterator[Engine]:
    """An engine with its weights loaded. Whatever ends the block, its threads and memory are given back.

    ``pool_bytes``: of KV pages alone, with the workspaces outside, where the settings name no arena and no pool.
    ``bounds``: of what is said to help where memory is too small, drafts aside.
    """
    # What is wrong is said before the weights are read.
    context = settings.context.plan(model.spec.n_ctx_train, model.spec.n_ctx_most)
    rows = verify_width(
        settings.speculative, ubatch_tokens=context.ubatch_tokens, context_tokens=context.context_tokens
    )
    device = open_device(settings.device)
    engine = None
    try:
        with screen.stages() as stage:
            engine = Engine(
                model.file, device, context=settings.context, kv=settings.kv, rope=settings.rope,
                drafting=Drafting.of(settings.speculative.types),
                progress=stage("loading weights", "bytes"), kernel_progress=stage("compiling", "kernels"),
                pool_bytes=pool_bytes, gpu_layers=gpu_layers(settings.device, device, model.spec),
                bounds=replace(bounds, ubatch_tokens=rows),
            )
        _log_weights(engine, settings)
        engine.warm_up()
    except BaseException:
        (engine or device).close()
        raise
    try:
        yield engine
    finally:
        engine.close()


def gpu_layers(settings: DeviceSettings, device: Device, spec: ModelSpec) -> int | None:
    """``Engine``'s, on the device that was opened; says so where it is not what was asked for."""
    asked = settings.gpu_layers
    if device.is_host and settings.name != "cpu" and asked is not None and 0 < asked < spec.n_layer:
        LOGGER.warning("--gpu-layers %d: without a GPU all weights are in the CPU's memory, and none moves", asked)
    return settings.layers_on(is_host=device.is_host)


def _log_weights(engine: Engine, settings: EngineSettings) -> None:
    """Which weights do not stay, and what that means."""
    found = engine.weights_report()
    if not found.passing:
        return
    LOGGER.info(
        "weights: %d of %d layers stay on the device, %.1f MiB with the output layer; those of %d pass through the "
        "arena in every step, %.1f MiB from pinned memory through a ring of %.1f MiB",
        found.layers - len(found.passing), found.layers, found.resident_bytes / MIB, len(found.passing),
        found.home_bytes / MIB, found.ring_bytes / MIB,
    )
    if "draft-resident" in settings.speculative.types:
        LOGGER.warning(
            "--spec-type draft-resident: each drafted token takes the %.1f MiB of weights over the link too; "
            "n-gram drafters or draft-mtp cost less", found.home_bytes / MIB,
        )


def _find(source: Path | HubModel | UrlModel | None, settings: ModelSettings, screen: Screen) -> Path:
    if source is None:
        LOGGER.info("model: no --model was given; taking the demo model that comes with kvs")
        return DEMO_MODEL
    if isinstance(source, Path):
        return source
    with screen.stage("fetching the model", "bytes") as progress:
        if isinstance(source, UrlModel):
            return fetch_url(source.url, offline=settings.offline, progress=progress)
        return resolve_hf(
            source.repo, file=source.file, token=source.token, offline=settings.offline, progress=progress
        )

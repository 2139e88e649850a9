"""What the rooms receive: frozen values, checked once at birth, built from the table's values by ``typed.py``.

    RunSettings, InfoSettings, PlanSettings
    ├── engine: EngineSettings   model (sources.py) · context · kv · rope · device · speculative (drafters.py): all that
    │                            the engine is built from
    ├── sampling                 explicit sampling values only, under llama-server's API names
    ├── prompt, chat             what to continue, and how it is wrapped
    ├── constraint               what the text has to follow
    └── output, logging          what is printed, and where

Sizes are tokens or pages; MiB where the name says so, as in the flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Literal, get_args

from kvs_core.errors import SettingsError
from kvs_core.settings.drafters import SpeculativeSettings
from kvs_core.settings.sources import ModelSettings
from kvs_core.units import align_up

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
CONTEXT_STEP_TOKENS = 256
PAGE_STEP_TOKENS = 32
VERBOSITY_ALL = 5

ResidencyMode = Literal["adaptive", "window", "resident"]
RopeScaling = Literal["none", "linear", "yarn"]
MAX_ROPE_SCALE = 1e6   # a context of a million contexts, or the inverse


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """Sizes that hold once the model's training length is known, in tokens.

    capped   the flag asked for more than the model can have
    longest  the context is all that the model can have
    """

    context_tokens: int
    batch_tokens: int
    ubatch_tokens: int
    capped: bool
    longest: bool

    def advice(self, lever: str) -> str:
        """What to do about a text that is too long: ``lever``, or raise --ctx-size where that can be."""
        return f"the model was trained for no more: {lever}" if self.longest else f"raise --ctx-size or {lever}"


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """Context and batch as asked for, in tokens. ``ctx_size`` 0: the training length. ``n_predict`` -1: no limit.

    shift  a full context does not end a text: old tokens go, but for the first ``keep``; -1: but for the prompt
    """

    ctx_size: int = 0
    n_predict: int = -1
    batch: int = 2048
    ubatch: int = 512
    shift: bool = False
    keep: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("--ctx-size", self.ctx_size, 0), ("--n-predict", self.n_predict, -1),
                                   ("--batch-size", self.batch, 1), ("--ubatch-size", self.ubatch, 1)):
            if value < least:
                raise SettingsError(f"{name} is {value}; give at least {least}")

    def plan(self, train_tokens: int, most_tokens: int) -> ContextPlan:
        """llama-server's rules: the context is rounded up to 256 tokens and then held to the longest that the model can
        have; the batch is at most the context as asked for (before rounding), the ubatch at most the batch.

        train_tokens  the training length; most_tokens: it, or more where positions are scaled for more
        """
        asked_tokens = self.ctx_size or train_tokens
        context_tokens = min(align_up(asked_tokens, CONTEXT_STEP_TOKENS), most_tokens)
        batch_tokens = min(self.batch, asked_tokens, context_tokens)
        return ContextPlan(
            context_tokens, batch_tokens, min(self.ubatch, batch_tokens),
            capped=asked_tokens > most_tokens, longest=context_tokens == most_tokens,
        )


@dataclass(frozen=True, slots=True)
class LayerWindow:
    """Layers ``first`` to ``last`` of a model keep their newest ``tokens`` tokens on the device; None: all."""

    first: int
    last: int
    tokens: int | None


@dataclass(frozen=True, slots=True)
class KvSettings:
    """How keys and values are stored and moved.

    arena_mib   the arena: KV pages plus the phases' workspaces; None: the engine chooses, a fair part of free memory;
                auto: the engine takes all that is free once the weights are loaded, but for ``fit_target_mib``
    pool_mib    instead of an arena: KV pages alone, workspace outside; never together with ``arena_mib``
    ring_slots  pages of the ring, run_pages pages moved by one copy; 0: the engine chooses
    rotation    quantised K and V are stored rotated by a Hadamard transform
    fit         an arena that the engine chooses is held to a part of free memory; else it is one for the whole context
    auxiliary_layers  MTP layers with KV that the model is thought to have; None: whatever it has
    window_tokens  window mode: newest tokens of a layer that stay on the device, but for what ``window_layers`` says
    ring_tiles  window mode: runs that fit into the ring; None: the engine chooses
    swa_full    the history keeps what the windows of layers that slide have passed
    """

    type_k: str = "f16"
    type_v: str = "f16"
    page_tokens: int = 256
    arena_mib: int | Literal["auto"] | None = None
    pool_mib: int | None = None
    residency_mode: ResidencyMode = "adaptive"
    ring_slots: int = 0
    run_pages: int = 0
    rotation: bool = True
    fit: bool = True
    fit_target_mib: int = 1024
    auxiliary_layers: int | None = None
    window_tokens: int | None = None
    window_layers: tuple[LayerWindow, ...] = ()
    ring_tiles: int | None = None
    swa_full: bool = False

    def __post_init__(self) -> None:
        self._check_windows()
        for flag, name in (("--cache-type-k", self.type_k), ("--cache-type-v", self.type_v)):
            if name not in KV_TYPES:
                raise SettingsError(f"{flag} {name}: not a K/V type; use one of {', '.join(KV_TYPES)}")
        if self.page_tokens < PAGE_STEP_TOKENS or self.page_tokens % PAGE_STEP_TOKENS:
            raise SettingsError(f"--kv-page-tokens {self.page_tokens}: not a multiple of {PAGE_STEP_TOKENS}; use 256")
        if self.arena_mib is not None and self.pool_mib is not None:
            raise SettingsError("--kv-stream-arena-mib and --kv-stream-pool-mib exclude each other; give one of them")
        for flag, size in (("--kv-stream-arena-mib", self.arena_mib), ("--kv-stream-pool-mib", self.pool_mib)):
            if isinstance(size, int) and size < 1:
                raise SettingsError(f"{flag} is {size}; give at least 1 MiB")
        for flag, pages in (("--kv-stream-ring-slots", self.ring_slots), ("--kv-stream-run-pages", self.run_pages)):
            if pages < 0:
                raise SettingsError(f"{flag} is {pages}; give a number of pages, or 0 for the engine's choice")

    def _check_windows(self) -> None:
        if self.residency_mode == "window":
            if self.ring_slots:
                raise SettingsError(
                    f"--kv-stream-ring-slots {self.ring_slots}: the ring of window mode has tiles; give "
                    "--kv-stream-ring-tiles 2 to 4, and their pages with --kv-stream-run-pages"
                )
            if self.window_tokens is None and not self.window_layers:
                raise SettingsError(
                    "--kv-residency-mode window: no window; give --kv-window-tokens N, --kv-window-layers, or both"
                )
            return
        for flag, value in (
            ("--kv-window-tokens", self.window_tokens), ("--kv-window-layers", self.window_layers or None),
            ("--kv-stream-ring-tiles", self.ring_tiles),
        ):
            if value is not None:
                raise SettingsError(
                    f"{flag}: only --kv-residency-mode window has windows and tiles, and the mode is "
                    f"{self.residency_mode}; give both, or leave it out"
                )


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """Position encoding instead of the model's own. None: as the model file says.

    scale: context expansion factor, freq_scale: its inverse, at most one of them. yarn_*: as in the YaRN paper,
    yarn_orig_ctx in tokens. As in llama-server a negative YaRN value, and 0 for the others, also mean "not set".
    """

    scaling: RopeScaling | None = None
    scale: float | None = None
    freq_base: float | None = None
    freq_scale: float | None = None
    yarn_orig_ctx: int | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_slow: float | None = None
    yarn_beta_fast: float | None = None

    def __post_init__(self) -> None:
        if self.scaling not in (None, *get_args(RopeScaling)):
            raise SettingsError(f"--rope-scaling {self.scaling}: use one of {', '.join(get_args(RopeScaling))}")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name == "scaling" or value is None:
                continue
            flag = ("--" if entry.name.startswith("yarn") else "--rope-") + entry.name.replace("_", "-")
            if not isfinite(value):
                raise SettingsError(f"{flag} {value}: give a finite number")
            least, most = 1.0 / MAX_ROPE_SCALE, MAX_ROPE_SCALE
            if entry.name in ("scale", "freq_scale") and value and not least <= value <= most:
                raise SettingsError(f"{flag} {value:g}: give 0 or a number from {least:g} to {most:g}")
            if value < 0 and entry.name in ("freq_base", "yarn_orig_ctx"):
                raise SettingsError(f"{flag} {value:g}: give a positive number, or 0 for the model's own")
        if self.scale and self.freq_scale and abs(self.scale * self.freq_scale - 1.0) > 1e-6:
            raise SettingsError(
                f"--rope-scale {self.scale:g} and --rope-freq-scale {self.freq_scale:g}: one is the inverse of the "
                "other; give one of them"
            )


AS_IN_FILE = RopeSettings()


ALL_LAYERS = 1 << 16
"""More than any model has."""


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """Where the model runs. name: auto, cpu, cuda or cuda:N. main_gpu: the GPU of a name without an index.
    threads: that share the CPU device's products, None: as many as there are cores.
    gpu_layers: whose weights are asked to stay on the device; None: as many as fit."""

    name: str = "auto"
    main_gpu: int = 0
    threads: int | None = None
    gpu_layers: int | None = None

    @property
    def wants_cpu(self) -> bool:
        """No GPU is to be looked for."""
        return self.name == "cpu" or (self.name == "auto" and self.gpu_layers == 0)

    @property
    def gpu_index(self) -> int:
        """Index of the GPU to use, if one is."""
        _, _, index = self.name.partition(":")
        return int(index) if index else self.main_gpu

    def layers_on(self, *, is_host: bool) -> int | None:
        """``gpu_layers`` on the device that was opened. All weights are in the CPU's memory: none of them has to pass
        through the arena there, unless ``--device cpu`` plays the GPU."""
        if is_host and (self.gpu_layers == 0 or self.name != "cpu"):
            return None
        return self.gpu_layers


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """All that the engine is built from."""

    model: ModelSettings
    context: ContextSettings = ContextSettings()
    kv: KvSettings = KvSettings()
    rope: RopeSettings = RopeSettings()
    device: DeviceSettings = DeviceSettings()
    speculative: SpeculativeSettings = field(default_factory=SpeculativeSettings)


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """Exactly one source. text: the prompt itself, escapes already expanded; file: read as is; neither: stdin."""

    text: str | None = None
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Whether the prompt is wrapped as a user message, and by which template. template: Jinja text, None: the model's.
    variables: extra template variables (``--chat-template-kwargs``, ``--reasoning``, ``--reasoning-effort``)."""

    enabled: bool = False
    system_prompt: str | None = None
    template: str | None = None
    template_file: Path | None = None
    variables: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConstraintSettings:
    """What the text has to follow, at most one of: a grammar in GBNF or a JSON schema, here or in a file."""

    grammar: str | None = None
    grammar_file: Path | None = None
    schema: Mapping[str, object] | None = None
    schema_file: Path | None = None

    def __post_init__(self) -> None:
        given = {"--grammar": self.grammar, "--grammar-file": self.grammar_file, "--json-schema": self.schema,
                 "--json-schema-file": self.schema_file}
        named = [flag for flag, value in given.items() if value is not None]
        if len(named) > 1:
            raise SettingsError(f"{' and '.join(named)} each constrain the text; give one of them")


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """What ``run`` prints. stop: strings that end the text; special: print special tokens; n_probs: top
    log-probabilities per token in the JSON result."""

    json: bool = False
    n_probs: int = 0
    special: bool = False
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoggingSettings:
    """Where log lines go besides stderr, and which. verbosity: 0 nothing but output, 1 errors, 2 warnings, 3 info,
    4 and above debug."""

    verbosity: int = 3
    disabled: bool = False
    file: Path | None = None
    jsonl: bool = False
    colors: Literal["on", "off", "auto"] = "auto"
    prefix: bool = False
    timestamps: bool = False


@dataclass(frozen=True, slots=True)
class RunSettings:
    """One ``kvs run``. session: the file that keeps what was read and written."""

    engine: EngineSettings
    prompt: PromptSettings
    sampling: Mapping[str, object]
    chat: ChatSettings = field(default_factory=ChatSettings)
    output: OutputSettings = OutputSettings()
    constraint: ConstraintSettings = ConstraintSettings()
    logging: LoggingSettings = LoggingSettings()
    session: Path | None = None


@dataclass(frozen=True, slots=True)
class InfoSettings:
    """One ``kvs info``. json: print one JSON object instead of tables."""

    engine: EngineSettings
    json: bool = False
    logging: LoggingSettings = LoggingSettings()


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """One ``kvs plan``.

    json     print one JSON object instead of tables
    plot     draw the forecast into this file too
    measure  the device's rates now, whatever was kept
    """

    engine: EngineSettings
    json: bool = False
    plot: Path | None = None
    measure: bool = False
    logging: LoggingSettings = LoggingSettings()

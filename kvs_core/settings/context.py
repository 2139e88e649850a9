"""Settings of the context, the batches and the position encoding."""

from __future__ import annotations

from functools import partial

from kvs_core.settings.kinds import SWITCH, choice, integer, number, number_above
from kvs_core.settings.setting import Group, Setting

_TOKENS = 1 << 31

_context = partial(Setting, group=Group.CONTEXT)
_rope = partial(Setting, group=Group.ROPE, relevance="accept")

SETTINGS = (
    _context("ctx_size", ("-c", "--ctx-size"), integer(0, _TOKENS),
        "Context length, rounded up to a multiple of 256 and held to the length the model was trained for, or that "
        "its scaled positions reach. 0: the length it was trained for. It costs memory only as it fills.",
        default=0, unit="tokens", env="LLAMA_ARG_CTX_SIZE"),
    _context("n_predict", ("-n", "--predict", "--n-predict"), integer(-1, _TOKENS),
        "Most tokens to generate; 0: none, the prompt is only read (llama-server makes one); -1: until the model ends "
        "its text or the context is full.",
        default=-1, unit="tokens", env="LLAMA_ARG_N_PREDICT", commands=("run", "serve")),
    _context("batch_size", ("-b", "--batch-size"), integer(1, _TOKENS),
        "Prompt tokens handed to the engine together; at most the context.",
        default=2048, unit="tokens", env="LLAMA_ARG_BATCH"),
    _context("ubatch_size", ("-ub", "--ubatch-size"), integer(1, _TOKENS),
        "Prompt tokens in one forward pass; at most --batch-size. Smaller ones need less workspace in the arena and "
        "read the history more often.",
        default=512, unit="tokens", env="LLAMA_ARG_UBATCH"),
    _context("context_shift", ("--context-shift",), SWITCH,
        "When the context is full while text is generated, forget the older half of it behind --keep and go on; the "
        "newer half moves down, its keys turned to their new positions, and the text then builds on what is left. "
        "Without it a full context ends the text. With -n -1 only the model ends it. Not for models with recurrent "
        "layers.",
        default=False, env="LLAMA_ARG_CONTEXT_SHIFT", off=("--no-context-shift",), commands=("run", "serve")),
    _context("keep", ("--keep",), integer(-1, _TOKENS),
        "Tokens at the beginning of the prompt that --context-shift never forgets, such as a system prompt, and one "
        "more where texts begin with a BOS token; -1: all of the prompt, as far as there is room: 4 tokens of the "
        "context are never kept. Models lean on the first tokens of a text: keep 4 or more. A number that is too large "
        "is refused by kvs run and cut down by kvs serve.",
        default=0, unit="tokens", commands=("run", "serve"), needs="context_shift", needed_by=("run", "serve")),
    _context("kv_unified_per_slot", ("--kv-unified-per-slot",), integer(1, _TOKENS),
        "Cap on a slot's context; with the one slot here it caps --ctx-size.",
        unit="tokens", relevance="accept", env="LLAMA_ARG_KV_UNIFIED_PER_SLOT"),
    _rope("rope_scaling", ("--rope-scaling",), choice("none", "linear", "yarn"),
        "How positions beyond the training length are mapped. Unset: as the model file says, and so for the rest of "
        "this group.",
        env="LLAMA_ARG_ROPE_SCALING_TYPE"),
    _rope("rope_scale", ("--rope-scale",), number_above(0),
        "Context expansion factor: the inverse of --rope-freq-scale. --ctx-size may then be that many times the "
        "original context.",
        env="LLAMA_ARG_ROPE_SCALE"),
    _rope("rope_freq_base", ("--rope-freq-base",), number(0, sample="10000"),
        "Base frequency; 0: the model's.",
        env="LLAMA_ARG_ROPE_FREQ_BASE"),
    _rope("rope_freq_scale", ("--rope-freq-scale",), number_above(0),
        "Factor on positions.",
        env="LLAMA_ARG_ROPE_FREQ_SCALE"),
    _rope("yarn_orig_ctx", ("--yarn-orig-ctx",), integer(0, _TOKENS),
        "YaRN: the context before it was extended; 0: the training length.",
        default=0, unit="tokens", env="LLAMA_ARG_YARN_ORIG_CTX"),
    _rope("yarn_ext_factor", ("--yarn-ext-factor",), number(),
        "YaRN: mix of extrapolation (1) and interpolation (0); negative: the model's.",
        default=-1.0, env="LLAMA_ARG_YARN_EXT_FACTOR"),
    _rope("yarn_attn_factor", ("--yarn-attn-factor",), number(),
        "YaRN: factor on attention magnitude; negative: the model's.",
        default=-1.0, env="LLAMA_ARG_YARN_ATTN_FACTOR"),
    _rope("yarn_beta_slow", ("--yarn-beta-slow",), number(),
        "YaRN: rotations below which a dimension is interpolated; negative: the model's.",
        default=-1.0, env="LLAMA_ARG_YARN_BETA_SLOW"),
    _rope("yarn_beta_fast", ("--yarn-beta-fast",), number(),
        "YaRN: rotations above which a dimension is left as it is; negative: the model's.",
        default=-1.0, env="LLAMA_ARG_YARN_BETA_FAST"),
)

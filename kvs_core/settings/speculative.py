"""Settings of speculation: which drafters, how far they look ahead, and the flags of separate draft models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvs_core.settings.drafters import DRAFTERS
from kvs_core.settings.kinds import (
    ANY,
    CPU_RANGE,
    HEX_MASK,
    ON_OFF,
    PATH,
    SWITCH,
    Kind,
    choice,
    choices,
    integer,
    number,
    numbers,
)
from kvs_core.settings.rooms import KV_TYPES
from kvs_core.settings.setting import Group, Rule, Setting

_spec = partial(Setting, group=Group.SPECULATIVE, commands=("run", "plan", "serve"))
_draft_cpu = partial(Setting, group=Group.SPECULATIVE, relevance="accept", commands=("run", "serve"),
                     note=(Rule("drafting uses no threads of its own"),))
_plain = partial(Setting, group=Group.SPECULATIVE, relevance="accept", commands=("run", "serve"))
_refused = partial(Setting, group=Group.SPECULATIVE, relevance="reject", commands=("run", "serve"))

_NO_DRAFT_MODEL = Rule("separate draft models are not loaded; use --spec-type draft-mtp, draft-resident or an ngram "
                       "type")
_NO_CPU_TENSORS = "all tensors are on one device; leave it out"
_SAME_TYPE = Rule("drafts share the type of the cache")
_IGNORED_HITS = Rule("one earlier match is enough, as in llama-server, which reads this number and ignores it too")
_LENGTH = integer(1, 1024, sample="12")
_DRAFTED = integer(0, 1024, sample="48")
_HITS = integer(1, 1 << 31)


def _drafter_list() -> Kind:
    """Names of drafters; ``none`` among them makes the list just that."""
    listed = choices("none", *DRAFTERS, *_FILE_DRAFTERS)

    def parse(text: str) -> object:
        names = listed.parse(text)
        return ("none",) if isinstance(names, tuple) and "none" in names else names

    return replace(listed, parse=parse)


_FILE_DRAFTERS = ("draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark")

SETTINGS = (
    _spec("spec_type", ("--spec-type",), _drafter_list(),
        "Drafters that guess tokens ahead, to be verified together: draft-mtp uses the model's own MTP head, ngram "
        "types repeat earlier text, draft-resident drafts from the pages on the device. Repeat or list several.",
        default=("none",), env="LLAMA_ARG_SPEC_TYPE", append=True,
        refuse=(replace(_NO_DRAFT_MODEL, only=_FILE_DRAFTERS),)),
    _spec("spec_default", ("--spec-default",), SWITCH,
        "Adds ngram-mod with 24 matched and 48 to 64 drafted tokens.",
        default=False),
    _spec("spec_draft_n_max", ("--spec-draft-n-max",), integer(0, 1024),
        "Most tokens that draft-mtp and draft-resident propose at once, 1 to 7.",
        default=3, unit="tokens", env="LLAMA_ARG_SPEC_DRAFT_N_MAX"),
    _spec("spec_draft_n_min", ("--spec-draft-n-min",), integer(0, 1024),
        "Shorter drafts of draft-mtp and draft-resident are thrown away.",
        default=0, unit="tokens", env="LLAMA_ARG_SPEC_DRAFT_N_MIN"),
    _spec("spec_draft_p_min", ("--spec-draft-p-min", "--draft-p-min"), number(0, 1),
        "Stop drafting when the best guess is less probable than this.",
        default=0.0, env="LLAMA_ARG_SPEC_DRAFT_P_MIN"),
    _spec("spec_draft_sampling", ("--spec-draft-sampling",), choice("greedy", "probabilistic"),
        "Draft the likeliest token, or draw it and verify by rejection sampling.",
        default="greedy", env="LLAMA_ARG_SPEC_DRAFT_SAMPLING"),
    _spec("spec_adaptive", ("--spec-adaptive",), ON_OFF,
        "Pause drafters that do not pay for themselves.",
        default=True),
    *(setting for name in ("simple", "map-k", "map-k4v") for setting in (
        _spec(f"spec_ngram_{name}_size_n".replace("-", "_"), (f"--spec-ngram-{name}-size-n",), _LENGTH,
              f"ngram-{name}: tokens that have to match.", default=12, unit="tokens"),
        _spec(f"spec_ngram_{name}_size_m".replace("-", "_"), (f"--spec-ngram-{name}-size-m",), _LENGTH,
              f"ngram-{name}: tokens drafted, at most 64.", default=48, unit="tokens"),
        _spec(f"spec_ngram_{name}_min_hits".replace("-", "_"), (f"--spec-ngram-{name}-min-hits",), _HITS,
              f"ngram-{name}: matches before it drafts.", default=1,
              note=() if name == "map-k4v" else (_IGNORED_HITS,)),
    )),
    _spec("spec_ngram_mod_n_match", ("--spec-ngram-mod-n-match",), _LENGTH,
        "ngram-mod: tokens that have to match; below 16 it guesses badly.",
        default=24, unit="tokens"),
    _spec("spec_ngram_mod_n_min", ("--spec-ngram-mod-n-min",), _DRAFTED,
        "ngram-mod: least tokens worth drafting.",
        default=48, unit="tokens"),
    _spec("spec_ngram_mod_n_max", ("--spec-ngram-mod-n-max",), _DRAFTED,
        "ngram-mod: most tokens drafted, at most 64.",
        default=64, unit="tokens"),
    _spec("lookup_cache_static", ("-lcs", "--lookup-cache-static"), PATH,
        "ngram-cache: statistics file."),
    _spec("lookup_cache_dynamic", ("-lcd", "--lookup-cache-dynamic"), PATH,
        "ngram-cache: second statistics file; it is only read."),
    _spec("spec_synth_len", ("--spec-synth-len",), number(1, 1025, sample="2"),
        "Benchmark: pretend that this many tokens come out of a step on average. The text is wrong.",
        unit="tokens", env="LLAMA_ARG_SPEC_SYNTH_LEN"),
    _spec("spec_synth_rates", ("--spec-synth-rates",), numbers(0, 1),
        "Benchmark: pretended acceptance per position, never rising. The text is wrong.",
        env="LLAMA_ARG_SPEC_SYNTH_RATES"),
    _plain("spec_draft_type_k", ("--spec-draft-type-k", "-ctkd", "--cache-type-k-draft"), choice(*KV_TYPES),
        "Type of draft keys; has to be --cache-type-k.",
        env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
        note=(_SAME_TYPE,)),
    _plain("spec_draft_type_v", ("--spec-draft-type-v", "-ctvd", "--cache-type-v-draft"), choice(*KV_TYPES),
        "Type of draft values; has to be --cache-type-v.",
        env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
        note=(_SAME_TYPE,)),
    _plain("spec_draft_p_split", ("--spec-draft-p-split", "--draft-p-split"), number(0, 1),
        "Probability that splits a draft tree.",
        default=0.1, env="LLAMA_ARG_SPEC_DRAFT_P_SPLIT",
        note=(Rule("drafts do not branch"),)),
    _plain("spec_draft_backend_sampling", ("--spec-draft-backend-sampling",), SWITCH,
        "Sample drafts on the GPU.",
        default=True, env="LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING", off=("--no-spec-draft-backend-sampling",),
        note=(Rule("the engine chooses where to sample, with the same text"),)),
    _plain("spec_draft_device", ("--spec-draft-device", "-devd", "--device-draft"), ANY,
        "Device of a draft model.",
        note=(Rule("drafting runs on --device"),)),
    _plain("spec_draft_ngl", ("--spec-draft-ngl", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft"),
        integer(-1, 1 << 16, words=("auto", "all")),
        "Layers of a draft model on the GPU.",
        default="auto", unit="layers", env="LLAMA_ARG_N_GPU_LAYERS_DRAFT",
        note=(Rule("drafting runs on --device", unless=("all",)),)),
    _draft_cpu("spec_draft_threads", ("--spec-draft-threads", "-td", "--threads-draft"), integer(-1, 1 << 12),
        "Draft threads.",
        unit="threads"),
    _draft_cpu("spec_draft_threads_batch", ("--spec-draft-threads-batch", "-tbd", "--threads-batch-draft"),
        integer(-1, 1 << 12),
        "Draft threads for prompts.",
        unit="threads"),
    _draft_cpu("spec_draft_cpu_mask", ("--spec-draft-cpu-mask", "-Cd", "--cpu-mask-draft"), HEX_MASK,
        "Draft cores, as a mask."),
    _draft_cpu("spec_draft_cpu_range", ("--spec-draft-cpu-range", "-Crd", "--cpu-range-draft"), CPU_RANGE,
        "Draft cores, as a range."),
    _draft_cpu("spec_draft_cpu_strict", ("--spec-draft-cpu-strict", "--cpu-strict-draft"), choice("0", "1"),
        "One core per draft thread."),
    _draft_cpu("spec_draft_prio", ("--spec-draft-prio", "--prio-draft"), integer(0, 3),
        "Priority of draft threads."),
    _draft_cpu("spec_draft_poll", ("--spec-draft-poll", "--poll-draft"), choice("0", "1"),
        "How draft threads wait."),
    _draft_cpu("spec_draft_cpu_mask_batch", ("--spec-draft-cpu-mask-batch", "-Cbd", "--cpu-mask-batch-draft"), HEX_MASK,
        "Draft cores for prompts, as a mask."),
    _draft_cpu("spec_draft_cpu_strict_batch", ("--spec-draft-cpu-strict-batch", "--cpu-strict-batch-draft"),
        choice("0", "1"),
        "One core per draft thread for prompts."),
    _draft_cpu("spec_draft_prio_batch", ("--spec-draft-prio-batch", "--prio-batch-draft"), integer(0, 3),
        "Priority of draft threads for prompts."),
    _draft_cpu("spec_draft_poll_batch", ("--spec-draft-poll-batch", "--poll-batch-draft"), choice("0", "1"),
        "How draft threads for prompts wait."),
    _refused("spec_draft_model", ("--spec-draft-model", "-md", "--model-draft"), PATH,
        "Draft model file.",
        env="LLAMA_ARG_SPEC_DRAFT_MODEL",
        refuse=(_NO_DRAFT_MODEL,)),
    _refused("spec_draft_hf", ("--spec-draft-hf", "-hfd", "-hfrd", "--hf-repo-draft"), ANY,
        "Draft model of a Hugging Face repository.",
        env="LLAMA_ARG_SPEC_DRAFT_HF_REPO",
        refuse=(_NO_DRAFT_MODEL,)),
    _refused("spec_draft_override_tensor", ("--spec-draft-override-tensor", "-otd", "--override-tensor-draft"), ANY,
        "Place draft tensors by name.",
        refuse=(Rule(_NO_CPU_TENSORS),)),
    _refused("spec_draft_cpu_moe", ("--spec-draft-cpu-moe", "-cmoed", "--cpu-moe-draft"), SWITCH,
        "Keep draft expert weights on the CPU.",
        default=False, env="LLAMA_ARG_SPEC_DRAFT_CPU_MOE",
        refuse=(Rule(_NO_CPU_TENSORS, only=(True,)),)),
    _refused("spec_draft_n_cpu_moe", ("--spec-draft-n-cpu-moe", "--spec-draft-ncmoe", "-ncmoed", "--n-cpu-moe-draft"),
        integer(0),
        "Keep the first draft layers' expert weights on the CPU.",
        default=0, unit="layers", env="LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE",
        refuse=(Rule(_NO_CPU_TENSORS, unless=(0,)),)),
    _refused("draft_max", ("--draft", "--draft-n", "--draft-max"), ANY,
        "Removed.",
        env="LLAMA_ARG_DRAFT_MAX",
        refuse=(Rule("removed; use --spec-draft-n-max, or --spec-ngram-mod-n-max for ngram-mod"),)),
    _refused("draft_min", ("--draft-min", "--draft-n-min"), ANY,
        "Removed.",
        env="LLAMA_ARG_DRAFT_MIN",
        refuse=(Rule("removed; use --spec-draft-n-min, or --spec-ngram-mod-n-min for ngram-mod"),)),
    _refused("spec_ngram_size_n", ("--spec-ngram-size-n",), ANY,
        "Removed.",
        refuse=(Rule("removed; use --spec-ngram-simple-size-n, -map-k-size-n, -map-k4v-size-n or "
                     "--spec-ngram-mod-n-match"),)),
    _refused("spec_ngram_size_m", ("--spec-ngram-size-m",), ANY,
        "Removed.",
        refuse=(Rule("removed; use --spec-ngram-simple-size-m, -map-k-size-m or -map-k4v-size-m"),)),
    _refused("spec_ngram_min_hits", ("--spec-ngram-min-hits",), ANY,
        "Removed.",
        refuse=(Rule("removed; use --spec-ngram-simple-min-hits, -map-k-min-hits or -map-k4v-min-hits"),)),
)

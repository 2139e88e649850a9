"""Settings of the model file: which one, where it comes from, and how it is read."""

from __future__ import annotations

from functools import partial

from kvs_core.settings.kinds import CSV, PATH, SWITCH, TEXT, choice
from kvs_core.settings.setting import COMMANDS, Group, Rule, Setting

_model = partial(Setting, group=Group.MODEL)

_NO_LOCK = "weights are memory-mapped and not locked in RAM"
_MAPPED = "weights are always memory-mapped"
_NO_DIRECT = "direct reads are not used: weights are memory-mapped"

SETTINGS = (
    _model("model", ("-m", "--model"), PATH,
        "The GGUF file to load; of a split model its part -00001-of-. Or synthetic:SHAPE:MIX, as in "
        "synthetic:qwen3.5-27b:iq4_xs: a real model's shapes with random weights, for measuring. Without it: the demo "
        "model that comes with kvs.",
        env="LLAMA_ARG_MODEL"),
    _model("override_kv", ("--override-kv",), CSV,
        "Replace the file's metadata: KEY=TYPE:VALUE with type int, float, bool or str, as in "
        "llama.rope.freq_base=float:500000.",
        default=(), append=True),
    _model("load_mode", ("-lm", "--load-mode"), choice("auto", "none", "mmap", "mlock", "mmap+mlock", "dio"),
        "How weights come from the file. They are mapped: the system reads what is used and may drop it again.",
        default="auto", env="LLAMA_ARG_LOAD_MODE",
        note=(Rule(_MAPPED, only=("none",)),
              Rule(_NO_LOCK, only=("mlock", "mmap+mlock")),
              Rule(_NO_DIRECT, only=("dio",)))),
    _model("offline", ("--offline",), SWITCH,
        "Never use the network: a model of --hf-repo or --model-url must be in the cache.",
        default=False, env="LLAMA_ARG_OFFLINE"),
    _model("hf_repo", ("-hf", "-hfr", "--hf-repo"), TEXT,
        "Model of a Hugging Face repository, USER/MODEL[:QUANT], fetched into the cache unless it is there. Without "
        "QUANT: Q4_K_M, else Q8_0, else the first.",
        env="LLAMA_ARG_HF_REPO"),
    _model("hf_file", ("-hff", "--hf-file"), TEXT,
        "File inside the Hugging Face repository; QUANT is then not looked at.",
        env="LLAMA_ARG_HF_FILE"),
    _model("hf_token", ("-hft", "--hf-token"), TEXT,
        "Hugging Face access token, for private and gated repositories.",
        env="HF_TOKEN", needs="hf_repo", needed_by=COMMANDS),
    _model("model_url", ("-mu", "--model-url"), TEXT,
        "Model at an http or https address, fetched into the cache unless it is there.",
        relevance="accept", env="LLAMA_ARG_MODEL_URL"),
    _model("cache_list", ("-cl", "--cache-list"), SWITCH,
        "List the models in the cache and exit.",
        default=False, relevance="accept"),
    _model("lazy_mode", ("-lzm", "--lazy-mode"), choice("on", "auto", "off"),
        "Read tensors from the file on first use.",
        default="auto", relevance="accept", env="LLAMA_ARG_LAZY_MODE",
        note=(Rule(_MAPPED, only=("off",)),)),
    _model("check_tensors", ("--check-tensors",), SWITCH,
        "Scan the weights for NaN and infinity before anything runs; it reads the whole file.",
        default=False, relevance="accept"),
    _model("mlock", ("--mlock",), SWITCH,
        "Old spelling of --load-mode mlock.",
        default=False, relevance="accept",
        note=(Rule(_NO_LOCK),)),
    _model("mmap", ("--mmap",), SWITCH,
        "Old spelling of --load-mode mmap and none.",
        default=True, relevance="accept", off=("--no-mmap",),
        note=(Rule(_MAPPED),)),
    _model("direct_io", ("-dio", "--direct-io"), SWITCH,
        "Old spelling of --load-mode dio.",
        default=False, relevance="accept",
        note=(Rule(_NO_DIRECT),)),
    _model("docker_repo", ("-dr", "--docker-repo"), TEXT,
        "Model from a Docker registry.",
        relevance="reject", env="LLAMA_ARG_DOCKER_REPO",
        refuse=(Rule("Docker registries are not read; give the GGUF file with --model FILE"),)),
)

"""Settings of devices, memory fitting, and CPU threads and placement."""

from __future__ import annotations

import re
from functools import partial

from kvs_core.settings.kinds import ANY, CPU_RANGE, HEX_MASK, ON_OFF, SWITCH, Kind, choice, integer, pattern, shown
from kvs_core.settings.setting import Group, Rule, Setting

_device = partial(Setting, group=Group.DEVICE)
_threads = partial(Setting, group=Group.THREADS, relevance="accept")

_ONE_DEVICE = "the model runs on one device; leave it out"
_NO_CPU_TENSORS = "all tensors are on one device; leave it out, or use --device cpu for the whole model"
_NOT_FITTED = Rule("nothing is shrunk to fit on the CPU device: the history grows with the text")
_UNPINNED = Rule("threads are not pinned or scheduled here")
_MAX_THREADS = 1 << 12


def _as_device(text: str) -> str:
    name = text.lower()
    if "," in name:
        raise ValueError(f"expected one device, got {shown(text)}; kvs uses a single one")
    if name in ("auto", "cpu", "none"):
        return name
    found = re.fullmatch(r"cuda:?([0-9]{0,3})", name)
    if found:
        return f"cuda:{int(found[1])}" if found[1] else "cuda"
    raise ValueError(f"expected auto, cpu, cuda or cuda:N, got {shown(text)}")


SETTINGS = (
    _device("device", ("-dev", "--device"),
        Kind("auto|cpu|cuda|cuda:N", ("auto", "cpu", "cuda", "CUDA0", "none"), _as_device, words=("auto", "cpu")),
        "Where the model runs: auto takes an NVIDIA GPU if there is one that works, else the CPU. cuda:N is the GPU of "
        "that index.",
        default="auto", env="LLAMA_ARG_DEVICE",
        refuse=(Rule("without a device the model runs on the CPU; use --device cpu", only=("none",)),)),
    _device("list_devices", ("--list-devices",), SWITCH,
        "List devices with their memory and exit.",
        default=False),
    _device("gpu_layers", ("-ngl", "--gpu-layers", "--n-gpu-layers"), integer(-1, 1 << 16, words=("auto", "all")),
        "Layers whose weights stay on the GPU, the output layer counted as one; those of the others, spread evenly, "
        "pass through the arena in every step, and the text is the same. auto: as many as fit, see --fit. 0 without "
        "--device: the CPU. Of a mixture of experts all experts of such a layer pass.",
        default="auto", unit="layers", env="LLAMA_ARG_N_GPU_LAYERS"),
    _device("threads", ("-t", "--threads"), integer(-_MAX_THREADS, _MAX_THREADS),
        "Threads that share the CPU device's large products; 0 or less: one per core. The results are the same, bit "
        "for bit, for every count.",
        default=-1, unit="threads", relevance="accept", env="LLAMA_ARG_THREADS"),
    _device("main_gpu", ("-mg", "--main-gpu"), integer(0, 1 << 10),
        "Index of the GPU to use, if --device names none.",
        default=0, env="LLAMA_ARG_MAIN_GPU"),
    _device("fit", ("-fit", "--fit"), ON_OFF,
        "Hold an arena that was left unset to a part of free memory, and keep as many layers on the GPU as fit; off: "
        "the arena has room for the whole context and all layers stay, or that is refused. What is given is taken "
        "literally either way.",
        default=True, env="LLAMA_ARG_FIT"),
    _device("fit_target", ("-fitt", "--fit-target"), pattern("MIB,...", "[0-9]{1,9}(,[0-9]{1,9}){0,63}", "1024"),
        "Device memory that --kv-stream-arena-mib auto and --gpu-layers auto leave free; of a list the first number "
        "counts.",
        default="1024", unit="MiB", env="LLAMA_ARG_FIT_TARGET"),
    _device("fit_ctx", ("-fitc", "--fit-ctx"), integer(1, 1 << 31),
        "Least context that --fit may choose.",
        default=4096, unit="tokens", env="LLAMA_ARG_FIT_CTX",
        note=(_NOT_FITTED,)),
    _device("split_mode", ("-sm", "--split-mode"), choice("none", "layer", "row", "tensor"),
        "How a model is split over GPUs.",
        default="layer", relevance="accept", env="LLAMA_ARG_SPLIT_MODE",
        refuse=(Rule("the model runs on one device; use --split-mode none", only=("row", "tensor")),)),
    _device("tensor_split", ("-ts", "--tensor-split"), ANY,
        "Shares of the model per GPU.",
        relevance="reject", env="LLAMA_ARG_TENSOR_SPLIT",
        refuse=(Rule(_ONE_DEVICE),)),
    _device("rpc", ("--rpc",), ANY,
        "Remote devices.",
        relevance="reject", env="LLAMA_ARG_RPC",
        refuse=(Rule("only a local device is used; leave it out"),)),
    _device("override_tensor", ("-ot", "--override-tensor"), ANY,
        "Place tensors by name.",
        relevance="reject", env="LLAMA_ARG_OVERRIDE_TENSOR",
        refuse=(Rule(_NO_CPU_TENSORS),)),
    _device("cpu_moe", ("-cmoe", "--cpu-moe"), SWITCH,
        "Keep expert weights on the CPU.",
        default=False, relevance="reject", env="LLAMA_ARG_CPU_MOE",
        refuse=(Rule(_NO_CPU_TENSORS, only=(True,)),)),
    _device("n_cpu_moe", ("-ncmoe", "--n-cpu-moe"), integer(0),
        "Keep the first layers' expert weights on the CPU.",
        default=0, unit="layers", relevance="reject", env="LLAMA_ARG_N_CPU_MOE",
        refuse=(Rule(_NO_CPU_TENSORS, unless=(0,)),)),
    _device("n_cpu_ffn", ("-ncffn", "--n-cpu-ffn"), integer(0),
        "Keep the first layers' feed-forward weights on the CPU.",
        default=0, unit="layers", relevance="reject", env="LLAMA_ARG_N_CPU_FFN",
        refuse=(Rule(_NO_CPU_TENSORS, unless=(0,)),)),
    _threads("threads_batch", ("-tb", "--threads-batch"), integer(-_MAX_THREADS, _MAX_THREADS),
        "Threads for prompts.",
        unit="threads",
        note=(Rule("prompts and generation use the same --threads"),)),
    _threads("cpu_mask", ("-C", "--cpu-mask"), HEX_MASK,
        "Cores to run on, as a mask.",
        note=(_UNPINNED,)),
    _threads("cpu_range", ("-Cr", "--cpu-range"), CPU_RANGE,
        "Cores to run on, as a range.",
        note=(_UNPINNED,)),
    _threads("cpu_strict", ("--cpu-strict",), choice("0", "1"),
        "One core per thread.",
        default="0",
        note=(_UNPINNED,)),
    _threads("prio", ("--prio",), integer(-1, 3),
        "Priority of the process.",
        default=0,
        note=(_UNPINNED,)),
    _threads("poll", ("--poll",), integer(0, 100),
        "How eagerly idle threads wait.",
        default=50,
        note=(_UNPINNED,)),
    _threads("cpu_mask_batch", ("-Cb", "--cpu-mask-batch"), HEX_MASK,
        "Cores for prompts, as a mask.",
        note=(_UNPINNED,)),
    _threads("cpu_range_batch", ("-Crb", "--cpu-range-batch"), CPU_RANGE,
        "Cores for prompts, as a range.",
        note=(_UNPINNED,)),
    _threads("cpu_strict_batch", ("--cpu-strict-batch",), choice("0", "1"),
        "One core per prompt thread.",
        default="0",
        note=(_UNPINNED,)),
    _threads("prio_batch", ("--prio-batch",), integer(0, 3),
        "Priority of prompt threads.",
        default=0,
        note=(_UNPINNED,)),
    _threads("poll_batch", ("--poll-batch",), choice("0", "1"),
        "How eagerly idle prompt threads wait.",
        note=(_UNPINNED,)),
    _threads("numa", ("--numa",), choice("distribute", "isolate", "numactl"),
        "Placement on NUMA nodes.",
        env="LLAMA_ARG_NUMA",
        note=(Rule("memory is placed by the operating system; start kvs under numactl"),)),
    _threads("repack", ("--repack",), SWITCH,
        "Rearrange weights for the CPU.",
        default=True, env="LLAMA_ARG_REPACK", off=("-nr", "--no-repack"),
        note=(Rule("weights are read as they are stored"),)),
    _threads("no_host", ("--no-host",), SWITCH,
        "Bypass host buffers.",
        default=False, env="LLAMA_ARG_NO_HOST",
        note=(Rule("weights are read as they are stored"),)),
    _threads("op_offload", ("--op-offload",), SWITCH,
        "Compute with host tensors on the device.",
        default=True, off=("--no-op-offload",),
        note=(Rule("all tensors are on one device"),)),
)

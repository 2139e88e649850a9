"""Settings of llama-server for what kvs does not do: named, so that each is answered with what to use instead."""

from __future__ import annotations

from functools import partial

from kvs_core.settings.kinds import ANY, SWITCH, TWO, integer, number
from kvs_core.settings.setting import Group, Rule, Setting

_TEXT_ONLY = "kvs reads text only, no images, audio or video"

_media = partial(Setting, group=Group.MULTIMODAL, relevance="accept", note=(Rule(_TEXT_ONLY),))
_no_media = partial(Setting, group=Group.MULTIMODAL, relevance="reject",
                    refuse=(Rule(f"{_TEXT_ONLY}; leave it out, or use --no-mmproj"),))
_no_adapter = partial(Setting, group=Group.ADAPTERS, relevance="reject",
                      refuse=(Rule("adapters are not applied; merge it into the model file, give that with --model"),))
_no_embedding = partial(Setting, group=Group.EMBEDDINGS, relevance="reject",
                        refuse=(Rule("kvs generates text only; leave it out and use a model that generates text"),))
_one_model = partial(Setting, group=Group.ROUTER, relevance="reject")

_ONE_MODEL = "one process serves one model; give it with --model FILE"
_PRESETS = ("--embd-gemma-default", "--fim-qwen-1.5b-default", "--fim-qwen-3b-default", "--fim-qwen-7b-default",
            "--fim-qwen-7b-spec", "--fim-qwen-14b-spec", "--fim-qwen-30b-default", "--gpt-oss-20b-default",
            "--gpt-oss-120b-default", "--vision-gemma-4b-default", "--vision-gemma-12b-default")

SETTINGS = (
    Setting("mmproj_auto", ("--mmproj-auto",), SWITCH,
        "Use a projector found beside the model; kvs never does.",
        Group.MULTIMODAL, default=True, relevance="accept", env="LLAMA_ARG_MMPROJ_AUTO",
        off=("--no-mmproj", "--no-mmproj-auto"),
        note=(Rule(_TEXT_ONLY, unless=(False,)),)),
    _media("mmproj_offload", ("--mmproj-offload",), SWITCH,
        "Projector on the GPU.",
        default=True, env="LLAMA_ARG_MMPROJ_OFFLOAD", off=("--no-mmproj-offload",)),
    _media("mmproj_device", ("-mmdev", "--mmproj-device"), ANY,
        "Device of the projector.",
        env="MTMD_BACKEND_DEVICE"),
    _media("image_min_tokens", ("--image-min-tokens",), integer(-1),
        "Least tokens per image.",
        unit="tokens", env="LLAMA_ARG_IMAGE_MIN_TOKENS"),
    _media("image_max_tokens", ("--image-max-tokens",), integer(-1),
        "Most tokens per image.",
        unit="tokens", env="LLAMA_ARG_IMAGE_MAX_TOKENS"),
    _media("mtmd_batch_max_tokens", ("--mtmd-batch-max-tokens",), integer(1),
        "Image tokens per batch.",
        default=1024, unit="tokens", env="LLAMA_ARG_MTMD_BATCH_MAX_TOKENS"),
    _media("video_fps", ("--video-fps",), number(0),
        "Frames per second of video.",
        default=4.0, env="LLAMA_ARG_VIDEO_FPS"),
    _media("video_timestamp_interval", ("--video-timestamp-interval",), integer(),
        "Spacing of video timestamps.",
        default=5000, unit="ms", env="LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL"),
    _media("video_ffmpeg_dir", ("--video-ffmpeg-dir",), ANY,
        "Folder of ffmpeg.",
        env="LLAMA_ARG_VIDEO_FFMPEG_DIR"),
    _no_media("mmproj", ("-mm", "--mmproj"), ANY,
        "Projector file.",
        env="LLAMA_ARG_MMPROJ"),
    _no_media("mmproj_url", ("-mmu", "--mmproj-url"), ANY,
        "Projector to download.",
        env="LLAMA_ARG_MMPROJ_URL"),
    _no_media("media_path", ("--media-path",), ANY,
        "Folder of media files."),
    _no_media("media_files", ("--image", "--audio", "--video"), ANY,
        "Media files for the prompt."),
    _no_adapter("lora", ("--lora",), ANY,
        "LoRA adapters."),
    _no_adapter("lora_scaled", ("--lora-scaled",), ANY,
        "LoRA adapters with a scale."),
    _no_adapter("lora_init_without_apply", ("--lora-init-without-apply",), SWITCH,
        "Load LoRA adapters unapplied.",
        default=False),
    _no_adapter("control_vector", ("--control-vector",), ANY,
        "Control vectors."),
    _no_adapter("control_vector_scaled", ("--control-vector-scaled",), ANY,
        "Control vectors with a scale."),
    _no_adapter("control_vector_layer_range", ("--control-vector-layer-range",), TWO,
        "Layers of the control vectors."),
    _no_embedding("pooling", ("--pooling",), ANY,
        "How embeddings are pooled.",
        env="LLAMA_ARG_POOLING"),
    _no_embedding("embeddings", ("--embedding", "--embeddings"), SWITCH,
        "Serve embeddings.",
        default=False, env="LLAMA_ARG_EMBEDDINGS"),
    _no_embedding("reranking", ("--rerank", "--reranking"), SWITCH,
        "Serve reranking.",
        default=False, env="LLAMA_ARG_RERANKING"),
    _one_model("models_dir", ("--models-dir",), ANY,
        "Folder of models.",
        env="LLAMA_ARG_MODELS_DIR",
        refuse=(Rule(_ONE_MODEL),)),
    _one_model("models_preset", ("--models-preset",), ANY,
        "Presets of models.",
        env="LLAMA_ARG_MODELS_PRESET",
        refuse=(Rule(_ONE_MODEL),)),
    _one_model("models_max", ("--models-max",), ANY,
        "Most models loaded.",
        env="LLAMA_ARG_MODELS_MAX",
        refuse=(Rule(_ONE_MODEL),)),
    _one_model("models_autoload", ("--models-autoload",), SWITCH,
        "Load models on demand.",
        default=False, env="LLAMA_ARG_MODELS_AUTOLOAD", off=("--no-models-autoload",),
        refuse=(Rule(_ONE_MODEL, only=(True,)),)),
    *(Setting(flag[2:].replace("-", "_").replace(".", "_"), (flag,), SWITCH, "Settings for a downloaded model.",
              Group.PRESETS, relevance="reject", default=False,
              refuse=(Rule("presets download a model that kvs does not run; give a file with --model FILE"),))
      for flag in _PRESETS),
)

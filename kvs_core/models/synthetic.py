"""Synthetic models: the shapes of a real model, random weights, no file. For measuring; their text means nothing.

``SHAPE:MIX[:mtp]``, such as ``qwen3.5-27b:iq4_xs``. The metadata come from ``SHAPES``, the tensors from the table of
the arch, their types from ``MIXES``, their values from a hash of their names (``formats/synthetic_blocks.py``): equal
names are equal models, in memory and in a file.

Weights are scaled so that an input of rms 1 to a matrix gives outputs of the rms in ``_GAINS``: the residual stream
grows to a few units in 64 layers, logits have a standard deviation of 2, recurrent state decays by 0.78 to 0.997 a
token.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGML_QUANT_VERSION, GGMLQuantizationType

from kvs_core.errors import SettingsError
from kvs_core.formats.gguf import SYNTHETIC_KEY, GgufFile, MetaValue, TensorInfo
from kvs_core.formats.gguf_writer import data_bytes
from kvs_core.formats.quants import row_bytes
from kvs_core.formats.synthetic_blocks import DrawnBytes
from kvs_core.formats.synthetic_vocab import synthetic_vocab
from kvs_core.models import gemma3, gemma4, qwen2, qwen3, qwen3moe, qwen35
from kvs_core.models.registry import ARCHS
from kvs_core.models.rope import DIVISORS
from kvs_core.models.spec import TensorSpec
from kvs_core.models.weights import POST_NORMS, is_matrix
from kvs_core.settings.sources import SYNTHETIC_PREFIX

Quant = GGMLQuantizationType

_MTP = "mtp"


@dataclass(frozen=True, slots=True)
class Hybrid:
    """What a ``qwen35`` model has besides: names as in its metadata."""

    rotated: int
    sections: tuple[int, int, int, int]
    ssm_state: int
    ssm_k_heads: int
    ssm_v_heads: int


@dataclass(frozen=True, slots=True)
class Sliding:
    """What a ``gemma3`` model has besides.   stretch: of the positions of layers that see everything"""

    window: int
    pattern: int
    stretch: float


@dataclass(frozen=True, slots=True)
class TwoShapes:
    """What a ``gemma4`` model has besides. The sizes of ``Shape`` are those of layers that see everything.

    window, pattern     of layers that slide: of ``pattern`` in a row all but the last
    kv_heads, head_dim  of layers that slide
    values              layers that see everything have a matrix for values
    softcap             of the logits
    """

    window: int
    pattern: int
    kv_heads: int
    head_dim: int
    values: bool = True
    softcap: float = 30.0


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts: how many of them there are and a row takes, and their width."""

    count: int
    used: int
    ffn: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model; names as in its metadata. The output head is the embedding in gemmas, else not.

    pre      the rule by which its tokenizer cuts text
    hybrid   for the arch ``qwen35``
    sliding  for the arch ``gemma3``
    two      for the arch ``gemma4``
    mixture  for the arch ``qwen3moe``, and in ``gemma4`` beside the dense feed-forward part
    """

    arch: str
    pre: str
    blocks: int
    embd: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_base: float
    rms_eps: float = 1e-6
    hybrid: Hybrid | None = None
    sliding: Sliding | None = None
    two: TwoShapes | None = None
    mixture: Mixture | None = None

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.sliding is not None or self.two is not None

    def slides(self, layer: int) -> bool:
        """Of a model with two shapes of layers."""
        return self.two is not None and layer % self.two.pattern < self.two.pattern - 1


def _qwen35(
    blocks: int, embd: int, ffn: int, heads: int, kv_heads: int, head_dim: int, hybrid: Hybrid, vocab: int, context: int
) -> Shape:
    return Shape(
        qwen35.ARCH, "qwen35", blocks, embd, ffn, heads, kv_heads, head_dim, vocab, context, 1e7, hybrid=hybrid
    )


SHAPES: Mapping[str, Shape] = MappingProxyType({
    # Qwen3.5-27B; Qwen3.6-27B and Qwen3.8-27B are alike.
    "qwen3.5-27b": _qwen35(
        64, 5120, 17408, 24, 4, 256, Hybrid(64, (11, 11, 10, 0), 128, 16, 48), vocab=248320, context=262144
    ),
    # config.json of Qwen/Qwen2.5-14B: 48 layers, 40 heads of 128 over 8 of K and V.
    "qwen2.5-14b": Shape(qwen2.ARCH, "qwen2", 48, 5120, 13824, 40, 8, 128, 152064, 131072, 1e6, rms_eps=1e-5),
    # config.json of Qwen/Qwen3-8B: 36 layers, 32 heads of 128 over 8 of K and V.
    "qwen3-8b": Shape(qwen3.ARCH, "qwen2", 36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e6),
    # config.json of Qwen/Qwen3-30B-A3B: 48 layers, 32 heads of 128 over 4 of K and V, 8 of 128 experts of 768.
    "qwen3-30b-a3b": Shape(
        qwen3moe.ARCH, "qwen2", 48, 2048, 6144, 32, 4, 128, 151936, 40960, 1e6, mixture=Mixture(128, 8, 768)
    ),
    # config.json of google/gemma-3-27b-it: 62 layers, 32 heads of 128 over 16 of K and V; its text alone.
    "gemma3-27b": Shape(
        gemma3.ARCH, "qwen2", 62, 5376, 21504, 32, 16, 128, 262144, 131072, 1e6, sliding=Sliding(1024, 6, 8.0)
    ),
    # Gemma 4 26B-A4B and 31B, their text alone, from GGUF logs. Assumed: the eps of the norms, the trained context, for
    # the 26B-A4B that of six layers one sees everything, and gates and ups of experts in two tensors.
    "gemma4-26b-a4b": Shape(
        gemma4.ARCH, "qwen2", 30, 2816, 2112, 16, 2, 512, 262144, 262144, 1e6,
        two=TwoShapes(1024, 6, 8, 256, values=False), mixture=Mixture(128, 8, 704),
    ),
    "gemma4-31b": Shape(
        gemma4.ARCH, "qwen2", 60, 5376, 21504, 32, 4, 512, 262144, 262144, 1e6,
        two=TwoShapes(1024, 6, 16, 256, values=False),
    ),
    # No published model: quick to make and to run.
    "small": _qwen35(12, 1024, 3584, 8, 2, 256, Hybrid(64, (11, 11, 10, 0), 128, 4, 12), vocab=32768, context=262144),
    "tiny": _qwen35(8, 256, 512, 4, 2, 64, Hybrid(16, (3, 3, 2, 0), 64, 2, 4), vocab=512, context=32768),
})


@dataclass(frozen=True, slots=True)
class Mix:
    """Types of the matrices; vectors, the taps of convolutions and routers are float32.

    base  of all that the others leave
    head  of the output head, also where it is the embedding
    more  of ``_MORE`` in some layers, see ``_gets_more``
    """

    base: Quant
    head: Quant
    more: Quant | None = None


MIXES: Mapping[str, Mix] = MappingProxyType({
    "iq4_xs": Mix(Quant.IQ4_XS, head=Quant.Q6_K),
    "q4_k": Mix(Quant.Q4_K, head=Quant.Q6_K),
    "q4_k_m": Mix(Quant.Q4_K, head=Quant.Q6_K, more=Quant.Q6_K),
    "q5_k_m": Mix(Quant.Q5_K, head=Quant.Q6_K, more=Quant.Q6_K),
    "q4_0": Mix(Quant.Q4_0, head=Quant.Q6_K),
    "q6_k": Mix(Quant.Q6_K, head=Quant.Q6_K),
    "q8_0": Mix(Quant.Q8_0, head=Quant.Q8_0),
    "f16": Mix(Quant.F16, head=Quant.F16),
    "bf16": Mix(Quant.BF16, head=Quant.BF16),
})
"""q4_k_m and q5_k_m have the types that llama-quantize gives them; the others have one type, but for the head."""

_ROUTER = "ffn_gate_inp"
_MORE = ("attn_v", "attn_qkv", "ffn_down")

_GAINS = {"ffn_down": 0.6, "attn_output": 0.3, "ssm_out": 0.25, "ssm_alpha": 0.3, "output": 2.0}
_EMBEDDING_STD = 1.0
_UNEVEN = {Quant.Q4_K: Quant.Q5_0, Quant.Q5_K: Quant.Q5_1, Quant.Q6_K: Quant.Q8_0, Quant.IQ4_XS: Quant.IQ4_NL}
"""What llama-quantize takes for rows that are not whole blocks of 256."""
_HEAD_NORM = 1.2    # of queries and keys, times D ** -0.25, where scores are not scaled
_POST_NORM = 0.25   # of what each part adds to residual rows of 2.0


def synthetic_model(name: str) -> GgufFile:
    """The model of that name, as a file that nobody has written. Its ``file_bytes`` are those of its tensors.

    Shapes of published models have the sizes in their model cards' ``config.json``, with the context that it gives.
    Raises SettingsError, with the names there are.
    """
    parts = name.split(":")
    mtp = len(parts) == 3 and parts[2] == _MTP
    if mtp and parts[0] in SHAPES and SHAPES[parts[0]].hybrid is None:
        raise SettingsError(f"{name!r:.80} is no synthetic model: {parts[0]} has no MTP block; leave :{_MTP} out")
    if len(parts) - mtp != 2 or parts[0] not in SHAPES or parts[1] not in MIXES:
        raise SettingsError(
            f"{name!r:.80} is no synthetic model: give SHAPE:MIX or SHAPE:MIX:{_MTP}, with a shape of "
            f"{', '.join(SHAPES)} and a mix of {', '.join(MIXES)}"
        )
    shape, mix = SHAPES[parts[0]], MIXES[parts[1]]
    path = Path(f"{SYNTHETIC_PREFIX}{name}")
    metadata = MappingProxyType(_metadata(f"synthetic {' '.join(parts)}", shape, mtp))
    arch = ARCHS[shape.arch]
    bare = arch.read_spec(GgufFile(path, 3, 0, metadata, {}))
    table = [*arch.trunk_tensors(bare), *arch.nextn_tensors(bare)]
    tensors = {spec.name: _tensor(spec, mix, shape) for spec in table if not _shared(spec.name, shape)}
    return GgufFile(path, 3, data_bytes(tensors.values()), metadata, MappingProxyType(tensors))


def _metadata(title: str, shape: Shape, mtp: bool) -> dict[str, MetaValue]:
    sizes: dict[str, MetaValue] = {
        "block_count": shape.blocks + mtp,
        "context_length": shape.context,
        "embedding_length": shape.embd,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": float(np.float32(shape.rms_eps)),   # as a file gives it back
        "rope.freq_base": shape.rope_base,
    }
    if shape.hybrid is not None:
        sizes |= {
            "rope.dimension_count": shape.hybrid.rotated,
            "rope.dimension_sections": np.array(shape.hybrid.sections, np.int32),
            "ssm.conv_kernel": 4,
            "ssm.state_size": shape.hybrid.ssm_state,
            "ssm.group_count": shape.hybrid.ssm_k_heads,
            "ssm.time_step_rank": shape.hybrid.ssm_v_heads,
            "ssm.inner_size": shape.hybrid.ssm_v_heads * shape.hybrid.ssm_state,
            "full_attention_interval": 4,
        }
    if shape.sliding is not None:
        sizes |= {
            "attention.sliding_window": shape.sliding.window,
            "attention.sliding_window_pattern": shape.sliding.pattern,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": shape.sliding.stretch,
        }
    if shape.two is not None:
        sizes |= _two_shapes(shape, shape.two)
    if shape.mixture is not None:
        sizes |= {
            "expert_count": shape.mixture.count,
            "expert_used_count": shape.mixture.used,
            "expert_feed_forward_length": shape.mixture.ffn,
        }
    if mtp:
        sizes["nextn_predict_layers"] = 1
    return {
        "general.architecture": shape.arch,
        "general.type": "model",
        "general.name": title,
        "general.quantization_version": GGML_QUANT_VERSION,
        SYNTHETIC_KEY: True,
        **{f"{shape.arch}.{key}": value for key, value in sizes.items()},
        **synthetic_vocab(shape.vocab, shape.pre),
    }


def _two_shapes(shape: Shape, two: TwoShapes) -> dict[str, MetaValue]:
    slides = [shape.slides(layer) for layer in range(shape.blocks)]
    return {
        "attention.head_count_kv": np.array([two.kv_heads if each else shape.kv_heads for each in slides], np.int32),
        "attention.key_length_swa": two.head_dim,
        "attention.value_length_swa": two.head_dim,
        "rope.dimension_count_swa": two.head_dim,
        "rope.freq_base_swa": 1e4,
        "attention.sliding_window": two.window,
        "attention.sliding_window_pattern": np.array(slides),
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": two.softcap,
    }


def _shared(name: str, shape: Shape) -> bool:
    """Whether a tensor stands for another: the head is the embedding, keys are values, or the MTP block takes its from
    the trunk."""
    if name == "output.weight":
        return shape.tied
    if shape.two is not None and name.endswith("attn_v.weight"):
        return not (shape.two.values or shape.slides(int(name.split(".")[1])))
    return name.endswith(("nextn.embed_tokens.weight", "nextn.shared_head_head.weight"))


def _tensor(spec: TensorSpec, mix: Mix, shape: Shape) -> TensorInfo:
    n_elements = int(np.prod(spec.shape))
    kind, n_in = _kind(spec.name), spec.shape[0]
    if (is_matrix(spec) or len(spec.shape) == 3) and kind != _ROUTER:
        quant = _quant(spec.name, mix, shape)
        if n_in % GGML_QUANT_SIZES[quant][0]:
            quant = _UNEVEN[quant]
        n_bytes = n_elements // n_in * row_bytes(quant, n_in)
        std = _GAINS.get(kind, 1.0) / n_in**0.5
        if kind == "token_embd":   # what is also the head has its gain, and sqrt(E) times that as a row
            std = _EMBEDDING_STD if not shape.tied else _GAINS["output"] / n_in**0.5
        return TensorInfo(
            spec.name, spec.shape, quant, n_elements, n_bytes, DrawnBytes(quant, std, _seed(spec.name), n_bytes)
        )
    values = _small(spec, shape).astype(np.float32)
    return TensorInfo(spec.name, spec.shape, Quant.F32, n_elements, values.nbytes, values.reshape(-1).view(np.uint8))


def _kind(name: str) -> str:
    """``attn_v`` of ``blk.3.attn_v.weight``; experts have the kinds of a feed-forward part that is alone."""
    return name.removesuffix(".weight").split(".")[-1].removesuffix("_exps")


def _quant(name: str, mix: Mix, shape: Shape) -> Quant:
    kind = _kind(name)
    if kind == "output" or (kind == "token_embd" and shape.tied):
        return mix.head
    if mix.more is not None and kind in _MORE and _gets_more(int(name.split(".")[1]), shape.blocks):
        return mix.more
    return mix.base


def _gets_more(layer: int, layers: int) -> bool:
    """The first and last eighth of the layers and every third between, as llama-quantize has it."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _seed(name: str) -> int:
    return zlib.crc32(name.encode())


def _head_norm(rng: np.random.Generator, head_dim: int) -> npt.NDArray[np.float64]:
    mean: float = _HEAD_NORM * head_dim**-0.25
    return rng.normal(mean, mean / 10, head_dim)


_OF_TWO_SHAPES: Mapping[str, Callable[[np.random.Generator, int], npt.NDArray[np.float64]]] = MappingProxyType({
    "attn_q_norm": _head_norm,
    "attn_k_norm": _head_norm,
    "layer_output_scale": lambda rng, size: rng.normal(1.0, 0.02, size),
})


def _small(spec: TensorSpec, of: Shape) -> npt.NDArray[np.float64]:
    """What is not multiplied with rows, shape reversed as NumPy has it."""
    rng = np.random.default_rng(_seed(spec.name))
    shape = spec.shape[::-1]
    kind = _kind(spec.name)
    if kind == "ssm_conv1d":
        taps = rng.normal(0.0, 0.3, shape)
        taps[:, -1] += 0.8   # the last tap meets the current token
        return taps
    if kind == "bias" and ".attn_" in spec.name:
        return rng.normal(0.0, 0.2, shape)
    if kind in ("bias", "ssm_a"):
        # log(decay) is softplus(alpha + dt) * a: dt and the decay are drawn, a is what is left.
        rng = np.random.default_rng(_seed(f"{spec.name.split('.')[1]} decay"))
        rate = np.exp(rng.uniform(np.log(0.003), np.log(0.25), shape))
        dt = rng.uniform(-4.0, 0.0, shape)
        return dt if kind == "bias" else -rate / np.log1p(np.exp(dt))
    if kind == _ROUTER:
        return rng.normal(0.0, 1.0 / shape[-1] ** 0.5, shape)
    if of.two is not None and kind in _OF_TWO_SHAPES:
        return _OF_TWO_SHAPES[kind](rng, shape[0])
    if spec.name == DIVISORS:   # a quarter of the pairs turns
        return np.where(np.arange(shape[0]) < shape[0] // 4, 1.0, 1e30)
    if spec.name.endswith("ffn_gate_inp.scale"):   # the router's input is divided by sqrt(E)
        return rng.normal(sqrt(shape[0]), sqrt(shape[0]) / 10, shape)
    if of.tied and kind in POST_NORMS:
        return rng.normal(_POST_NORM, _POST_NORM / 10, shape)
    if of.tied and kind == "output_norm":   # signs keep the head from guessing the token it has read
        return rng.choice([-1.0, 1.0], shape) * rng.normal(1.0, 0.1, shape)
    return rng.normal(1.0, 0.1, shape)

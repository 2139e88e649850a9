"""What a model is, as data: its layers, sizes and limits, read from a file's metadata and checked.

The rooms that hold KV know a model by this alone: which layers have keys and values, of what shape, and which have
recurrent state. Nothing here touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvs_core.device.operands import Activation, GdnShape
from kvs_core.errors import CapabilityError, ModelFileError
from kvs_core.formats.gguf import GgufFile
from kvs_core.models.rope import LONG_DIVISORS, SHORT_DIVISORS, RopeSpec

# Far above every published model, and low enough that no product of two of them is absurd.
MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 4096
MAX_WIDTH = 1 << 20
MAX_EXPERTS = 1 << 12
MAX_CONTEXT = (1 << 31) - 1


class LayerKind(Enum):
    """What a layer keeps of the past."""

    FULL = "full"            # keys and values of every position
    RECURRENT = "recurrent"  # a state of fixed size


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer. ``kv_index`` and ``read_index`` are None, like the head sizes 0, in a recurrent one.

    kv_index    whose keys and values it reads: its own number among the layers that keep some, unless it ``shares``
    read_index  its number among the attention layers
    shares      it has no keys and values of its own
    gated   q's matrix gives each head its query and then a gate, whose sigmoid multiplies the head's output
    window  a row sees so many keys, its own the last; 0: all
    n_ff    width of its feed-forward part, where it is not that of all
    """

    index: int
    kind: LayerKind
    heads: int = 0
    kv_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    kv_index: int | None = None
    gated: bool = False
    gdn: GdnShape | None = None
    window: int = 0
    read_index: int | None = None
    shares: bool = False
    n_ff: int = 0

    def __post_init__(self) -> None:
        if self.read_index is None:
            object.__setattr__(self, "read_index", self.kv_index)
        full = self.kind is LayerKind.FULL
        assert full == (self.kv_index is not None) == (self.gdn is None)
        assert not full or (self.heads % self.kv_heads == 0 and self.k_dim > 0 and self.v_dim > 0)


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """The feed-forward parts of a mixture of experts: ``count`` in every block, of which a row takes ``used``.

    n_ff      width of each
    n_shared  width of one more that every row takes; 0: none
    joined    gates and ups of the experts lie in one tensor, an expert's gate before its up
    """

    count: int
    used: int
    n_ff: int
    n_shared: int
    joined: bool


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's sizes.

    n_ff             width of the feed-forward part that all rows take; 0 in mixtures of experts without one
    experts          of a mixture of experts, else None
    layers           the trunk, in order
    nextn            layers of the MTP block behind the trunk, at most one; described, not computed by ``forward``
    n_params         counted from the file's tensors, the MTP block included
    n_ctx_train      positions the model was trained for
    n_ctx_most       the longest context: as trained, or as far as the rotary scaling was made for
    n_ctx_plain      positions up to which its attention is plain, where it is not beyond; else None
    attention_scale  factor on q before the softmax
    rope_sliding     positions of the layers that see a window, where they have their own; see ``Ropes``
    embedding_factor on the rows of the token table
    activation       of the feed-forward's gate
    post_norms       what attention and feed-forward give goes through a norm before it is added
    logit_softcap    c of c * tanh(logits / c); 0: none
    v_norms          values go through an RMSNorm without weights, per head
    n_per_layer      values of a token's embedding per layer; 0: none
    """

    arch: str
    name: str
    n_embd: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    n_ctx_most: int
    n_ctx_plain: int | None
    n_params: int
    rms_eps: float
    attention_scale: float
    rope: RopeSpec
    layers: tuple[LayerSpec, ...]
    nextn: tuple[LayerSpec, ...] = ()
    rope_sliding: RopeSpec | None = None
    embedding_factor: float = 1.0
    activation: Activation = Activation.SILU
    post_norms: bool = False
    logit_softcap: float = 0.0
    experts: ExpertSpec | None = None
    v_norms: bool = False
    n_per_layer: int = 0

    @property
    def n_layer(self) -> int:
        """Trunk layers."""
        return len(self.layers)

    @property
    def n_nextn(self) -> int:
        """Layers of the MTP block."""
        return len(self.nextn)

    @property
    def kv_layers(self) -> tuple[LayerSpec, ...]:
        """Trunk layers with keys and values of their own; ``kv_layers[i].kv_index == i``."""
        return tuple(layer for layer in self.layers if layer.kind is LayerKind.FULL and not layer.shares)

    @property
    def n_reads(self) -> int:
        """Attention layers of the trunk, those that share others' keys and values included."""
        return sum(layer.kind is LayerKind.FULL for layer in self.layers)

    @property
    def v_dim(self) -> int:
        """Values of the largest head's output."""
        return max((layer.v_dim for layer in (*self.layers, *self.nextn) if layer.gdn is None), default=0)

    @property
    def recurrent_layers(self) -> tuple[LayerSpec, ...]:
        """Trunk layers with recurrent state."""
        return tuple(layer for layer in self.layers if layer.kind is LayerKind.RECURRENT)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor a model needs. ``shape`` in GGUF order: a matrix [n_in, n_out], a vector [n].

    One of experts is [n_in, n_out, n]: their matrices one behind the other.
    """

    name: str
    shape: tuple[int, ...]
    optional: bool = False


def rope_tensors(spec: RopeSpec) -> list[TensorSpec]:
    """The divisors of angles that ``longrope`` needs, for short and for long contexts."""
    names = (LONG_DIVISORS, SHORT_DIVISORS) if spec.scaling == "longrope" else ()
    return [TensorSpec(name, (spec.n_rot // 2,)) for name in names]


def feed_forward_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The tensors of a block's feed-forward part by name, without ``.weight``; shapes in GGUF order."""
    n_embd, experts = spec.n_embd, spec.experts
    if experts is None:
        return {"ffn_gate": (n_embd, spec.n_ff), "ffn_up": (n_embd, spec.n_ff), "ffn_down": (spec.n_ff, n_embd)}
    count, n_ff, n_shared = experts.count, experts.n_ff, experts.n_shared
    shapes: dict[str, tuple[int, ...]] = {"ffn_gate_inp": (n_embd, count)}
    if experts.joined:
        shapes["ffn_gate_up_exps"] = (n_embd, 2 * n_ff, count)
    else:
        shapes |= {"ffn_gate_exps": (n_embd, n_ff, count), "ffn_up_exps": (n_embd, n_ff, count)}
    shapes["ffn_down_exps"] = (n_ff, n_embd, count)
    if n_shared:
        shapes |= {
            "ffn_gate_inp_shexp": (n_embd,),
            "ffn_gate_shexp": (n_embd, n_shared),
            "ffn_up_shexp": (n_embd, n_shared),
            "ffn_down_shexp": (n_shared, n_embd),
        }
    return shapes


@dataclass(frozen=True, slots=True)
class CommonKeys:
    """The metadata that every arch has, checked."""

    arch: str
    name: str
    n_block: int
    n_embd: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    n_ctx_plain: int | None
    n_params: int
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    rms_eps: float
    experts: ExpertSpec | None

    def model(
        self,
        *,
        attention_scale: float,
        rope: RopeSpec,
        layers: tuple[LayerSpec, ...],
        nextn: tuple[LayerSpec, ...] = (),
    ) -> ModelSpec:
        """The model with these keys and what its arch adds."""
        return ModelSpec(
            arch=self.arch,
            name=self.name,
            n_embd=self.n_embd,
            n_ff=self.n_ff,
            n_vocab=self.n_vocab,
            n_ctx_train=self.n_ctx_train,
            n_ctx_most=max(self.n_ctx_train, rope.reach_tokens),
            n_ctx_plain=self.n_ctx_plain,
            n_params=self.n_params,
            rms_eps=self.rms_eps,
            attention_scale=attention_scale,
            rope=rope,
            layers=layers,
            nextn=nextn,
            experts=self.experts,
        )

    def attention_layer(self, index: int, kv_index: int, *, gated: bool = False) -> LayerSpec:
        """Layer ``index`` with this model's heads."""
        return LayerSpec(index, LayerKind.FULL, self.heads, self.kv_heads, self.k_dim, self.v_dim, kv_index, gated)


def read_common(
    file: GgufFile, arch: str, experts: ExpertSpec | None = None, *, n_ff: int | None = None,
    kv_heads: int | None = None,
) -> CommonKeys:
    """Read and check them. Raises ModelFileError with the key, its value and the bounds.

    experts         of an arch that has them; a file of any other that has some is refused
    n_ff, kv_heads  of an arch whose layers differ in them, which has read and checked these keys
    """
    n_embd = file.get_u32(f"{arch}.embedding_length", least=1, most=MAX_WIDTH)
    heads = file.get_u32(f"{arch}.attention.head_count", least=1, most=MAX_HEADS)
    if kv_heads is None:
        kv_heads = file.get_u32(f"{arch}.attention.head_count_kv", heads, least=1, most=MAX_HEADS)
        if heads % kv_heads:
            raise ModelFileError(
                f"{file.path}: {arch}.attention.head_count is {heads}, no multiple of head_count_kv, which is "
                f"{kv_heads}"
            )
    if experts is None and n_ff is None and file.get_u32(f"{arch}.expert_count", 0) > 0:
        raise CapabilityError(
            f"{file.path}: is a mixture of experts ({arch}.expert_count is "
            f"{file.get_u32(f'{arch}.expert_count')}), for which kvs has no code in {arch} models; use a dense one"
        )
    return CommonKeys(
        arch=arch,
        name=file.get_str("general.name", file.path.stem),
        n_block=file.get_u32(f"{arch}.block_count", least=1, most=MAX_LAYERS),
        n_embd=n_embd,
        n_ff=n_ff or (0 if experts else _read_width(file, arch)),
        n_vocab=_read_vocab(file, arch),
        n_ctx_train=file.get_u32(f"{arch}.context_length", least=1, most=MAX_CONTEXT),
        n_ctx_plain=_read_plain(file, arch),
        n_params=sum(info.n_elements for info in file.tensors.values()),
        heads=heads,
        kv_heads=kv_heads,
        k_dim=_read_head_dim(file, f"{arch}.attention.key_length", n_embd, heads),
        v_dim=_read_head_dim(file, f"{arch}.attention.value_length", n_embd, heads),
        rms_eps=_read_eps(file, f"{arch}.attention.layer_norm_rms_epsilon"),
        experts=experts,
    )


def _read_width(file: GgufFile, arch: str) -> int:
    return file.get_u32(f"{arch}.feed_forward_length", least=1, most=MAX_WIDTH)


def read_experts(file: GgufFile, arch: str, *, shared: bool) -> ExpertSpec:
    """The experts that the file's metadata and tensors describe. Raises ModelFileError or CapabilityError.

    shared  the arch has an expert that every row takes
    A width without a key of its own follows from ``feed_forward_length``, as in llama.cpp.
    """
    count = file.get_u32(f"{arch}.expert_count", least=1, most=MAX_EXPERTS)
    used = file.get_u32(f"{arch}.expert_used_count", least=1, most=count)
    groups = file.get_u32(f"{arch}.expert_group_count", 0)
    if groups > 1:
        raise CapabilityError(
            f"{file.path}: {arch}.expert_group_count is {groups}; kvs has code for experts in one group"
        )
    n_ff = file.get_u32(f"{arch}.expert_feed_forward_length", None, least=1, most=MAX_WIDTH)
    n_shared = 0
    if shared:
        told = file.get_u32(f"{arch}.expert_shared_feed_forward_length", None, least=1, most=MAX_WIDTH)
        n_shared = told or _read_width(file, arch)
    return ExpertSpec(
        count=count,
        used=used,
        n_ff=n_ff or max(1, _read_width(file, arch) // used),
        n_shared=n_shared,
        joined="blk.0.ffn_gate_up_exps.weight" in file.tensors,
    )


def _read_vocab(file: GgufFile, arch: str) -> int:
    """Length of the token list, else ``vocab_size``: some files carry a ``vocab_size`` that padding made untrue."""
    tokens = file.get_strings("tokenizer.ggml.tokens", None)
    if tokens:
        return len(tokens)
    return file.get_u32(f"{arch}.vocab_size", least=1, most=1 << 24)


def _read_plain(file: GgufFile, arch: str) -> int | None:
    """Positions before dual chunk attention (An et al., 2024; Qwen2.5-1M) departs from plain attention: its chunk size.

    Up to there every distance is the true one. No key for it is settled; one is told by the words of the models' own
    configuration.
    """
    told = [key for key in file.metadata if key.startswith(f"{arch}.") and "dual_chunk" in key]
    sizes = [file.get_u32(key, least=1) for key in told if key.endswith("chunk_size")]
    if told and not sizes:
        raise CapabilityError(
            f"{file.path}: {told[0]} speaks of dual chunk attention, and no key of the size of its chunks, up to which "
            "it is plain attention; kvs has code for no other"
        )
    return min(sizes, default=None)


def _read_head_dim(file: GgufFile, key: str, n_embd: int, heads: int) -> int:
    dim = file.get_u32(key, None, least=1, most=MAX_HEAD_DIM)
    if dim is not None:
        return dim
    if n_embd % heads:
        raise ModelFileError(
            f"{file.path}: has no {key}, and an embedding of {n_embd} does not divide into {heads} heads"
        )
    if n_embd // heads > MAX_HEAD_DIM:
        raise ModelFileError(f"{file.path}: a head of {n_embd // heads} values; at most {MAX_HEAD_DIM} make sense")
    return n_embd // heads


def _read_eps(file: GgufFile, key: str) -> float:
    eps = file.get_f32(key)
    if not 0.0 < eps < 1.0:
        raise ModelFileError(f"{file.path}: {key} is {eps:g}; it must lie between 0 and 1")
    return eps

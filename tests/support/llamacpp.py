"""llama.cpp as an oracle: its C API, through ``ctypes``, from the extension module of the ``xllamacpp`` wheel.

    with Model(path) as model, model.context(type_k="f32", type_v="f32") as context:
        logits = context.decode(model.tokenize("The capital of France is"))     # float32 [T, V]

The layouts are those of build b11549. A struct of defaults is fetched at import time and compared with the known
values, so that another build stops here with a message and not later with odd numbers. What llama.cpp would answer by
aborting the process (a token out of range, a full context) is refused here first.

A quantised cache is rotated by a Hadamard transform unless the environment has ``LLAMA_ATTN_ROT_DISABLE=1`` when the
context is made.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Mapping, Sequence
from ctypes import CFUNCTYPE, POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any, Self

import gguf
import numpy as np
import xllamacpp

CONTEXT_TYPE_MTP = 1
TINY_EMBD = 256
LOG_WARN, LOG_ERROR, LOG_CONTINUE = 3, 4, 5


class LlamaCppError(RuntimeError):
    """llama.cpp refused something; the message ends with what it logged."""


class ModelParams(ctypes.Structure):
    """``llama_model_params``, 80 bytes."""

    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class ContextParams(ctypes.Structure):
    """``llama_context_params``, 168 bytes. ``pointers`` holds three null pointers of callbacks, unused here."""

    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32),
        ("attention_type", c_int32),
        ("flash_attn_type", c_int32),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("pointers", c_void_p * 3),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


MODEL_DEFAULTS = {
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "main_gpu": 0,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_alloc": False,
}
CONTEXT_DEFAULTS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "flash_attn_type": -1,
    "yarn_ext_factor": -1.0,
    "defrag_thold": -1.0,
    "type_k": 1,
    "type_v": 1,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
}


class Batch(ctypes.Structure):
    """``llama_batch``: one row per token, all in sequence 0 here."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


# C++ functions: llama_set_embeddings_nextn(context, on, only where logits are) and llama_get_embeddings_nextn(context).
KEEP_HIDDEN = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
HIDDEN = "_Z26llama_get_embeddings_nextnP13llama_context"

# name: (result, arguments)
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (c_void_p, c_void_p)),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_model_n_embd": (c_int32, (c_void_p,)),
    "llama_model_n_layer": (c_int32, (c_void_p,)),
    "llama_model_n_layer_nextn": (c_int32, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_vocab_is_eog": (c_bool, (c_void_p, c_int32)),
    "llama_tokenize": (c_int32, (c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool)),
    "llama_detokenize": (c_int32, (c_void_p, POINTER(c_int32), c_int32, c_char_p, c_int32, c_bool, c_bool)),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "llama_free": (None, (c_void_p,)),
    "llama_n_ctx": (c_uint32, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_memory_seq_add": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits": (POINTER(c_float), (c_void_p,)),
    KEEP_HIDDEN: (None, (c_void_p, c_bool, c_bool)),
    HIDDEN: (POINTER(c_float), (c_void_p,)),
}


def _library() -> ctypes.CDLL:
    folder = Path(xllamacpp.__file__).parent
    lib = ctypes.CDLL(str(next(folder.glob("xllamacpp*.so"))))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    model, context = lib.llama_model_default_params(), lib.llama_context_default_params()
    for params, known in ((model, MODEL_DEFAULTS), (context, CONTEXT_DEFAULTS)):
        read = {name: getattr(params, name) for name in known}
        if read != known:
            raise ImportError(f"xllamacpp {xllamacpp.__version__} has other parameter structs: {read}")
    return lib


_log: deque[str] = deque(maxlen=20)
_log_level = 0


def _keep_warnings(level: int, text: bytes, _user_data: int | None) -> None:
    global _log_level
    _log_level = _log_level if level == LOG_CONTINUE else level
    if _log_level in (LOG_WARN, LOG_ERROR):
        _log.append(text.decode(errors="replace"))


os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # should it abort all the same, then at once and not through a debugger
_lib = _library()
_keep_hidden = getattr(_lib, KEEP_HIDDEN)
_hidden = getattr(_lib, HIDDEN)
_log_callback = CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(_keep_warnings)  # lives as long as the library may call it
_lib.llama_backend_init()


def _listen() -> None:
    """Hear what the library says from now on; who else uses it in this process may have turned it elsewhere."""
    _lib.llama_log_set(_log_callback, None)
    _log.clear()


_listen()


def _refused(what: str) -> LlamaCppError:
    said = "".join(_log).strip()
    return LlamaCppError(f"{what}: {said or 'llama.cpp gave no reason'}")


class Model:
    """A loaded GGUF. Weights stay as they are in the file: repacked for the CPU at hand, they would round otherwise."""

    def __init__(self, path: Path, *, load_mtp: bool = False) -> None:
        params = _lib.llama_model_default_params()
        params.use_extra_bufts = False
        params.load_mtp = load_mtp
        _listen()
        self._model = _lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise _refused(f"llama.cpp cannot load {path}")
        self._vocab = _lib.llama_model_get_vocab(self._model)
        self.n_vocab: int = _lib.llama_vocab_n_tokens(self._vocab)
        self.n_embd: int = _lib.llama_model_n_embd(self._model)
        self.n_layer: int = _lib.llama_model_n_layer(self._model)
        self.n_layer_mtp: int = _lib.llama_model_n_layer_nextn(self._model)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``; ``add_special`` adds BOS where the model wants one."""
        data = text.encode()
        room = len(data) + 8
        ids = (c_int32 * room)()
        count = _lib.llama_tokenize(self._vocab, data, len(data), ids, room, add_special, parse_special)
        if count < 0:
            raise LlamaCppError(f"{-count} tokens do not fit in {room} places")
        return list(ids[:count])

    def detokenize(self, tokens: Sequence[int], *, special: bool = True) -> bytes:
        """The bytes of ``tokens``; ``special`` prints special tokens too."""
        ids = (c_int32 * len(tokens))(*self._checked(tokens))
        room = 16
        while True:
            text = ctypes.create_string_buffer(room)
            count = _lib.llama_detokenize(self._vocab, ids, len(tokens), text, room, False, special)
            if count >= 0:
                return text.raw[:count]
            room = -count

    def is_end(self, token: int) -> bool:
        """Whether generation stops at ``token``."""
        return bool(_lib.llama_vocab_is_eog(self._vocab, token))

    def context(
        self,
        *,
        n_ctx: int = 2048,
        n_batch: int = 512,
        n_ubatch: int = 512,
        type_k: str = "f32",
        type_v: str = "f32",
        flash_attn: bool = False,
        n_threads: int | None = None,
        hidden: bool = False,
        mtp: bool = False,
        rope: Mapping[str, float] | None = None,
    ) -> Context:
        """A fresh sequence. K/V types are ggml names (``q8_0``); a quantised V needs ``flash_attn``.

        ``hidden`` also keeps the rows that enter the output head (qwen35). ``mtp`` makes a context of the MTP block
        instead of the trunk, which takes those rows; the model must have been loaded with ``load_mtp``. ``rope``:
        fields of ``ContextParams`` about positions. Without ``n_threads`` a tiny model gets one thread, since two would
        spend their time waiting for each other, others two.
        """
        params = _lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_ubatch
        params.n_threads = params.n_threads_batch = n_threads or (1 if self.n_embd < TINY_EMBD else 2)
        params.type_k = gguf.GGMLQuantizationType[type_k.upper()].value
        params.type_v = gguf.GGMLQuantizationType[type_v.upper()].value
        params.flash_attn_type = int(flash_attn)
        params.ctx_type = CONTEXT_TYPE_MTP if mtp else 0
        for name, value in (rope or {}).items():
            setattr(params, name, value)
        _listen()
        pointer = _lib.llama_init_from_model(self._model, params)
        if not pointer:
            raise _refused(f"llama.cpp cannot make a context with K {type_k} and V {type_v}")
        return Context(self, pointer, n_batch=n_batch, hidden=hidden or mtp)

    def _checked(self, tokens: Sequence[int]) -> Sequence[int]:
        if not all(0 <= token < self.n_vocab for token in tokens):
            raise LlamaCppError(f"a token is outside [0, {self.n_vocab})")
        return tokens

    def close(self) -> None:
        if self._model:
            _lib.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Context:
    """One sequence of a ``Model``; it must be closed before its model is."""

    def __init__(self, model: Model, pointer: int, *, n_batch: int, hidden: bool) -> None:
        self.model = model
        self.n_ctx: int = _lib.llama_n_ctx(pointer)
        self.position = 0
        self.hidden_rows = np.empty((0, model.n_embd), np.float32)
        """[T, E] float32: rows of the last ``decode`` after output_norm, if ``hidden`` was asked for; qwen35 only."""
        self._context: int | None = pointer
        self._n_batch = n_batch
        self._hidden = hidden
        if hidden:
            _keep_hidden(pointer, True, False)

    def decode(self, tokens: Sequence[int], states: np.ndarray | None = None) -> np.ndarray:
        """Append ``tokens`` and return their logits, float32 [T, V].

        states  [T, E] float32, for an MTP context only: the trunk's hidden row of the position before each token
        """
        self._check_open()
        if self.position + len(tokens) > self.n_ctx:
            raise LlamaCppError(f"{self.position} + {len(tokens)} tokens do not fit in a context of {self.n_ctx}")
        self.model._checked(tokens)
        parts, hidden = [np.empty((0, self.model.n_vocab), np.float32)], [self.hidden_rows[:0]]
        for start in range(0, len(tokens), self._n_batch):
            part = tokens[start : start + self._n_batch]
            self._decode_batch(part, None if states is None else states[start : start + self._n_batch])
            parts.append(self._rows(_lib.llama_get_logits(self._context), len(part), self.model.n_vocab))
            if self._hidden:
                hidden.append(self._rows(_hidden(self._context), len(part), self.model.n_embd))
        self.hidden_rows = np.concatenate(hidden)
        return np.concatenate(parts)

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """Append ``tokens`` and then the likeliest ones, up to ``count`` or an end token, which is not returned."""
        out: list[int] = []
        last = self.decode(tokens)[-1]
        while len(out) < count and not self.model.is_end(int(last.argmax())):
            out.append(int(last.argmax()))
            last = self.decode(out[-1:])[-1]
        return out

    def clear(self) -> None:
        """Forget the sequence."""
        self._check_open()
        _lib.llama_memory_clear(_lib.llama_get_memory(self._context), True)
        self.position = 0

    def shift(self, keep: int, discard: int) -> None:
        """Forget the tokens [keep, keep + discard), and move those behind them down: as llama-server does."""
        self._check_open()
        memory, end = _lib.llama_get_memory(self._context), keep + discard
        if not (0 <= keep <= end <= self.position and _lib.llama_memory_seq_rm(memory, 0, keep, end)):
            raise LlamaCppError(f"tokens {keep} to {end} of {self.position} cannot be forgotten")
        _lib.llama_memory_seq_add(memory, 0, end, self.position, -discard)
        self.position -= discard

    def _check_open(self) -> None:
        if self._context is None:
            raise LlamaCppError("the context is closed")

    def _decode_batch(self, tokens: Sequence[int], states: np.ndarray | None) -> None:
        count = len(tokens)
        sequence = (c_int32 * 1)(0)
        floats = None
        if states is not None:
            floats = np.ascontiguousarray(states, np.float32)
            if floats.shape != (count, self.model.n_embd):
                raise LlamaCppError(f"states are {floats.shape}, not {(count, self.model.n_embd)}")
        batch = Batch(
            count,
            (c_int32 * count)(*tokens),
            None if floats is None else floats.ctypes.data_as(POINTER(c_float)),
            (c_int32 * count)(*range(self.position, self.position + count)),
            (c_int32 * count)(*[1] * count),
            (POINTER(c_int32) * count)(*[ctypes.cast(sequence, POINTER(c_int32))] * count),
            (c_int8 * count)(*[1] * count),
        )
        _listen()
        status = _lib.llama_decode(self._context, batch)
        if status != 0:
            raise _refused(f"llama_decode of {count} tokens at {self.position} answered {status}")
        self.position += count

    def _rows(self, pointer: ctypes._Pointer[c_float], rows: int, cols: int) -> np.ndarray:
        return np.ctypeslib.as_array(pointer, (rows, cols)).copy()

    def close(self) -> None:
        if self._context is not None:
            _lib.llama_free(self._context)
            self._context = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

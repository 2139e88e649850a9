"""llama.cpp's own samplers, one at a time, through the C API of the ``xllamacpp`` wheel's extension module.

Signatures are those of build b11549, the one that ``tests/support/llamacpp.py`` checks for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xllamacpp


class TokenData(Structure):
    """``llama_token_data``."""

    _fields_ = (("id", c_int32), ("logit", c_float), ("p", c_float))


class TokenDataArray(Structure):
    """``llama_token_data_array``."""

    _fields_ = (("data", POINTER(TokenData)), ("size", c_size_t), ("selected", c_int64), ("sorted", c_bool))


class LogitBias(Structure):
    """``llama_logit_bias``."""

    _fields_ = (("token", c_int32), ("bias", c_float))


SIGNATURES = {
    "dist": (c_uint32,),
    "logit_bias": (c_int32, c_int32, POINTER(LogitBias)),
    "penalties": (c_int32, c_int32, c_float, c_float, c_float),   # n_vocab, last_n, repeat, frequency, presence
    "dry": (c_void_p, c_float, c_float, c_int32, c_int32, POINTER(c_char_p), c_size_t),
    "top_n_sigma": (c_float,),
    "top_k": (c_int32,),
    "typical": (c_float, c_size_t),
    "top_p": (c_float, c_size_t),
    "min_p": (c_float, c_size_t),
    "xtc": (c_float, c_float, c_size_t, c_uint32),
    "temp_ext": (c_float, c_float, c_float),
    "mirostat": (c_int32, c_uint32, c_float, c_float, c_int32),
    "mirostat_v2": (c_uint32, c_float, c_float),
    "adaptive_p": (c_float, c_float, c_uint32),
    "infill": (c_void_p,),
}


def _library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
    for name, arguments in SIGNATURES.items():
        function = getattr(lib, f"llama_sampler_init_{name}")
        function.restype, function.argtypes = c_void_p, arguments
    for name, arguments in {
        "llama_sampler_apply": (c_void_p, POINTER(TokenDataArray)),
        "llama_sampler_accept": (c_void_p, c_int32),
        "llama_sampler_reset": (c_void_p,),
        "llama_sampler_free": (c_void_p,),
    }.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = None, arguments
    return lib


_lib = _library()


@dataclass(frozen=True, slots=True)
class Applied:
    """What a sampler left: the list in its order, and the selected token if it selects."""

    ids: np.ndarray
    logits: np.ndarray
    token: int | None


class NativeSampler:
    """One sampler of llama.cpp, e.g. ``NativeSampler("top_k", 40)``; arguments as in its C function."""

    def __init__(self, name: str, *arguments: object) -> None:
        self._pointer = getattr(_lib, f"llama_sampler_init_{name}")(*arguments)

    def apply(self, ids: Iterable[int], logits: np.ndarray, *, is_sorted: bool = False) -> Applied:
        """Run the sampler over a candidate list."""
        pairs = list(zip(ids, logits.tolist(), strict=True))
        data = (TokenData * len(pairs))(*[TokenData(token, logit, 0.0) for token, logit in pairs])
        array = TokenDataArray(data, len(pairs), -1, is_sorted)
        _lib.llama_sampler_apply(self._pointer, ctypes.byref(array))
        left = [array.data[index] for index in range(array.size)]
        return Applied(
            np.array([item.id for item in left], np.int32),
            np.array([item.logit for item in left], np.float32),
            left[array.selected].id if array.selected >= 0 else None,
        )

    def accept(self, token: int) -> None:
        """Tell the sampler that ``token`` was taken."""
        _lib.llama_sampler_accept(self._pointer, token)

    def reset(self) -> None:
        """Back to the state at birth."""
        _lib.llama_sampler_reset(self._pointer)

    def __del__(self) -> None:
        _lib.llama_sampler_free(self._pointer)


def dry(vocab: int, multiplier: float, base: float, allowed: int, last_n: int, breakers: list[str]) -> NativeSampler:
    """The DRY sampler; ``vocab`` is a ``llama_vocab`` pointer."""
    texts = (c_char_p * len(breakers))(*[text.encode() for text in breakers])
    return NativeSampler("dry", vocab, multiplier, base, allowed, last_n, texts, len(breakers))


def logit_bias(n_vocab: int, pairs: list[tuple[int, float]]) -> NativeSampler:
    """The logit bias sampler."""
    return NativeSampler("logit_bias", n_vocab, len(pairs), (LogitBias * len(pairs))(*[LogitBias(*p) for p in pairs]))

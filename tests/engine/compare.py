"""Log-probabilities of kvs and of llama.cpp over the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.engine.engine import Engine
from kvs_core.engine.session import Session
from kvs_core.formats.gguf import GgufFile
from kvs_core.settings.rooms import ContextSettings, KvSettings, RopeSettings
from tests.support import llamacpp
from tests.support.compare import log_probs


@dataclass(frozen=True)
class Distance:
    """largest  of the differences between log-probabilities; kl: mean over positions, llama.cpp as the truth."""

    largest: float
    kl: float
    same_top: float

    @classmethod
    def between(cls, ours: np.ndarray, theirs: np.ndarray) -> Distance:
        """Of two logit arrays [T, V]."""
        a, b = log_probs(ours), log_probs(theirs)
        kl = float((np.exp(b) * (b - a)).sum(axis=-1).mean())
        return cls(float(np.abs(a - b).max()), kl, float((a.argmax(-1) == b.argmax(-1)).mean()))


def share_beyond(ours: np.ndarray, theirs: np.ndarray, limit: float) -> float:
    """Of the positions of two logit arrays [T, V], the share at which a log-probability differs by more."""
    return float((np.abs(log_probs(ours) - log_probs(theirs)).max(axis=-1) > limit).mean())


def ours(
    path: Path, tokens: Sequence[int], *, type_k: str = "f32", type_v: str = "f32", round_q: bool = False,
    rotation: bool = True, decode_from: int | None = None, context: int = 2048,
) -> np.ndarray:
    """kvs's logits [T, V]; tokens from ``decode_from`` on are decoded one by one."""
    with session(path, type_k=type_k, type_v=type_v, round_q=round_q, rotation=rotation, context=context) as run:
        cut = len(tokens) if decode_from is None else decode_from
        logits = [run.prefill(tokens[:cut], all_logits=True)]
        logits += [run.decode(token)[None] for token in tokens[cut:]]
        return np.concatenate(logits)


@contextmanager
def session(
    path: Path, *, type_k: str = "f32", type_v: str = "f32", round_q: bool = False, rotation: bool = True,
    context: int = 2048, shift: bool = False,
) -> Iterator[Session]:
    """A session of kvs on a fresh engine."""
    device = HostDevice(1, debug=HostDebug(round_q=round_q))
    engine = Engine(
        GgufFile.open(path), device,
        context=ContextSettings(ctx_size=context, shift=shift),
        kv=KvSettings(type_k=type_k, type_v=type_v, rotation=rotation),
        rope=RopeSettings(),
    )
    try:
        yield Session(engine)
    finally:
        engine.close()


def theirs(
    path: Path, tokens: Sequence[int], *, type_k: str = "f32", type_v: str = "f32", batch: int = 512
) -> np.ndarray:
    """llama.cpp's logits [T, V], ``batch`` tokens at a time. Quantised V needs its flash attention."""
    with llamacpp.Model(path) as model, model.context(
        n_ctx=2048, type_k=type_k, type_v=type_v, flash_attn=type_v != "f32", n_threads=1
    ) as context:
        return np.concatenate([context.decode(tokens[at : at + batch]) for at in range(0, len(tokens), batch)])

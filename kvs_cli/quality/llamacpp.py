"""llama.cpp as another engine, where the ``xllamacpp`` package is installed: its server, in this process, on the CPU.

Asked for one token behind every prefix, with the probability of the whole vocabulary. A prefix extends the one before,
so each costs one step. llama.cpp is taken as it comes: it rounds activations to 8 bits for most types of weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from kvs_cli.quality.setup import Bench
from kvs_core.errors import CapabilityError
from kvs_core.settings import RopeSettings

NAME = "llama.cpp"
_WHOLE = 1e-3   # what may be missing of the sum of all probabilities
_ROOM = 8


def why_not(bench: Bench) -> str:
    """Why llama.cpp cannot be compared with; empty if it can."""
    if find_spec("xllamacpp") is None:
        return "the xllamacpp package is not installed"
    if bench.model.file.synthetic:
        return "a synthetic model has no file that it could read; kvs synthesize writes one"
    if bench.settings.rope != RopeSettings() or bench.settings.model.override_kv:
        return "it is not told of --override-kv, --rope and --yarn settings"
    if not bench.settings.kv.rotation:
        return "it rotates quantised keys and values, and --kv-rotation is off"
    return ""


def log_probs_behind(bench: Bench, tokens: Sequence[int], first: int) -> Iterator[np.ndarray]:
    """Log-probabilities, float64 [V], of what follows each of ``tokens[first:]``; -inf for what has no share.

    Raises ``CapabilityError`` if llama.cpp cannot be used for this.
    """
    server = _Server(bench.model.file.path, bench, len(tokens) + _ROOM)
    n_vocab = bench.model.spec.n_vocab
    for last in range(first, len(tokens)):
        row = np.full(n_vocab, -np.inf)
        for entry in server.ask(tokens[: last + 1], n_vocab):
            if 0 <= entry["id"] < n_vocab:
                row[entry["id"]] = entry["logprob"]
        if abs(np.exp(row).sum() - 1.0) > _WHOLE:
            raise CapabilityError(f"llama.cpp gave probabilities that sum to {np.exp(row).sum():.4f}; use another "
                                  "xllamacpp, or --against none")
        yield row


class _Server:
    """One model with one sequence."""

    def __init__(self, path: Path, bench: Bench, context_tokens: int) -> None:
        import xllamacpp

        kv, spec = bench.settings.kv, bench.model.spec
        context = bench.settings.context.plan(spec.n_ctx_train, spec.n_ctx_most)
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = context_tokens
        params.n_batch, params.n_ubatch = context.batch_tokens, context.ubatch_tokens
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.fit_params = params.warmup = params.ui = False
        params.port = 0        # any that is free, on this machine alone
        params.verbosity = -1
        # What it "generates" has to be whole characters, or it answers without probabilities: a plain token is forced.
        # They are those of the logits, before any bias.
        decoded = ((token, bench.model.tokenizer.token_bytes(token)) for token in range(bench.model.spec.n_vocab))
        self._bias = [[next((token for token, piece in decoded if piece.isalpha() and piece.isascii()), 0), 1_000.0]]
        types = xllamacpp.ggml_type
        params.cache_type_k = getattr(types, f"GGML_TYPE_{kv.type_k.upper()}")
        params.cache_type_v = getattr(types, f"GGML_TYPE_{kv.type_v.upper()}")
        if bench.settings.device.threads is not None:
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = bench.settings.device.threads
        try:
            self._server = xllamacpp.Server(params)
        except RuntimeError as error:
            raise CapabilityError(
                f"llama.cpp cannot load {path} with K {kv.type_k}, V {kv.type_v}: {error} Use --against none"
            ) from None

    def ask(self, tokens: Sequence[int], n_vocab: int) -> list[dict[str, Any]]:
        """Id and log-probability of everything that can follow."""
        answer = self._server.handle_completions({
            "prompt": list(tokens), "n_predict": 1, "n_probs": n_vocab, "cache_prompt": True, "temperature": 1.0,
            "samplers": [], "logit_bias": self._bias,
        })
        found = json.loads(answer) if isinstance(answer, str) else answer
        try:
            return list(found["choices"][0]["logprobs"]["content"][0]["top_logprobs"])
        except (KeyError, IndexError, TypeError):
            said = str(found.get("error", found) if isinstance(found, dict) else found)[:200]
            raise CapabilityError(f"llama.cpp gave no probabilities: {said}; use --against none") from None

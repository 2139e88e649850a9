"""What ``kvs run`` has to tell when it is done, and the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvs_core.engine.reports import KvReport, WeightsReport
from kvs_core.errors import KvsError
from kvs_core.models.spec import ModelSpec
from kvs_core.sampling.logprobs import TokenProbs
from kvs_core.speculative.drafter import DraftStats


@dataclass(frozen=True, slots=True)
class Timings:
    """llama-server's timings. The first token is free: generation is timed from the end of the prompt to the last token
    and its rate counts one token less. Rates are 0 where there is nothing to divide.

    load_ms         from the start of the command until the engine was ready
    first_token_ms  from the start of the prompt until the first token was there
    """

    load_ms: float
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    first_token_ms: float

    @staticmethod
    def between(
        start_s: float, loaded_s: float, prompt_done_s: float, token_s: Sequence[float], prompt_n: int
    ) -> Timings:
        """From clock readings, in order; ``token_s`` has one per token."""
        prompt_ms = (prompt_done_s - loaded_s) * 1e3
        predicted_ms = (token_s[-1] - prompt_done_s) * 1e3 if token_s else 0.0
        return Timings(
            load_ms=(loaded_s - start_s) * 1e3,
            prompt_n=prompt_n,
            prompt_ms=prompt_ms,
            prompt_per_second=_per_second(prompt_n, prompt_ms),
            predicted_n=len(token_s),
            predicted_ms=predicted_ms,
            predicted_per_second=_per_second(len(token_s) - 1, predicted_ms),
            first_token_ms=(token_s[0] - loaded_s) * 1e3 if token_s else 0.0,
        )


def _per_second(count: int, duration_ms: float) -> float:
    return count / duration_ms * 1e3 if count > 0 and duration_ms > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Drafts:
    """What speculation did.   by_type: counts of each drafter; synthetic: acceptance was pretended"""

    rounds: int
    synthetic: bool
    by_type: Mapping[str, DraftStats]

    @property
    def drafted(self) -> int:
        """Tokens that were verified."""
        return sum(stats.drafted_tokens for stats in self.by_type.values())

    @property
    def accepted(self) -> int:
        """Of those, the ones that became text."""
        return sum(stats.accepted_tokens for stats in self.by_type.values())

    def as_json(self) -> dict[str, Any]:
        """Part of the object that ``--json`` prints."""
        by_type = {
            name: {"drafts": stats.drafts, "drafted": stats.drafted_tokens, "accepted": stats.accepted_tokens}
            for name, stats in self.by_type.items()
        }
        return {
            "types": list(by_type),
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "mean_width": (self.rounds + self.drafted) / max(1, self.rounds),
            "synthetic": self.synthetic,
            "by_type": by_type,
        }


def model_facts(path: Path, spec: ModelSpec, *, synthetic: bool) -> dict[str, Any]:
    """The part of the object that ``--json`` prints which a model's file tells."""
    return {
        "model": {
            "path": str(path), "arch": spec.arch, "name": spec.name, "n_layer": spec.n_layer, "n_params": spec.n_params,
        },
        "synthetic": synthetic,
    }


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run.

    synthetic         the model's weights are random
    decode_h2d_bytes  what the steps behind the prompt moved to the device; the rest is in ``kv``
    dropped_tokens    forgotten by context shifts
    error             what ended the text before its time
    """

    path: Path
    synthetic: bool
    spec: ModelSpec
    device: str
    token_ids: tuple[int, ...]
    text: str
    stop_reason: str
    seed: int
    seed_is_random: bool
    timings: Timings
    kv: KvReport
    weights: WeightsReport
    decode_h2d_bytes: int
    probs: tuple[TokenProbs, ...]
    drafts: Drafts | None
    dropped_tokens: int
    error: KvsError | None = None

    @property
    def h2d_bytes_per_token(self) -> float:
        """Bytes that a token costs on the link. The first token comes from the prompt's last step."""
        return self.decode_h2d_bytes / max(1, len(self.token_ids) - 1)

    def as_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints, but for an ``error``. Keys are never renamed."""
        kv, stats = self.kv, self.kv.stats
        return {
            **model_facts(self.path, self.spec, synthetic=self.synthetic),
            "device": self.device,
            "prompt_tokens": self.timings.prompt_n,
            "generated_tokens": len(self.token_ids),
            "token_ids": list(self.token_ids),
            "text": self.text,
            "stop_reason": self.stop_reason,
            "dropped_tokens": self.dropped_tokens,
            "seed": self.seed,
            "timings": asdict(self.timings) | ({} if self.drafts is None else {
                "draft_n": self.drafts.drafted, "draft_n_accepted": self.drafts.accepted,
            }),
            "kv": {
                "mode": kv.mode,
                "arena_bytes": kv.arena_bytes,
                "page_tokens": kv.page_tokens,
                "page_bytes": kv.page_bytes,
                "pool_pages": stats.pool_pages,
                "resident_pages": stats.resident_pages,
                "ring_slots": stats.ring_slots,
                "active_pages": stats.active_pages,
                "streamed_pages_per_step": stats.streamed_pages_per_step,
                "h2d_bytes": kv.h2d_bytes,
                "h2d_bytes_by_layer": dict(zip(map(str, kv.layer_numbers), stats.moved_bytes, strict=True)),
                "h2d_bytes_per_token": self.h2d_bytes_per_token,
                "d2h_bytes": kv.d2h_bytes,
                "h2d_calls": kv.h2d_calls,
                "stall_ms": kv.stall_ms,
                "repartitions": stats.repartitions,
                "history_bytes": stats.history_bytes,
            },
            "weights": {
                "layers": self.weights.layers,
                "streamed_layers": list(self.weights.passing),
                "resident_bytes": self.weights.resident_bytes,
                "streamed_bytes": self.weights.home_bytes,
                "ring_bytes": self.weights.ring_bytes,
            },
            "weights_h2d_bytes": self.weights.home_bytes,   # per step
            "spec": None if self.drafts is None else self.drafts.as_json(),
            "probs": [
                {"id": step.id, "logprob": step.logprob, "top": [[top.id, top.logprob] for top in step.top]}
                for step in self.probs
            ],
        }

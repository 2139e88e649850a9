"""HF transformers with its offloaded cache on the same GGUF: ``python -m kvs_cli.bench.offloaded MODEL.gguf``.

It dequantises the weights and keeps the cache of all layers but one in host memory, so it can run what fits so: shapes
that transformers reads from GGUF files, with weights that fit the device in 16 bits. Jobs are lines of JSON on stdin,
answers lines on stdout, everything else on stderr. It ends when stdin does.

    (at start)                                  -> {"ready": true} or {"error": one line}
    {"tokens": [...], "decode_tokens": 64}      -> {"first_token_ms", "decode_tps"} or {"error": one line}
"""

from __future__ import annotations

import json
import os
import sys
from inspect import signature
from pathlib import Path
from time import perf_counter
from typing import Any

_MISSING = "transformers, torch or accelerate is not installed; pip install transformers torch accelerate"


class Offloaded:
    """A model of transformers whose text is greedy."""

    def __init__(self, gguf: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if not torch.cuda.is_available():
            raise RuntimeError("the offloaded cache of transformers needs a GPU that torch can use, and there is none")
        self._torch = torch
        model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float16)
        self._model = model.to("cuda").eval()
        takes = signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in takes else "past_key_values"   # renamed in transformers 5

    def time(self, tokens: list[int], decode_tokens: int) -> dict[str, float]:
        """Read ``tokens``, generate as many as asked for."""
        from transformers import DynamicCache

        torch = self._torch
        cache = DynamicCache(config=self._model.config, offloading=True)
        with torch.inference_mode():
            start = perf_counter()
            token = self._next(torch.tensor([tokens], device="cuda"), cache)
            first = perf_counter()
            for _ in range(decode_tokens - 1):
                token = self._next(token, cache)
            last = perf_counter()
        return {"first_token_ms": 1e3 * (first - start), "decode_tps": (decode_tokens - 1) / (last - first)}

    def _next(self, tokens: Any, cache: Any) -> Any:
        """The likeliest token behind these, [1, 1]; it is on the host before this returns."""
        told = {"input_ids": tokens, self._cache_name: cache, "use_cache": True, "logits_to_keep": 1}
        logits = self._model(**told).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        token.item()
        return token


def main(gguf: str) -> int:
    """Serve jobs until stdin ends."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)   # whatever else prints

        def answer(told: dict[str, Any]) -> None:
            answers.write(json.dumps(told) + "\n")
            answers.flush()

        try:
            engine = Offloaded(Path(gguf))
        except ImportError as error:
            answer({"error": f"{_MISSING} ({error})"})
            return 1
        except Exception as error:   # whatever transformers cannot do with this file
            answer({"error": _line(error)})
            return 1
        answer({"ready": True})
        for line in sys.stdin:
            job = json.loads(line)
            try:
                answer(engine.time(job["tokens"], job["decode_tokens"]))
            except Exception as error:
                answer({"error": _line(error)})
    return 0


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

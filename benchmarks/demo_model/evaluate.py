"""Measures a trained model with PyTorch: bits per byte, recall by length and depth, agreement of the MTP block.

    python -m benchmarks.demo_model.evaluate --data FOLDER --model FILE.gguf

``train`` runs the same at its end, with the weights as they are in its file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks.demo_model import recall
from benchmarks.demo_model.export_gguf import read
from benchmarks.demo_model.gdn import CHUNK
from benchmarks.demo_model.mixture import Stream
from benchmarks.demo_model.model import Model
from benchmarks.demo_model.tokenizer import end_id, from_merges, load, token_bytes

LENGTHS = (4096, 8192, 16384, 32768)
DEPTHS = tuple(range(0, 101, 10))
OTHER_FACTS = 7
BATCH_TOKENS = 131_072


class Texts:
    """Tokens kept aside for tests."""

    def __init__(self, data: Path) -> None:
        merges = load(data / "merges.json")
        self.encoder = from_merges(merges)
        self.sizes = np.array([len(piece) for piece in token_bytes(merges)])
        arrays = np.load(data / "tokens.npz")
        self.held_out = Stream(arrays["held_out"], token_bytes(merges))
        self.filler = Stream(arrays["filler_test"], token_bytes(merges))
        self.end = end_id(merges)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ids: list[int] = self.encoder.encode(text, add_special_tokens=False).ids
        return ids

    def case(self, stream: Stream, length: int, depth: int, rng: np.random.Generator) -> tuple[np.ndarray, int, int]:
        """A prompt with one fact at ``depth`` percent, seven others of its sort anywhere, a question and the answer.

        Returns the tokens, at most ``length``, and where the answer starts and stops.
        """
        facts = recall.draw_facts(1 + OTHER_FACTS, Random(int(rng.integers(1 << 62))), kind=recall.SECRET_NUMBER)
        question = self.encode("\n\n" + facts[0].prompt)
        answer = self.encode(facts[0].value)
        stated = [self.encode(" " + fact.statement) for fact in facts]
        room = length - len(question) - len(answer) - sum(map(len, stated))
        start, stop = stream.window(room, rng)
        places = stream.after_sentence[slice(*np.searchsorted(stream.after_sentence, (start + 1, stop)))]
        wanted = [start + depth / 100 * (stop - start), *rng.uniform(start, stop, OTHER_FACTS)]
        parts: list[Any] = []
        at = start
        for place, ids in sorted(
            (int(places[np.abs(places - target).argmin()]), ids) for target, ids in zip(wanted, stated, strict=True)
        ):
            parts += [stream.ids[at:place], ids]
            at = place
        tokens = np.concatenate([*parts, stream.ids[at:stop], question, answer]).astype(np.int64)
        return tokens, len(tokens) - len(answer), len(tokens)


@torch.no_grad()
def recall_share(model: Model, texts: Texts, stream: Stream, length: int, depth: int, cases: int, seed: int) -> float:
    """The share of prompts whose whole answer is what the model would write, taking the likeliest token each time."""
    rng = np.random.default_rng((seed, length, depth))
    device = model.weights["token_embd.weight"].device
    found = 0
    per_batch = max(1, BATCH_TOKENS // length)
    for at in range(0, cases, per_batch):
        drawn = [texts.case(stream, length, depth, rng) for _ in range(min(per_batch, cases - at))]
        rows = np.full((len(drawn), -(-length // CHUNK) * CHUNK), texts.end)
        for row, (tokens, _, _) in zip(rows, drawn, strict=True):
            row[: len(tokens)] = tokens
        hidden, _ = model.hidden(torch.from_numpy(rows).to(device))
        hidden = hidden.view(len(drawn), rows.shape[1], -1)
        for i, (tokens, start, stop) in enumerate(drawn):
            picked = model.logits(hidden[i, start - 1 : stop - 1]).argmax(-1).cpu().numpy()
            found += bool((picked == tokens[start:stop]).all())
    return found / cases


@torch.no_grad()
def text_measures(model: Model, texts: Texts, window: int) -> dict[str, float]:
    """Bits per byte over the held-out text, in windows without overlap; and how often the MTP block, which does not
    yet know the trunk's row of a token, has the trunk's likeliest next token as its own."""
    device = model.weights["token_embd.weight"].device
    ids = texts.held_out.ids.astype(np.int64)
    count = (len(ids) - 1) // window
    nats = agreed = hits = 0.0
    for at in range(count):
        part = torch.from_numpy(ids[at * window : (at + 1) * window + 1]).to(device)
        hidden, ahead = model.hidden(part[None, :-1])
        logits, guess = model.logits(hidden), model.logits(ahead)
        nats += torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum").item()
        agreed += (logits.argmax(-1) == guess.argmax(-1)).sum().item()
        hits += (logits.argmax(-1) == part[1:]).sum().item()
    tokens = count * window
    size = int(texts.sizes[ids[1 : tokens + 1]].sum())
    return {
        "tokens": tokens, "bytes": size, "window": window, "nats_per_token": nats / tokens,
        "bits_per_byte": nats / math.log(2) / size, "top1_accuracy": hits / tokens, "mtp_agreement": agreed / tokens,
    }  # fmt: skip


def evaluate(
    model: Model, texts: Texts, *, cases: int, window: int = 8192, lengths: tuple[int, ...] = LENGTHS, seed: int = 7
) -> dict[str, Any]:
    """All measures, ready for JSON. Recall in percent of ``cases`` per length, filler and depth."""
    table: dict[str, Any] = {}
    for name, stream in (("generated", texts.filler), ("held_out", texts.held_out)):
        for length in lengths:
            shares = {
                str(depth): round(100 * recall_share(model, texts, stream, length, depth, cases, seed), 1)
                for depth in DEPTHS
            }
            table.setdefault(name, {})[str(length)] = {
                "by_depth": shares, "mean": round(sum(shares.values()) / len(shares), 2)
            }  # fmt: skip
    return {"text": text_measures(model, texts, window), "recall_cases": cases, "recall": table}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a trained demo model with PyTorch.")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--model", type=Path, required=True, metavar="FILE")
    parser.add_argument("--cases", type=int, default=50, metavar="N")
    arguments = parser.parse_args()
    config, weights = read(arguments.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Model(config, {name: weight.to(device) for name, weight in weights.items()}, dtype=dtype)
    print(json.dumps(evaluate(model, Texts(arguments.data), cases=arguments.cases), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

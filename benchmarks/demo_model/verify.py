"""Does kvs itself find the facts, with everything resident and with the smallest arena?

    python -m benchmarks.demo_model.verify --model FILE.gguf [--threads N] [--output FILE.json]

Every prompt is generated text of up to 32 K tokens (``benchmarks.needle_prompt``), and every answer comes from a fresh
``kvs run`` process at temperature 0 on the CPU. The shares of ``evaluate``, which draws many more prompts, are
PyTorch's on the same weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.needle_prompt import make_prompt
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.tokenizer import Tokenizer

LENGTHS = (4096, 8192, 16384, 32704)
DEPTHS = (0.0, 0.5, 1.0)
ANSWER_TOKENS = 8  # a space, five digits, a full stop, the end
KVS = [sys.executable, "-c", "import sys; from kvs_cli.app import main; sys.exit(main())", "run", "--temp", "0"]


def run(arguments: list[str]) -> dict[str, Any]:
    """The JSON of one ``kvs run`` process."""
    done = subprocess.run([*KVS, "--json", *arguments], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def least_arena(arguments: list[str]) -> int:
    """MiB of the smallest arena, as the refusal of a smaller one says."""
    done = subprocess.run([*KVS, *arguments, "--kv-stream-arena-mib", "1"], capture_output=True, text=True, check=False)
    return int(done.stderr.split(" needs ")[1].split(" MiB")[0])


def main() -> int:
    parser = argparse.ArgumentParser(description="Let kvs find facts in long prompts.")
    parser.add_argument("--model", type=Path, required=True, metavar="FILE")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--output", type=Path, metavar="FILE")
    a = parser.parse_args()
    tokenizer = Tokenizer.from_metadata(GgufFile.open(a.model).metadata, source=str(a.model))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.txt"
        for length in LENGTHS:
            for depth in DEPTHS:
                prompt = make_prompt(tokenizer, tokens=length, depth=depth, facts=8, seed=length + int(10 * depth))
                path.write_text(prompt.text, encoding="utf-8")
                common = [
                    "-f", str(path), "-m", str(a.model), "-t", str(a.threads), "-n", str(ANSWER_TOKENS),
                    "-c", str(length + 64), "--kv-page-tokens", "64", "-ub", "256",
                ]  # fmt: skip
                small = str(least_arena(common))
                results = {"smallest": run([*common, "--kv-stream-arena-mib", small])}
                if depth == DEPTHS[0]:
                    results["resident"] = run([*common, "--kv-residency-mode", "resident"])
                for arena, result in results.items():
                    kv = result["kv"]
                    rows.append({
                        "tokens": prompt.tokens, "fact_token": prompt.fact_token, "arena": arena,
                        "arena_mib": kv["arena_bytes"] >> 20, "active_pages": kv["active_pages"],
                        "streamed_pages_per_step": kv["streamed_pages_per_step"], "text": result["text"],
                        "found": result["text"].startswith(prompt.answer + "."),
                    })  # fmt: skip
                    print(json.dumps(rows[-1]), flush=True)
                if len({result["text"] for result in results.values()}) > 1:
                    raise SystemExit("verify: the arena changed the text")
    if a.output:
        a.output.write_text(json.dumps({"model": a.model.name, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    found = sum(bool(row["found"]) for row in rows)
    print(f"{found} of {len(rows)} found")
    return 0 if found == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""How fast are load, prefill and decode of SmolLM2-135M on the CPU, with every page resident and with a small arena?

    python benchmarks/host_speed.py [--model FILE] [--threads N] [--output FILE.json]

Every line of the table is a fresh ``kvs run`` process with K and V in q8_0. First a short text with default settings;
then a long one with pages of 64 tokens and ubatches of 128, where only the arena differs. ``floor``: the float32
weights are read once per token at the measured memory rate.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.commit import commit  # noqa: E402

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROSE = ROOT / "tests" / "data" / "harbour.txt"
N_PARAMS = 134_515_008
COMMON = ["--temp", "0", "--ignore-eos", "-c", "4096", "-ctk", "q8_0", "-ctv", "q8_0"]
SMALL_PAGES = ["--kv-page-tokens", "64", "-ub", "128"]


def run(arguments: list[str]) -> dict[str, object]:
    """The JSON of one ``kvs run`` process."""
    command = [sys.executable, "-c", "import sys; from kvs_cli.app import main; sys.exit(main())", "run", "--json"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def least_arena(arguments: list[str]) -> int:
    """MiB of the smallest arena, as the refusal of a smaller one says."""
    command = [sys.executable, "-c", "import sys; from kvs_cli.app import main; sys.exit(main())", "run"]
    done = subprocess.run([*command, *arguments, "--kv-stream-arena-mib", "1"], capture_output=True, text=True)
    return int(done.stderr.split(" needs ")[1].split(" MiB")[0])


def read_gb_per_s() -> float:
    """Rate of a matrix-vector product that reads 256 MiB: best of five."""
    weights, x = np.ones((65536, 1024), np.float32), np.ones(1024, np.float32)
    best = float("inf")
    for _ in range(5):
        start = perf_counter()
        weights @ x
        best = min(best, perf_counter() - start)
    return weights.nbytes / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    common = ["-m", str(options.model), "-t", str(options.threads), *COMMON]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        short, long = Path(folder) / "short.txt", Path(folder) / "long.txt"
        words = (PROSE.read_text() * 3).split(" ")
        short.write_text(" ".join(words[:100]))
        long.write_text(" ".join(words[:2400]))
        streamed = [str(long), "-n", "32", *common, *SMALL_PAGES]
        for name, arguments in (
            ("default", [str(short), "-n", "128", *common]),
            ("long, resident", [*streamed, "--kv-residency-mode", "resident"]),
            ("long, streamed", [*streamed, "--kv-stream-arena-mib", str(least_arena(streamed))]),
        ):
            result = run(arguments)
            timings, kv = result["timings"], result["kv"]
            assert isinstance(timings, dict)
            assert isinstance(kv, dict)
            rows.append({
                "run": name,
                "arena_mib": kv["arena_bytes"] >> 20,
                "prompt_tokens": result["prompt_tokens"],
                "load_to_first_token_s": timings["first_token_ms"] / 1e3 + timings["load_ms"] / 1e3,
                "prefill_tps": timings["prompt_per_second"],
                "decode_tps": timings["predicted_per_second"],
                "streamed_pages_per_step": kv["streamed_pages_per_step"],
                "active_pages": kv["active_pages"],
                "h2d_mib_per_token": kv["h2d_bytes_per_token"] / 2**20,
            })
    rate = read_gb_per_s()
    floor_tps = rate * 1e9 / (4 * N_PARAMS)
    report = {
        "question": __doc__.splitlines()[0],
        "machine": {"cpu": platform.processor() or platform.machine(), "threads": options.threads},
        "commit": commit(),
        "command": " ".join(["python", "benchmarks/host_speed.py", *sys.argv[1:]]),
        "weight_read_gb_per_s": rate,
        "decode_floor_tps": floor_tps,
        "rows": rows,
    }
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"weights are read at {rate:.1f} GB/s: at most {floor_tps:.1f} tokens/s in float32")
    print("run              MiB  prompt  first token  prefill t/s  decode t/s  of floor  streamed pages  MiB/token")
    for row in rows:
        print(
            f"{row['run']:15} {row['arena_mib']:4} {row['prompt_tokens']:7} {row['load_to_first_token_s']:10.2f} s "
            f"{row['prefill_tps']:12.1f} {row['decode_tps']:11.1f} {row['decode_tps'] / floor_tps:8.0%} "
            f"{row['streamed_pages_per_step']:6} of {row['active_pages']:4} {row['h2d_mib_per_token']:9.2f}"
        )


if __name__ == "__main__":
    main()

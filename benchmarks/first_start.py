"""How long a command takes to its first token on a GPU, with an empty cache of kernels and with a full one.

    python benchmarks/first_start.py [--model qwen3.5-27b:q4_k:mtp] [--output FILE.json]

A synthetic model is written to a folder for temporary files, and read once, so that it comes from memory where memory
holds it: what is measured is kvs, not a disk. Marks: 30 s without compiled kernels; with them, 1.5 s beyond reading the
file once from end to end in one thread; weights arrive at 0.8 of that reading's rate.

Python's bytecode is one of the caches: where PYTHONDONTWRITEBYTECODE is set it is made at every start, for about 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.commit import commit

WARM_RUNS = 3
_KVS = [sys.executable, "-c", "import sys; from kvs_cli.app import main; sys.exit(main())"]
_LOADED = re.compile(r"loading weights: .*, ([0-9.]+) MiB/s")


def first_token_s(model: Path, prompt: Path, cache: Path) -> tuple[float, float]:
    """Seconds until the first byte of text comes, and MiB/s at which weights were loaded."""
    start = time.perf_counter()
    with subprocess.Popen(
        [*_KVS, "run", "-m", str(model), str(prompt), "-n", "16", "--ignore-eos", "-c", "32768", "--device", "cuda"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "KVS_CACHE_DIR": str(cache)},
    ) as run:
        assert run.stdout is not None
        run.stdout.read(1)
        taken = time.perf_counter() - start
        _, said = run.communicate()
    if run.returncode:
        raise SystemExit(f"kvs run failed: {said.decode()}")
    loaded = _LOADED.search(said.decode())
    assert loaded is not None, said
    return taken, float(loaded[1])


def reading_s(model: Path) -> float:
    """Seconds that reading the file takes, once it has been read."""
    piece = bytearray(16 << 20)
    for _ in range(2):
        start = time.perf_counter()
        with model.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass
        taken = time.perf_counter() - start
    return taken


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3.5-27b:q4_k:mtp")
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, prompt, cache = folder / "model.gguf", folder / "prompt.txt", folder / "cache"
        prompt.write_text("The sea")
        subprocess.run([*_KVS, "synthesize", args.model, str(model)], check=True)
        file_bytes, read_s = model.stat().st_size, reading_s(model)
        cold_s, _ = first_token_s(model, prompt, cache)
        warm = [first_token_s(model, prompt, cache) for _ in range(WARM_RUNS)]
    warm_s, loaded = (statistics.median(values) for values in zip(*warm, strict=True))
    read_rate = file_bytes / 2**20 / read_s
    gpu = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    result: dict[str, Any] = {
        "gpu": gpu.stdout.strip(), "commit": args.commit or commit(), "model": args.model, "file_bytes": file_bytes,
        "reading_s": read_s, "first_token_without_kernels_s": cold_s,
        "first_token_s": [taken for taken, _ in warm], "beyond_reading_s": warm_s - read_s,
        "load_mib_per_s": [rate for _, rate in warm], "load_rate_to_reading": loaded / read_rate,
    }
    for what, value, bar, holds in (
        ("first token, kernels to be compiled, s", cold_s, 30.0, cold_s < 30.0),
        ("first token, kernels on disk, beyond reading the file, s", warm_s - read_s, 1.5, warm_s - read_s <= 1.5),
        ("weights: rate of loading / of reading", loaded / read_rate, 0.8, loaded / read_rate >= 0.8),
    ):
        print(f"{what:60} {value:8.2f}  {bar:5.1f}  {'ok' if holds else 'short'}")
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""How near does ``kvs plan`` come to what a sweep measured?

    python benchmarks/plan_check.py SWEEP_FOLDER

Asks ``kvs plan`` about every point of a sweep of MTP lengths, with the sweep's arena, types and pretended acceptance,
on the machine that measured it, whose rates are probed for it. Writes ``plan.csv`` beside the sweep: predicted and
measured tokens per second and milliseconds per round, medians over the repeats, and predicted / measured; of a round,
what the host does while the GPU waits for it, and the rest; and the tokens of a round. A point that ``plan.jsonl`` has
is not asked about again.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvs_core.speculative.synthetic import rates_of_length

COLUMNS = (
    "context", "mtp_length", "plan_tps", "measured_tps", "tps_ratio", "plan_round_ms", "measured_round_ms",
    "round_ratio", "plan_host_ms", "measured_host_ms", "plan_device_ms", "measured_device_ms", "plan_round_tokens",
    "measured_round_tokens", "plan_streamed_mib", "measured_streamed_mib",
)
KVS = [sys.executable, "-c", "import sys; from kvs_cli.app import main; sys.exit(main())"]
DEMO = "demo"   # as a sweep names the model that comes with kvs


def arguments(row: dict[str, str]) -> list[str]:
    """The flags of ``kvs plan`` for a row of a sweep."""
    drafts = _drafts(row)
    model = row["model"] if drafts else row["model"].removesuffix(":mtp")
    device = "cpu" if row["device"].startswith("cpu") else "cuda"
    flags = [] if model == DEMO else ["-m", model]
    flags += ["--device", device, "-c", row["context_capacity"]]
    flags += ["-b", row["batch_size"], "-ub", row["ubatch_size"], "-ctk", row["cache_type_k"]]
    flags += ["-ctv", row["cache_type_v"], "--kv-stream-arena-mib", str(int(float(row["arena_mib"])))]
    if drafts:
        flags += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(drafts)]
        if row["synth_len"]:
            rates = rates_of_length(float(row["synth_len"]), drafts)
            flags += ["--spec-synth-rates", ",".join(f"{rate:.6f}" for rate in rates)]
    return flags


def ask(row: dict[str, str]) -> dict[str, Any]:
    """What ``kvs plan`` says of the end of the context."""
    told = subprocess.run([*KVS, "plan", *arguments(row), "--json"], capture_output=True, text=True, check=False)
    if told.returncode:
        raise SystemExit(told.stderr.strip())
    return line(row, json.loads(told.stdout))


def line(row: dict[str, str], plan: dict[str, Any]) -> dict[str, Any]:
    """A line of ``plan.jsonl``."""
    end = plan["points"][-1]
    return {
        "context": int(row["context_capacity"]), "mtp_length": _drafts(row), "tokens_per_s": end["tokens_per_s"],
        "round_ms": end["round_ms"], "host_ms": end["host_ms"], "streamed_bytes": end["streamed_bytes"],
        "device": plan["device"]["name"],
    }


def compare(rows: list[dict[str, str]], plan: dict[str, Any]) -> dict[str, Any]:
    """A row of ``plan.csv``. On the CPU, and in sweeps of earlier versions, the host's part is not told apart: None."""
    tps, round_ms = (median(float(row[name]) for row in rows) for name in ("decode_tps", "ms_per_step_p50"))
    apart = all(row.get("host_ms") for row in rows)
    plan_host_ms = plan.get("host_ms") if apart else None
    host_ms = median(float(row["host_ms"]) for row in rows) if apart else None
    values = (
        plan["context"], plan["mtp_length"], plan["tokens_per_s"], tps, plan["tokens_per_s"] / tps, plan["round_ms"],
        round_ms, plan["round_ms"] / round_ms,
        plan_host_ms, host_ms,
        None if plan_host_ms is None else plan["round_ms"] - plan_host_ms,
        None if host_ms is None else round_ms - host_ms,
        plan["tokens_per_s"] * plan["round_ms"] / 1e3,
        median(1 + int(row["draft_accepted"]) / int(row["rounds"]) for row in rows),
        plan["streamed_bytes"] / 2**20, median(float(row["streamed_mib_per_pass"]) for row in rows),
    )
    return {
        name: None if value is None else round(value, 4) for name, value in zip(COLUMNS, values, strict=True)
    }


def said(row: dict[str, Any]) -> str:
    """A line for people."""
    text = (f"{row['context']:8,} tokens, mtp {row['mtp_length']}: planned {row['plan_tps']:8.2f}, measured "
            f"{row['measured_tps']:8.2f} tokens/s, ratio {row['tps_ratio']:.3f}; ms per round "
            f"{row['plan_round_ms']:.2f}, {row['measured_round_ms']:.2f}")
    if row["plan_host_ms"] is not None:
        text += f", of it the host's {row['plan_host_ms']:.2f}, {row['measured_host_ms']:.2f}"
    return text + f"; tokens of one {row['plan_round_tokens']:.2f}, {row['measured_round_tokens']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare kvs plan with a sweep.")
    parser.add_argument("folder", type=Path, help="of the sweep")
    folder: Path = parser.parse_args().folder
    groups: dict[tuple[int, int], list[dict[str, str]]] = defaultdict(list)
    with (folder / "sweep.csv").open() as file:
        for row in csv.DictReader(file):
            if not row["error"]:
                groups[int(row["context_capacity"]), _drafts(row)].append(row)
    kept = folder / "plan.jsonl"
    lines = list(map(json.loads, kept.read_text().splitlines())) if kept.exists() else []
    known = {(each["context"], each["mtp_length"]): each for each in lines}
    with kept.open("a") as file:
        for key, rows in groups.items():
            if key not in known:
                known[key] = ask(rows[0])
                file.write(json.dumps(known[key]) + "\n")
    compared = [compare(rows, known[key]) for key, rows in sorted(groups.items())]
    with (folder / "plan.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(compared)
    for each in compared:
        print(said(each))
    print(f"farthest off: {100 * max(abs(each['tps_ratio'] - 1) for each in compared):.1f} %")


def _drafts(row: dict[str, str]) -> int:
    return int(row["draft_n_max"]) if row["spec_type"] != "none" else 0


if __name__ == "__main__":
    main()

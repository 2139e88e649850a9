"""``kvs run``: the text on stdout, everything else on stderr, and JSON that says the same."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvs_cli.render import Screen
from kvs_cli.result import Timings
from kvs_core.formats.gguf import GgufFile
from tests.cli.conftest import GREEDY, Kvs, tokenizer_of
from tests.support.tiny_gguf import write_tiny_gemma3, write_tiny_llama

SCHEMA = {
    "model": {"path", "arch", "name", "n_layer", "n_params"},
    "timings": {"load_ms", "prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms",
                "predicted_per_second", "first_token_ms"},
    "kv": {"mode", "arena_bytes", "page_tokens", "page_bytes", "pool_pages", "resident_pages", "ring_slots",
           "active_pages", "streamed_pages_per_step", "h2d_bytes", "h2d_bytes_by_layer", "d2h_bytes",
           "h2d_calls", "stall_ms", "repartitions", "history_bytes"},
    "weights": {"layers", "streamed_layers", "resident_bytes", "streamed_bytes", "ring_bytes"},
}
KEYS = {"synthetic", "device", "prompt_tokens", "generated_tokens", "token_ids", "text", "stop_reason", "probs",
        "weights_h2d_bytes", *SCHEMA}


def numbers(value: Any) -> list[float]:
    """Every number in a JSON value."""
    if isinstance(value, dict | list):
        return [n for part in (value.values() if isinstance(value, dict) else value) for n in numbers(part)]
    return [value] if isinstance(value, int | float) else []


@pytest.mark.parametrize("prompt", ["hello", "héllo wörld 漢字 🙂", "<|im_start|>user\nhi<|im_end|>\n", "  \n\t x"])
@pytest.mark.parametrize("arch", ["tiny_llama", "tiny_qwen35"])
def test_streamed_text_is_that_of_the_json(
    kvs: Kvs, request: pytest.FixtureRequest, arch: str, prompt: str
) -> None:
    """What is printed piece by piece is ``text``, byte for byte, and ``text`` is what the tokens decode to."""
    path = request.getfixturevalue(arch)
    command = ("run", "-m", path, "-p", prompt, "-n", "40", "--seed", "5")
    streamed, result = kvs(*command), kvs(*command, "--json").json
    assert streamed.code == 0
    assert streamed.out == result["text"]
    assert result["text"] == tokenizer_of(path).decode(result["token_ids"])


def test_json_has_the_promised_keys(kvs: Kvs, tiny_qwen35: Path) -> None:
    """One object on stdout with every key of the schema, finite numbers, and counts that agree with each other."""
    result = kvs("run", "-m", tiny_qwen35, "-p", "hello", "-n", "9", "--json", "--n-probs", "3").json
    assert result.keys() >= KEYS
    for name, keys in SCHEMA.items():
        assert result[name].keys() >= keys
    assert all(math.isfinite(number) for number in numbers(result))
    assert result["model"] == {"path": str(tiny_qwen35), "arch": "qwen35", "name": "tiny qwen35", "n_layer": 8,
                               "n_params": sum(t.n_elements for t in GgufFile.open(tiny_qwen35).tensors.values())}
    assert (result["device"], result["stop_reason"]) == ("cpu", "length")
    timings = result["timings"]
    assert result["generated_tokens"] == len(result["token_ids"]) == timings["predicted_n"] == 9
    assert result["prompt_tokens"] == timings["prompt_n"] == len(tokenizer_of(tiny_qwen35).encode("hello"))
    assert timings["predicted_per_second"] == pytest.approx(8 / timings["predicted_ms"] * 1e3)
    for token, step in zip(result["token_ids"], result["probs"], strict=True):
        assert step["id"] == token
        assert len(step["top"]) == 3
        assert step["logprob"] <= step["top"][0][1] <= 0
        assert [logprob for _, logprob in step["top"]] == sorted((p for _, p in step["top"]), reverse=True)


def test_probs_are_empty_unless_asked_for(kvs: Kvs, tiny_llama: Path) -> None:
    """``probs`` is there all the same; ``--n-probs`` without ``--json`` is named as without effect."""
    assert kvs("run", "-m", tiny_llama, "-p", "x", "-n", "2", "--json").json["probs"] == []
    assert "--n-probs: no effect" in kvs("run", "-m", tiny_llama, "-p", "x", "-n", "2", "--n-probs", "2").err


def test_rates_never_divide_by_nothing() -> None:
    """The first token is free; where no time passed or no token followed, rates are 0."""
    one = Timings.between(1.0, 2.0, 2.5, [2.75], 10)
    assert (one.load_ms, one.prompt_ms, one.prompt_per_second) == (1000, 500, 20)
    assert (one.predicted_n, one.predicted_ms, one.predicted_per_second, one.first_token_ms) == (1, 250, 0, 750)
    assert Timings.between(1.0, 2.0, 2.5, [2.5, 3.5], 10).predicted_per_second == 1
    assert Timings.between(1.0, 1.0, 1.0, [1.0, 1.0], 10).predicted_per_second == 0
    none = Timings.between(1.0, 1.0, 1.0, [], 10)
    assert (none.predicted_n, none.predicted_ms, none.first_token_ms, none.prompt_per_second) == (0, 0, 0, 0)


def test_a_seed_gives_its_text(kvs: Kvs, tiny_llama: Path) -> None:
    """The same seed, the same text; another seed, another text; a drawn seed is named and gives its text again."""
    command = ("run", "-m", tiny_llama, "-p", "once", "-n", "30", "--temp", "0.8")
    first, again, other = (kvs(*command, "--seed", seed) for seed in (1, 1, 2))
    assert first.out == again.out != other.out
    assert "seed" not in first.err
    drawn = kvs(*command)
    match = re.search(r"seed (\d+)", drawn.err)
    assert match
    assert kvs(*command, "--seed", match[1]).out == drawn.out


def test_samplers_by_letters_are_those_by_names(kvs: Kvs, tiny_llama: Path) -> None:
    """``--sampler-seq kt`` runs, and gives the text of ``--samplers top_k;temperature``."""
    command = ("run", "-m", tiny_llama, "-p", "once", "-n", "20", "--seed", "3", "--temp", "3")
    by_letters, by_names = kvs(*command, "--sampler-seq", "kt"), kvs(*command, "--samplers", "top_k;temperature")
    assert by_letters.code == 0
    assert by_letters.out == by_names.out != kvs(*command, "--sampler-seq", "t").out


def test_the_known_command_line_runs(kvs: Kvs, tiny_qwen35: Path) -> None:
    """The command line that users of the C++ original know runs flag for flag; what is capped or idle is said once."""
    line = shlex.split(
        f"--model {tiny_qwen35} --ctx-size 262144 --parallel 1 --batch-size 256 --ubatch-size 256 --n-gpu-layers 999 "
        "--flash-attn on --cache-type-k q8_0 --cache-type-v q4_0 --kv-stream-arena-mib 2240 --spec-type draft-mtp "
        "--spec-draft-n-max 3 --fit off --no-mmproj")
    done = kvs("run", *line, "-p", "hello", "-n", "4")
    assert done.code == 0
    assert done.out
    said = [line for line in done.err.splitlines() if line.startswith("--")]
    assert said == [
        "--ctx-size 262144: the model was trained for 32768 tokens; the context is 32768 "
        "(--override-kv qwen35.context_length=int:N says otherwise)",
    ]
    assert "arena 2240.0 MiB" in done.err


def test_summary_tells_what_happened(kvs: Kvs, tmp_path: Path) -> None:
    """Device, stages, stop reason, rates and KV traffic stand on stderr in plain lines."""
    path = write_tiny_llama(tmp_path / "q8_0.gguf", seed=2, weight_type="q8_0")
    err = kvs("run", "-m", path, "-p", "hello", "-n", "5", "-t", "1").err
    for words in ("device: cpu, 1 thread\n", "loading weights: ", "reading the prompt: ", "stop: length",
                  "text: 5 tokens", "KV: adaptive", "of 4 pages resident", "moved: 0.00 MiB"):
        assert words in err
    assert "\x1b" not in err
    assert "\r" not in err


def test_one_of_a_kind_is_singular(kvs: Kvs, tiny_llama: Path) -> None:
    """One thread, one token of prompt (the BOS) and one of text are told as such."""
    said = kvs("run", "-m", tiny_llama, "-p", "", "-n", 1, "--threads", 1, "--device", "cpu").err
    for words in (", 1 thread\n", "reading the prompt: 1 token in ", "prompt: 1 token, ", "text: 1 token; "):
        assert words in said
    assert re.search(r"(?<![\d.])1 (threads|tokens)", said) is None, said


def test_logging_flags_hold_for_the_summary(kvs: Kvs, tiny_llama: Path) -> None:
    """``--log-disable`` and low verbosity leave the text alone; ``--log-jsonl`` makes every line JSON."""
    command = ("run", "-m", tiny_llama, "-p", "hello", "-n", "3", "--seed", "1")
    plain = kvs(*command)
    for quiet in (("--log-disable",), ("-lv", "0")):
        done = kvs(*command, *quiet)
        assert (done.out, done.err) == (plain.out, "")
    lines = kvs(*command, "--log-jsonl").err.splitlines()
    assert "stop: length; seed" not in plain.err
    assert any(json.loads(line)["message"] == "stop: length" for line in lines)


def test_generation_stops_before_a_stop_string(kvs: Kvs, tiny_llama: Path) -> None:
    """A stop string ends the text, in whatever tokens it comes, and no part of it is printed."""
    command = ("run", "-m", tiny_llama, "-p", "hello", "-n", "40", *GREEDY)
    whole = kvs(*command).out
    at = next(at for at in range(8, len(whole)) if "\\" not in whole[at : at + 3] and whole[at : at + 3].isascii())
    stop = whole[at : at + 3]
    assert kvs(*command, "-r", stop).out == whole[: whole.index(stop)]
    result = kvs(*command, "-r", "never there", "-r", stop, "--json").json
    assert (result["text"], result["stop_reason"]) == (whole[: whole.index(stop)], "stop")
    assert result["generated_tokens"] < 40


def test_a_beginning_of_a_stop_string_is_not_lost(kvs: Kvs, tiny_llama: Path) -> None:
    """Text held back because a stop string might begin there is printed when the text ends otherwise."""
    command = ("run", "-m", tiny_llama, "-p", "hello", "-n", "12", *GREEDY)
    whole = kvs(*command).out
    assert kvs(*command, "-r", whole[-2:] + "and more").out == whole


def test_end_of_text(kvs: Kvs, tiny_qwen35: Path) -> None:
    """An end token ends the text without being printed; ``--special`` prints it, ``--ignore-eos`` bans it."""
    end = tokenizer_of(tiny_qwen35).eos_id
    command = ("run", "-m", tiny_qwen35, "-p", "hello", "-n", "6", "-l", f"{end}+1000", *GREEDY)
    result = kvs(*command, "--json").json
    assert (result["stop_reason"], result["token_ids"], result["text"]) == ("eos", [end], "")
    assert kvs(*command, "--special").out == "<|im_end|>"
    result = kvs(*command, "--ignore-eos", "--json").json
    assert (result["stop_reason"], result["generated_tokens"]) == ("length", 6)
    assert end not in result["token_ids"]


@pytest.mark.parametrize(("asked", "made"), [("0", 0), ("1", 1), ("3", 3)])
def test_length(kvs: Kvs, tiny_llama: Path, asked: str, made: int) -> None:
    """``-n`` bounds the tokens, 0 too: then the prompt is read and nothing is printed."""
    command = ("run", "-m", tiny_llama, "-p", "hello", "-n", asked, "--ignore-eos", "--n-probs", "2")
    result = kvs(*command, "--json").json
    assert (result["generated_tokens"], result["stop_reason"]) == (made, "length")
    assert (len(result["token_ids"]), len(result["probs"])) == (made, made)
    assert result["prompt_tokens"] > 0
    assert bool(kvs(*command).out) == bool(made)


def test_the_context_ends_the_text(kvs: Kvs, tiny_llama: Path) -> None:
    """Without a limit, prompt and text together fill the context exactly."""
    result = kvs("run", "-m", tiny_llama, "-p", "hello", "-c", "256", "--ignore-eos", "--json").json
    assert result["stop_reason"] == "context"
    assert result["prompt_tokens"] + result["generated_tokens"] == 256


def test_an_arena_too_small_is_refused_before_loading(kvs: Kvs, tiny_llama: Path) -> None:
    """The MiB that would do are named, they do, and no weights are read before."""
    command = ("run", "-m", tiny_llama, "-p", "hello", "-n", "2", "-c", "8192", "-ub", "512")
    done = kvs(*command, "--kv-stream-arena-mib", "1")
    match = re.match(r"arena too small: prefill needs (\d+) MiB, --kv-stream-arena-mib is 1; ", done.error)
    assert match
    assert "loading" not in done.err
    assert kvs(*command, "--kv-stream-arena-mib", match[1]).code == 0
    assert "arena too small" in kvs(*command, "--kv-stream-arena-mib", int(match[1]) - 1).error


def test_numbers_do_not_depend_on_the_arena(kvs: Kvs, tiny_qwen35: Path) -> None:
    """A streamed run reports the same log-probabilities as a resident one, to the last bit."""
    prompt = "the quick brown fox jumps over the lazy dog. " * 60
    command = ("run", "-m", tiny_qwen35, "-p", prompt, "-n", "12", "-c", "4096", "--kv-page-tokens", "32", "-ub", "128",
               "-ctk", "q8_0", "-ctv", "q4_0", "--n-probs", "5", "--json", *GREEDY)
    resident = kvs(*command, "--kv-residency-mode", "resident").json
    streamed = kvs(*command, "--kv-stream-arena-mib", "1").json
    assert streamed["probs"] == resident["probs"]
    assert streamed["text"] == resident["text"]
    assert resident["kv"]["h2d_bytes"] == 0
    kv = streamed["kv"]
    assert kv["h2d_bytes"] > 0
    assert kv["streamed_pages_per_step"] + kv["resident_pages"] == kv["active_pages"]
    assert kv["h2d_bytes_per_token"] == pytest.approx(kv["streamed_pages_per_step"] * kv["page_bytes"], rel=0.2)


def test_only_layers_that_see_everything_move_bytes(kvs: Kvs, tmp_path: Path) -> None:
    """By the model's numbers of layers: in a model with sliding windows those without, in any other all of them."""
    prompt = "the quick brown fox jumps over the lazy dog. " * 120
    command = ("-p", prompt, "-n", "8", "-c", "8192", "--kv-page-tokens", "32", "-ub", "64", "-ctk", "q8_0", "-ctv",
               "q4_0", "--kv-stream-arena-mib", "1", "--json", *GREEDY)
    sliding = write_tiny_gemma3(tmp_path / "gemma3.gguf", seed=1, pattern=[True, False, True, False])
    kv = kvs("run", "-m", sliding, *command).json["kv"]
    moved = kv["h2d_bytes_by_layer"]
    assert [number for number, size in moved.items() if size] == ["1", "3"]
    assert list(moved) == ["0", "1", "2", "3"]
    assert sum(moved.values()) == kv["h2d_bytes"]
    dense = write_tiny_llama(tmp_path / "llama.gguf", seed=1)
    kv = kvs("run", "-m", dense, *command).json["kv"]
    assert all(kv["h2d_bytes_by_layer"].values())
    assert sum(kv["h2d_bytes_by_layer"].values()) == kv["h2d_bytes"]


def test_bars_come_and_go() -> None:
    """On a terminal a stage is a bar with what is done and all there is, and nothing of it stays."""
    terminal = io.StringIO()
    screen = Screen(Console(file=terminal, force_terminal=True, width=100))
    with screen.stage("loading weights", "bytes") as progress:
        progress(1 << 20, 4 << 20)
        progress(4 << 20, 4 << 20)
    drawn = terminal.getvalue()
    assert "loading weights" in drawn
    assert "4.0 MiB of 4.0 MiB" in drawn
    assert drawn.endswith("\x1b[2K")  # the line is cleared


COMMAND = (sys.executable, "-c", "import sys; from kvs_cli.app import main; sys.exit(main())", "run")


def start(path: Path, *flags: str) -> subprocess.Popen[bytes]:
    line = [*COMMAND, "-m", str(path), "-p", "hello", "--ignore-eos", "-c", "32768", *flags]
    root = Path(__file__).parents[2]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)   # a background job ignores it, and hands that on
    try:
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root, env=os.environ.copy())
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_the_text_and_keeps_it(tiny_llama: Path) -> None:
    """Ctrl-C while text comes: exit code 130, what was printed stays, and the summary follows."""
    with start(tiny_llama) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert first
    assert b"stop: interrupted" in err
    assert b"KV: adaptive" in err
    assert b"Traceback" not in err


def test_an_interrupted_run_still_prints_its_json(tiny_llama: Path) -> None:
    """With ``--json`` the object comes all the same, and says that it was interrupted."""
    with start(tiny_llama, "--json") as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith(b"reading the prompt"):
            assert process.poll() is None
        time.sleep(0.5)  # into the text, which would take a minute to fill the context
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    result = json.loads(out)
    assert result["stop_reason"] == "interrupted"
    assert result["generated_tokens"] == len(result["token_ids"]) == result["timings"]["predicted_n"]


def test_a_reader_that_leaves_ends_the_run(tiny_llama: Path) -> None:
    """``kvs run ... | head -c 1`` ends with code 1 and not a word about pipes."""
    with start(tiny_llama) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
        assert process.wait(timeout=20) == 1
    assert b"Traceback" not in err
    assert b"pipe" not in err.lower()


def test_a_full_disk_is_one_line(kvs: Kvs, tiny_llama: Path) -> None:
    """Output that cannot be written ends the run with its reason."""
    if not Path("/dev/full").exists():
        pytest.skip("the system has no /dev/full")
    with Path("/dev/full").open("wb") as full:
        line = [*COMMAND, "-m", str(tiny_llama), "-p", "hello", "-n", "3"]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2], timeout=30)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == b"error: the output cannot be written: No space left on device"


def test_a_real_model_knows_what_it_was_taught(kvs: Kvs, smollm2_path: Path) -> None:
    """SmolLM2 continues a plain fact greedily, and answers in its chat format, where an end token ends the answer."""
    fact = kvs("run", "-m", smollm2_path, "-p", "The capital of France is", "-n", "4", *GREEDY)
    assert fact.out.startswith(" Paris")
    answer = kvs("run", "-m", smollm2_path, "--chat", "-sys", "Answer with one word.", "-p", "What is 2 + 2?", "-n",
                 "40", "-c", "1024", "--json", *GREEDY).json
    assert answer["stop_reason"] == "eos"
    assert "4" in answer["text"]
    assert "<|" not in answer["text"]



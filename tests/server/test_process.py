"""``kvs serve`` as a process: what it prints, how signals end it, and how it fails."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import Kvs, kvs
from tests.support.tiny_gguf import write_tiny_qwen35

__all__ = ["kvs"]


def start(*argv: object) -> subprocess.Popen[str]:
    """A server in a process of its own."""
    line = [sys.executable, "-c", "import sys; from kvs_cli.app import main; sys.exit(main())", "serve", "--port", "0",
            "--device", "cpu"]  # fmt: skip
    return subprocess.Popen([*line, *map(str, argv)], stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(llama_path: Path, number: signal.Signals) -> None:
    """While a text streams: the stream ends with an error event, the exit code is 0, and no traceback is printed."""
    with start("-m", llama_path, "-c", 1024) as process:
        assert process.stderr is not None
        lines: list[str] = []
        loaded = threading.Event()

        def read() -> None:
            assert process.stderr is not None
            for line in process.stderr:
                lines.append(line)
                if "loaded" in line:
                    loaded.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert loaded.wait(30), lines
        url = next(word for word in " ".join(lines).split() if word.startswith("http://"))
        asked = {"prompt": "x", "n_predict": 1000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/completion", json=asked, trust_env=False, timeout=30) as reply:
            events = reply.iter_lines()
            next(events)
            process.send_signal(number)
            last = [line for line in events if line][-1]
        assert '"error"' in last
        assert process.wait(30) == 0
        reader.join()
    assert "Traceback" not in "".join(lines)


def test_what_keeps_it_from_serving(kvs: Kvs, llama_path: Path, tmp_path: Path) -> None:
    """One line and exit code 1: a taken port, a model that is none, a file of keys that is not there, a template that
    does not parse, more than one slot, a context shift of a model that cannot forget."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "give another port" in kvs("serve", "-m", llama_path, "--port", port).error
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    latin = tmp_path / "latin"
    latin.write_bytes(b"\xe9")
    assert "broken.gguf" in kvs("serve", "-m", broken, "--port", 0).error
    assert "--api-key-file" in kvs("serve", "-m", llama_path, "--port", 0, "--api-key-file", tmp_path / "none").error
    assert "--chat-template" in kvs("serve", "-m", llama_path, "--port", 0, "--chat-template", "{% if %}").error
    for flag in ("--chat-template-file", "--grammar-file", "--json-schema-file"):   # before the port and the model
        for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory"), (latin, "is not UTF-8")):
            told = kvs("serve", "-m", broken, "--port", 0, flag, path)
            assert f"{flag} {path}: " in told.error
            assert why in told.error
            assert "listening" not in told.err
    assert "one slot" in kvs("serve", "-m", llama_path, "--parallel", 4).error
    recurrent = write_tiny_qwen35(tmp_path / "qwen35.gguf", seed=1)
    assert "cannot forget" in kvs("serve", "-m", recurrent, "--port", 0, "--context-shift").error
    assert "flags alone" in kvs("serve", llama_path).error
    assert "--host" in kvs("serve", "-m", llama_path, "--host", "192.0.2.1").error

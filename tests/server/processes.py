"""Servers in processes of their own, whose memory and files can be looked at from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.server.running import WAIT_S, Running

_SERVE = "import sys; from kvs_cli.app import main; sys.exit(main())"


@dataclass(frozen=True)
class Spawned(Running):
    """A server that is up, its process, and the file that holds what it wrote on stderr."""

    pid: int
    log_path: Path

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self.log_path.read_text()

    @property
    def resident_bytes(self) -> int:
        """Its memory in RAM."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def open_files(self) -> int:
        """Files, sockets and pipes that it holds."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def threads(self) -> int:
        """Threads that it runs."""
        return len(os.listdir(f"/proc/{self.pid}/task"))


@contextmanager
def spawned(folder: Path, *argv: object, headers: dict[str, str] | None = None) -> Iterator[Spawned]:
    """``kvs serve`` with these flags, on the CPU and a free port, its model loaded; it has to end in order."""
    log_path = folder / "serve.log"
    line = [sys.executable, "-c", _SERVE, "serve", "--port", "0", "--device", "cpu", *map(str, argv)]
    with log_path.open("w") as log:
        # One arena: what many threads freed goes back to all of them, so that memory tells of leaks alone.
        process = subprocess.Popen(
            line, stdout=subprocess.DEVNULL, stderr=log, env=os.environ | {"MALLOC_ARENA_MAX": "1"}
        )
    try:
        end = time.monotonic() + WAIT_S
        while "the model is loaded" not in log_path.read_text():
            assert process.poll() is None, log_path.read_text()
            assert time.monotonic() < end, "the server does not get ready"
            time.sleep(0.01)
        url = next(word for word in log_path.read_text().split() if word.startswith("http://"))
        with httpx.Client(base_url=url, timeout=WAIT_S, headers=headers, trust_env=False) as http:
            yield Spawned(url, http, process.pid, log_path)
        process.terminate()
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()

"""A worker process per job: started, asked, and never left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

Job: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]
RunJob: TypeAlias = Callable[[Job, Path], Answer]
"""A job and the file that its log is added to; the answer, see ``worker``."""

_MODULE = "kvs_cli.bench.worker"
_END_S = 10


def run_job(job: Job, log: Path) -> Answer:
    """Run a worker and wait for it. A process that ends without an answer is an answer with an ``error``.

    In a session of its own, so that Ctrl-C reaches the caller alone; whatever ends the wait ends the worker.
    """
    with log.open("ab") as lines:
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=lines,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with suppress(BrokenPipeError):   # it has ended already: its exit code tells
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        text = process.stdout.read()
        code = process.wait()
    except BaseException:
        process.kill()
        raise
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()   # the worker's sign to end
        process.stdout.close()
        process.wait(_END_S)
    try:
        answer = json.loads(text)
    except ValueError:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        hint = ", as the system does where memory runs out" if code == -9 else ""
        return {"error": f"the engine's process {how}{hint}; its log says more"}
    assert isinstance(answer, dict)
    return answer

"""The commit that a result names."""

from __future__ import annotations

import subprocess
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """Of the code that runs; empty where git does not know it, as in a copy without a repository: give it by hand."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=_ROOT, capture_output=True, text=True)
    except OSError:   # no git
        return ""
    return done.stdout.strip()

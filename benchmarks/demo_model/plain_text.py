"""Plain text out of the forms in which the training text is published.

Each function takes the bytes of a file and gives text: a paragraph is one line, a blank line stands between two,
preformatted blocks stay as they are.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser

_BLOCKS = frozenset((
    "p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "dl", "dt", "dd", "table", "tr", "blockquote",
    "section", "article", "center",
))  # fmt: skip
_SILENT = frozenset(("script", "style", "head", "nav", "footer", "svg", "button"))
_LINK_MARKS = ("headerlink", "id_link")
_R_VECTOR = re.compile(rb"\x00\x00\x00\x10(.{4})(?=\x00[\x00\x04][\x00\x80]\x09)", re.DOTALL)


class _Page(HTMLParser):
    """The text of one page in ``parts``."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._silent: list[str] = []
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SILENT or (tag == "a" and dict(attrs).get("class") in _LINK_MARKS):
            self._silent.append(tag)
        elif tag == "pre":
            self._pre += 1
            self.parts.append("\n\n")
        elif tag == "br":
            self.parts.append("\n")
        elif tag == "li":
            self.parts.append("\n\n- ")
        elif tag in _BLOCKS:
            self.parts.append("\n\n")
        elif tag in ("td", "th"):
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if self._silent and self._silent[-1] == tag:
            self._silent.pop()
        elif tag == "pre":
            self._pre = max(0, self._pre - 1)
            self.parts.append("\n\n")
        elif tag in _BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.parts.append(data if self._pre else re.sub(r"\s+", " ", data))


def html(data: bytes, *, start: str, stop: str | None = None) -> str:
    """The text of an HTML page from the tag that matches the pattern ``start`` up to the pattern ``stop``.

    Without a match of ``start`` there is no text.
    """
    source = data.decode("utf-8", errors="replace")
    found = re.search(start, source)
    if found is None:
        return ""
    end = re.compile(stop).search(source, found.end()) if stop else None
    page = _Page()
    page.feed(source[found.start() : end.start() if end else len(source)])
    page.close()
    return tidy("".join(page.parts))


def tidy(text: str) -> str:
    """No carriage returns, trailing spaces, spaces before a paragraph's first word, or runs of blank lines."""
    text = text.replace("\r\n", "\n").replace("\u00a0", " ").replace("\u00b6", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{2,} (?=\S)", "\n\n", text)
    text = re.sub(r"(?m)^- *\n+ *(?=[^\n-])", "- ", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def unwrapped(text: str) -> str:
    """Text with hard line ends, one line per paragraph. Blocks that are indented deeper than the rest stay as they are.

    A line is taken to be wrapped if it is longer than 40 characters, or the last of such a paragraph.
    """
    paragraphs = []
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        lines = [line.rstrip() for line in block.split("\n") if line.strip()]
        if lines and all(len(line) > 40 for line in lines[:-1]) and "  " not in block.strip().replace("\n   ", "\n"):
            paragraphs.append(" ".join(line.strip() for line in lines))
        else:
            paragraphs.append("\n".join(lines))
    return tidy("\n\n".join(paragraphs))


def r_strings(database: bytes) -> Iterator[str]:
    """Each character vector of an R lazy-load database (``.rdb``), its strings joined by line ends.

    The file is a row of entries: a 4-byte length, big-endian, and a zlib stream of R's XDR serialisation, in which a
    string is 4 bytes of flags, 4 bytes of length (-1 for NA) and its bytes. Raises ValueError for another kind of file.
    """
    at = 0
    while at < len(database):
        stream = zlib.decompressobj()
        try:
            entry = stream.decompress(database[at + 4 :])
        except zlib.error as error:
            raise ValueError(f"no R database: {error}") from None
        at = len(database) - len(stream.unused_data)
        vector = _R_VECTOR.search(entry)
        if vector:
            yield "\n".join(_r_vector(entry, vector.end(), struct.unpack(">i", vector[1])[0]))


def _r_vector(entry: bytes, at: int, count: int) -> Iterator[str]:
    for _ in range(count):
        _flags, size = struct.unpack_from(">ii", entry, at)
        at += 8
        yield entry[at : at + max(0, size)].decode("utf-8", errors="replace")
        at += max(0, size)


def sword_books(index: bytes, blocks: bytes) -> Iterator[str]:
    """The books of one testament of a SWORD ``zText`` module with a block per book and OSIS markup.

    index   the ``.bzs`` file: offset, size and unpacked size of each block, 32-bit little-endian
    blocks  the ``.bzz`` file: zlib streams
    """
    for offset, size, _unpacked in struct.iter_unpack("<III", index):
        if size:
            osis = zlib.decompress(blocks[offset : offset + size]).decode("utf-8", errors="replace")
            yield _osis_text(osis)


def _osis_text(osis: str) -> str:
    osis = re.sub(r"<note\b.*?</note>", " ", osis, flags=re.DOTALL)
    osis = re.sub(r"<div [^>]*eID=[^>]*type=\"x-p\"/>|<title\b[^>]*>|</title>|<chapter [^>]*>|<lb [^>]*>|</l>",
                  "\n\n", osis)  # fmt: skip
    text = re.sub(r"<[^>]*>", "", osis)
    for entity, sign in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        text = text.replace(entity, sign)
    return tidy(re.sub(r" *\n\s*", "\n\n", re.sub(r"[ \t]+", " ", text)))

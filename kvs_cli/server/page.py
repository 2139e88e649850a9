"""The page at /: static files of the package, read once, with what browsers need to keep them and to distrust the rest.

    /            index.html          /web/NAME    what it names: modules, styles, the icon
    prefix       to prefix/, so that the relative addresses in the page hold
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import Scope

_FOLDER = Path(__file__).with_name("web")
_TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}  # fmt: skip
_HEADERS = {
    # Nothing from elsewhere, nothing inline, and no other page may frame it: it shows text that a model wrote.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
                               "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",   # kept, but asked about: a new version of kvs is seen at once
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _File:
    """One file as it is sent. ``etag``: of its bytes."""

    data: bytes
    media_type: str
    etag: str

    @staticmethod
    def read(path: Path) -> _File:
        data = path.read_bytes()
        return _File(data, _TYPES[path.suffix], f'"{hashlib.sha256(data).hexdigest()[:32]}"')


class Page:
    """The files by their paths, under the server's ``prefix``."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._files = {f"{prefix}/web/{path.name}": _File.read(path) for path in sorted(_FOLDER.iterdir())
                       if path.suffix in _TYPES}
        self._files[f"{prefix}/"] = self._files.pop(f"{prefix}/web/index.html")

    def find(self, scope: Scope) -> Response | None:
        """The reply to a GET or HEAD for one of the files; None for all other requests."""
        if scope["method"] not in ("GET", "HEAD"):
            return None
        if self._prefix and scope["path"] == self._prefix:
            return RedirectResponse(f"{self._prefix}/")
        file = self._files.get(scope["path"])
        if file is None:
            return None
        headers = _HEADERS | {"ETag": file.etag}
        known = [each.strip().removeprefix("W/") for each in Headers(scope=scope).get("if-none-match", "").split(",")]
        if file.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(file.data, headers=headers, media_type=file.media_type)

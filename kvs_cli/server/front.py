"""What every request passes first, in this order: CORS, preflight, the page, a model that still loads, the key. And
what every error becomes last: a JSON object with its status, if nothing was sent yet."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvs_cli.server.errors import ApiError, ClientGone, api_error
from kvs_cli.server.http import JsonReply
from kvs_cli.server.page import Page
from kvs_core.errors import KvsError, SettingsError
from kvs_core.settings import AccessSettings

LOGGER = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]

_LOCAL = ("localhost", "127.0.0.1", "::1")
_OPEN = ("/health", "/v1/health", "/")


class Front:
    """The ASGI application. ``find`` gives the endpoint of a method and a path, or raises ApiError 404."""

    def __init__(
        self, find: Callable[[str, str], Endpoint], access: AccessSettings, keys: Sequence[str], *, prefix: str,
        is_ready: Callable[[], bool], page: Page | None = None,
    ) -> None:
        """``page``: answers before a model or a key is there."""
        self._find = find
        self._access = access
        self._keys = [key.encode() for key in keys]
        self._prefix = prefix
        self._is_ready = is_ready
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        headers = self._headers(Headers(scope=scope).get("origin"))
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        try:
            response = await self._answer(scope, receive)
            await response(scope, receive, send_with_headers)
        except (ClientGone, ClientDisconnect):
            LOGGER.debug("%s %s: the client left", scope["method"], scope["path"])
        except Exception as error:
            known = isinstance(error, ApiError | KvsError)
            if not known:
                LOGGER.error("%s %s: internal error: %r", scope["method"], scope["path"], error,
                             exc_info=LOGGER.isEnabledFor(logging.DEBUG))
            if not started:
                failed = api_error(error)
                await JsonReply(failed.body(), failed.code)(scope, receive, send_with_headers)
            elif not known:
                raise

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        path = scope["path"]
        if scope["method"] == "OPTIONS":
            return Response(headers=self._preflight())
        if self._page is not None and (shown := self._page.find(scope)) is not None:
            return shown
        if not self._is_ready():
            raise ApiError("unavailable_error", "Loading model")
        if not path.startswith(self._prefix):
            raise not_found()
        path = path[len(self._prefix) :]
        if self._keys and path not in _OPEN and not self._has_key(Headers(scope=scope)):
            raise ApiError("authentication_error", "Invalid API Key")
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        return await self._find(method, path)(Request(scope, receive))

    def _has_key(self, headers: Headers) -> bool:
        """Whether a key comes with the request. All are compared, so that time tells nothing."""
        bearer = headers.get("authorization", "").removeprefix("Bearer ").strip()
        given = [text.encode() for text in (bearer, headers.get("x-api-key", ""))]
        matches = [hmac.compare_digest(key, each) for key in self._keys for each in given]
        return any(matches)

    def _headers(self, origin: str | None) -> list[tuple[bytes, bytes]]:
        """Of every reply."""
        allowed, credentials = self._access.cors_origins, self._access.cors_credentials
        text = ", ".join(allowed)
        if allowed == ("*",):
            text = origin or "" if credentials else "*"
        elif allowed == ("localhost",):
            text = origin if origin and _is_local(origin) else ""
        elif origin in allowed:
            text = origin
        headers = [(b"server", b"kvs")]
        if text or origin is None:
            headers.append((b"access-control-allow-origin", text.encode("latin-1", "replace")))
        if allowed != ("*",) or credentials:
            headers.append((b"vary", b"Origin"))
        return headers

    def _preflight(self) -> dict[str, str]:
        access = self._access
        return {
            "Access-Control-Allow-Credentials": "true" if access.cors_credentials else "false",
            "Access-Control-Allow-Methods": ", ".join(access.cors_methods),
            "Access-Control-Allow-Headers": ", ".join(access.cors_headers),
        }


def not_found() -> ApiError:
    """For a path, or a method on it, that is none of the server's."""
    return ApiError("not_found_error", "File Not Found")


def read_keys(access: AccessSettings) -> tuple[str, ...]:
    """All keys: those of flags, and of the file's lines that are neither empty nor comments. Raises SettingsError."""
    keys = list(access.keys)
    if access.key_file is not None:
        keys += _file_keys(access.key_file)
        if not keys:
            raise SettingsError(f"--api-key-file {access.key_file}: holds no key; put one on a line of its own")
    return tuple(keys)


def _file_keys(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is no text in UTF-8"
        raise SettingsError(f"--api-key-file {path}: {why}; give a readable file with a key on each line") from None
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _is_local(origin: str) -> bool:
    try:
        return urlsplit(origin).hostname in _LOCAL
    except ValueError:
        return False

"""Sockets, the event loop and signals: the server from its first breath, before the model is there, to its last.

    bind ─ 503 "Loading model" ─ ready ─ serving ─ SIGINT or SIGTERM ─ jobs cancelled, replies sent ─ done
                └ loading fails ─> the error is raised                └ a second signal ends the process at once
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from kvs_core.errors import SettingsError
from kvs_core.settings import ListenSettings

LOGGER = logging.getLogger(__name__)

_BACKLOG = 512
_LAST_REPLIES_S = 5   # at the end, for clients that take their time


class _Server(uvicorn.Server):
    """uvicorn without its handling of signals, which ends the process by the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by ``Listener``."""
        yield


class Listener:
    """Listens at birth. ``serve`` runs until ``stop`` or a signal."""

    def __init__(self, settings: ListenSettings) -> None:
        """Raises SettingsError for addresses that cannot be had, or TLS files that cannot be used."""
        self._settings = settings
        self._paths: list[Path] = []
        if settings.ssl_cert is not None:
            _check_tls(settings)
        self._sockets = self._bind()
        self._server: _Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_stop: Callable[[], None] = lambda: None

    @property
    def urls(self) -> list[str]:
        """Where it listens."""
        scheme = "http" if self._settings.ssl_cert is None else "https"
        return [_url(scheme, each) for each in self._sockets]

    async def serve(self, app: ASGIApp, on_start: Callable[[], None], on_stop: Callable[[], None]) -> None:
        """Answer requests by ``app``. ``on_start`` is called once the port is open, ``on_stop`` when the end begins."""
        key, cert = self._settings.ssl_key, self._settings.ssl_cert
        config = uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
            timeout_keep_alive=5, timeout_graceful_shutdown=_LAST_REPLIES_S, backlog=_BACKLOG,
            ssl_keyfile=None if key is None else str(key), ssl_certfile=None if cert is None else str(cert),
        )
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)   # it has nothing to say that a reply does not
        self._server, self._loop, self._on_stop = _Server(config), asyncio.get_running_loop(), on_stop
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, self._signalled)
        for url in self.urls:
            LOGGER.info("listening on %s", url)
        on_start()
        try:
            await self._server.serve(self._sockets)
        finally:
            for path in self._paths:
                with contextlib.suppress(OSError):
                    path.unlink()

    def stop(self) -> None:
        """From any thread: end."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):   # closed: it has ended
                loop.call_soon_threadsafe(self._end)

    def _signalled(self) -> None:
        if self._server is not None and self._server.should_exit:
            os._exit(1)
        LOGGER.info("shutting down; once more to end at once")
        self._end()

    def _end(self) -> None:
        if self._server is not None and not self._server.should_exit:
            self._server.should_exit = True
            self._on_stop()

    def _bind(self) -> list[socket.socket]:
        sockets: list[socket.socket] = []
        port = self._settings.port
        try:
            for host in self._settings.hosts:
                if host.endswith(".sock"):
                    sockets.append(self._bind_path(host))
                    continue
                sockets.append(_bind_port(host, port, self._settings.reuse_port))
                port = port or sockets[-1].getsockname()[1]   # one port for all hosts
        except BaseException:
            for each in sockets:
                each.close()
            raise
        return sockets

    def _bind_path(self, host: str) -> socket.socket:
        path = Path(host)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if path.is_socket():
                with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
                    bound.connect(host)
                    raise SettingsError(f"--host {host}: another server listens there; stop it or give another path")
                path.unlink(missing_ok=True)   # left behind by a server that is gone
                bound.close()
                bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            bound.bind(host)
            bound.listen(_BACKLOG)
        except OSError as error:
            bound.close()
            raise SettingsError(f"--host {host}: {error.strerror or error}; give a path in a folder of yours") from None
        except BaseException:
            bound.close()
            raise
        self._paths.append(path)
        return bound


def _bind_port(host: str, port: int, reuse_port: bool) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"--host {host}: {error}; give an address of this machine, such as 127.0.0.1") from None
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)   # from here on clients are not refused, only answered later
    except OSError as error:
        bound.close()
        raise SettingsError(
            f"--host {host} --port {port}: {error.strerror or error}; give another port, or 0 for any free one"
        ) from None
    return bound


def _url(scheme: str, bound: socket.socket) -> str:
    if bound.family == socket.AF_UNIX:
        return f"unix://{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _check_tls(settings: ListenSettings) -> None:
    assert settings.ssl_cert is not None
    assert settings.ssl_key is not None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_cert, settings.ssl_key, password="")
    except (OSError, ValueError) as error:   # ssl.SSLError is an OSError
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SettingsError(
            f"--ssl-cert-file {settings.ssl_cert}, --ssl-key-file {settings.ssl_key}: {why}; give a certificate and "
            "its key without a password, as PEM files"
        ) from None

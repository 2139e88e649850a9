"""What a request may be refused with, as llama-server words it: ``{"error": {"code", "message", "type", ...}}``."""

from __future__ import annotations

from typing import Any

from kvs_core.errors import ContextError, KvsError, SessionFileError, SettingsError

_CODES = {
    "invalid_request_error": 400,
    "exceed_context_size_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "server_error": 500,
    "not_supported_error": 501,
    "unavailable_error": 503,
}


class ApiError(Exception):
    """One error object and its status. ``extra``: further fields of the object."""

    def __init__(self, kind: str, message: str, *, code: int | None = None, **extra: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.code = _CODES[kind] if code is None else code
        self.message = message
        self.extra = extra

    def body(self) -> dict[str, Any]:
        """The reply."""
        return {"error": {"code": self.code, "message": self.message, "type": self.kind, **self.extra}}


class ClientGone(Exception):
    """Nobody waits for the reply any more."""


def bad_request(message: str) -> ApiError:
    """What the client has to change."""
    return ApiError("invalid_request_error", message)


def api_error(error: BaseException) -> ApiError:
    """``error`` as a reply: the client's faults are 400, the model's and the device's 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextError):
        return ApiError(
            "exceed_context_size_error",
            f"request ({error.prompt_tokens} tokens) exceeds the available context size ({error.context_tokens} "
            "tokens), try increasing it",
            n_prompt_tokens=error.prompt_tokens, n_ctx=error.context_tokens, reason="context_length_exceeded",
        )
    if isinstance(error, SettingsError):
        return bad_request(str(error))
    if isinstance(error, SessionFileError):
        return bad_request(f"Unable to save or restore slot: {error}")
    if isinstance(error, MemoryError):
        return ApiError("server_error", "out of memory; send a shorter request, or start kvs with a smaller --ctx-size")
    if isinstance(error, KvsError):
        return ApiError("server_error", str(error))
    return ApiError("server_error", f"internal error: {type(error).__name__}")

"""Every error that a user may see. Each is one line: what is wrong, with its numbers, and what to do.

    KvsError
    ├── SettingsError      a flag, variable or YAML entry that is unknown, malformed or cannot be honoured
    ├── ModelFileError     not GGUF, truncated, a missing tensor, a wrong shape, an unknown arch or quant
    │   └── TokenizerError a vocabulary or chat template that cannot be used
    ├── CapabilityError    a sound request that this device or this version has no code for
    ├── BudgetError        an arena or a pool too small for what was asked; carries needed and given MiB
    ├── ContextError       more tokens than the context holds; carries both numbers
    ├── SessionFileError   a saved session that cannot be written, is damaged, or is of another model or layout
    └── DeviceError        the device, its memory or its copies failed; the host history is still valid
        └── DeviceMemoryError  memory that cannot be had; what it was for has not begun

Broken invariants of our own are ``AssertionError``: they are bugs, not situations.
"""

from __future__ import annotations

LESS_MEMORY = "lower --ctx-size or --kv-stream-arena-mib, take a smaller --model, or end other programs"
"""What to do where there is no memory."""


class KvsError(Exception):
    """Base of all errors meant for the user: ``str(error)`` is the one line to print."""


class SettingsError(KvsError):
    """A setting that cannot be used. The message names the setting as the user wrote it."""


class ModelFileError(KvsError):
    """A model file that cannot be used. The message names the file and the part of it."""


class TokenizerError(ModelFileError):
    """A vocabulary, tokenizer model or chat template that cannot be used."""


class CapabilityError(KvsError):
    """A sound request for which there is no code here; the message says what works instead."""


class BudgetError(KvsError):
    """Memory given is less than memory needed. Both are attributes, in MiB."""

    def __init__(self, message: str, *, needed_mib: int, given_mib: int) -> None:
        super().__init__(message)
        self.needed_mib = needed_mib
        self.given_mib = given_mib


class ContextError(KvsError):
    """More tokens than the context holds. Both are attributes, in tokens."""

    def __init__(self, message: str, *, prompt_tokens: int, context_tokens: int) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class SessionFileError(KvsError):
    """A saved session that cannot be written or taken up. The message names the file."""


class DeviceError(KvsError):
    """The device or its memory failed. What was published to the host history is not touched."""


class DeviceMemoryError(DeviceError):
    """Memory that cannot be had, of the device or of the host. What it was for has not begun."""

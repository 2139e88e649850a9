"""How many examples of a property are tried where each takes long: all of them where a developer runs the tests."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """``count``; a third of it, at least 6, where ``CI`` is set and ``KVS_TEST_LONG`` is not."""
    return max(6, count // 3) if os.environ.get("CI") and not os.environ.get("KVS_TEST_LONG") else count

"""What copies have moved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Copied:
    """Bytes, and the copies that moved them."""

    size_bytes: int = 0
    copies: int = 0

    def plus(self, other: Copied) -> Copied:
        """Both."""
        return Copied(self.size_bytes + other.size_bytes, self.copies + other.copies)

    def since(self, earlier: Copied) -> Copied:
        """What came after ``earlier``."""
        return Copied(self.size_bytes - earlier.size_bytes, self.copies - earlier.copies)


NONE_COPIED = Copied()

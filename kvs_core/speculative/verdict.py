"""Verdict: what a round's logits made of its draft."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Tokens that a round generates, at least one: row i of the step decided ``tokens[i]``.

    All but the last are drafted tokens that were accepted. The last was sampled from the target and is not run: it is
    the next round's first row, unless it ends the text. Rows to keep: ``len(tokens)``, that of the step's first token
    and those of the accepted ones.

    synthetic  acceptance was pretended: the tokens are no text
    """

    tokens: tuple[int, ...]
    synthetic: bool = False

    def __post_init__(self) -> None:
        assert self.tokens

    @property
    def accepted(self) -> int:
        """Drafted tokens among them."""
        return len(self.tokens) - 1

"""Drafters that look at tokens alone: all of them made from settings, and ngram-simple.

Rules, constants and quirks of every type are llama-server's: the same text gives the same drafts, round by round.
"""

from __future__ import annotations

from kvs_core.settings.drafters import NgramSimpleSettings, SpeculativeSettings
from kvs_core.speculative.drafter import NO_DRAFT, Draft, Drafter
from kvs_core.speculative.ngram_cache import NgramCache
from kvs_core.speculative.ngram_map import NgramMap
from kvs_core.speculative.ngram_mod import NextTokens, NgramMod
from kvs_core.speculative.text import Text, last_place
from kvs_core.speculative.verdict import Verdict


def ngram_drafters(
    settings: SpeculativeSettings, *, n_vocab: int, next_tokens: NextTokens | None = None
) -> list[Drafter]:
    """The n-gram drafters among ``settings.types``, for one sequence of tokens below ``n_vocab``.

    next_tokens  ngram-mod's table, to be shared by sequences; None: one of its own
    SettingsError for a statistics file that cannot be used.
    """
    made: list[Drafter] = []
    for name in settings.types:
        match name:
            case "ngram-simple":
                made.append(NgramSimple(settings.ngram_simple))
            case "ngram-map-k":
                made.append(NgramMap(settings.ngram_map_k, counts_values=False))
            case "ngram-map-k4v":
                made.append(NgramMap(settings.ngram_map_k4v, counts_values=True))
            case "ngram-mod":
                made.append(NgramMod(settings.ngram_mod, next_tokens or NextTokens()))
            case "ngram-cache":
                made.append(NgramCache(settings.ngram_cache, n_vocab=n_vocab))
    return made


class NgramSimple:
    """What followed the last ``size_n`` tokens when they stood before, most recently; up to ``size_m`` tokens.

    It keeps nothing. Position 0 is never looked at, and a continuation shorter than ``size_n`` is no draft: text that
    repeats with a shorter period is matched one period back and gives none.
    """

    def __init__(self, settings: NgramSimpleSettings) -> None:
        self._size_n = settings.size_n
        self._size_m = settings.size_m

    @property
    def name(self) -> str:
        return "ngram-simple"

    def begin(self, prompt: Text) -> None:
        """Nothing is learnt from it."""

    def propose(self, text: Text, limit: int) -> Draft:
        """The tokens behind the last match, in [1, run - n - 1], of the last n tokens; see ``Drafter``."""
        n, m = self._size_n, self._size_m
        run = text.size - 1   # tokens before the last one
        if run <= n + m + 1:
            return NO_DRAFT
        match = last_place(text, text[run + 1 - n :], 1, run - n - 1)
        if match is None:
            return NO_DRAFT
        count = min(m, run - (match + n))
        if count < n:
            return NO_DRAFT
        return Draft(tuple(text[match + n : match + n + count].tolist()), self.name)

    def accept(self, verdict: Verdict, drafted: int) -> None:
        """Nothing is learnt from it."""

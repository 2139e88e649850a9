"""The n-gram drafters once more, slow and literal: plain lists and loops, a scan where the package has an index.

``h`` are the tokens before the last one, ``t`` the last one: the notation of the rules, which number positions of h.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def simple(h: list[int], t: int, n: int, m: int) -> list[int]:
    size = len(h)
    if size <= n + m + 1:
        return []
    pattern = [*h[size - n + 1 :], t]
    for j in range(size - n - 1, 0, -1):
        if h[j : j + n] == pattern:
            count = min(m, size - (j + n))
            return h[j + n : j + n + count] if count >= n else []
    return []


class Map:
    """Both map types; a key is [position, counted up to, hits, values], a value [position, times, accepted]."""

    def __init__(self, n: int, m: int, min_hits: int, *, values: bool, slots: int) -> None:
        self.n, self.m, self.min_hits, self.values, self.slots = n, m, min_hits, values, slots
        self.table: dict[int, int] = {}
        self.keys: list[list[Any]] = []
        self.idx_last_check = self.size_last_begin = self.key_map_last_idx = 0
        self.last: list[int] | None = None

    def slot(self, tokens: list[int]) -> int:
        h = 0
        for token in tokens:
            h = (h * 2654435761 + token) % (1 << 32)
        return h % self.slots

    def begin(self, prompt: list[int]) -> None:
        size = len(prompt)
        if size < self.idx_last_check:
            cut = self.size_last_begin
            if cut > size:
                cut = size - self.n - self.m if size > self.n + self.m else 0
            self.table = {slot: at for slot, at in self.table.items() if at < cut}
            self.key_map_last_idx = max(cut - 1, 0)
            self.keys = [key for key in self.keys if key[0] < cut]
            if self.values:
                for key in self.keys:
                    key[3] = [value for value in key[3] if value[0] < cut]
                self.keys = [key for key in self.keys if key[3]]
        self.idx_last_check = self.size_last_begin = size

    def draft(self, h: list[int], t: int) -> list[int]:
        n, m, size = self.n, self.m, len(h)
        self.last = None
        if size < 2 * n + m:
            return []
        self.idx_last_check = size
        key_tokens = [*h[size - n + 1 :], t]
        first = list(range(self.size_last_begin - n - m - 1, self.key_map_last_idx, -1))
        second = [j for j in range(size - n - m - 1, self.key_map_last_idx, -1) if j > self.size_last_begin]
        match = self.table.get(self.slot(key_tokens), 0)
        if not (match and match < size - n - m - 1 and h[match : match + n] == key_tokens):
            match = next((j for j in first + second if h[j : j + n] == key_tokens), 0)
        for j in first + second:
            self.table.setdefault(self.slot(h[j : j + n]), j)
        self.key_map_last_idx = max(self.key_map_last_idx, size - n - m - 1)
        if not match:
            return []
        key = next((key for key in self.keys if [*h, t][key[0] : key[0] + n] == key_tokens), None)
        if key is None:
            key = [match, 0, 0, [] if self.values else [[0, 0, m]]]
            self.keys.append(key)
        key[2] = min(key[2] + 1, 16380)
        if not self.values:
            self.last = key[3][0]
        elif key[2] < self.min_hits:
            return []
        else:
            self.last = self.count(h, key, key_tokens, match)
            if self.last is None:
                return []
        return h[match + n : match + n + min(m, self.last[2])]

    def count(self, h: list[int], key: list[Any], key_tokens: list[int], match: int) -> list[int] | None:
        n, m, values = self.n, self.m, key[3]
        for i in range(key[1], match + 1):
            if h[i : i + n] != key_tokens:
                continue
            tokens = h[i + n : i + n + m]
            same = next((value for value in values if h[value[0] : value[0] + m] == tokens), None)
            if same is None and len(values) < 4:
                same = [i + n, 0, m]
                values.append(same)
            if same is not None:
                same[1] = min(same[1] + 1, 16380)
        key[1] = match
        best = max(values, key=lambda value: value[1])
        others = sum(value[1] for value in values) - best[1]
        return None if others > 0 and best[1] < 2 * others else best

    def accept(self, accepted: int) -> None:
        if self.last is not None:
            self.last[2] = accepted


class Mod:
    def __init__(self, n: int, n_min: int, n_max: int, slots: int) -> None:
        self.n, self.n_min, self.n_max, self.slots = n, n_min, n_max, slots
        self.table: dict[int, int] = {}
        self.i_last = self.n_draft_last = self.n_low = 0

    def slot(self, tokens: list[int]) -> int:
        r = 0
        for token in tokens:
            r = (r * 6364136223846793005 + token) % (1 << 64)
        return r % self.slots

    def learn(self, h: list[int]) -> None:
        for i in range(self.i_last, len(h) - self.n):
            self.table[self.slot(h[i : i + self.n])] = h[i + self.n]
        self.i_last = len(h) - self.n

    def begin(self, prompt: list[int]) -> None:
        self.i_last = self.n_draft_last = 0
        if len(prompt) < self.n:
            return
        self.learn(prompt)
        if len(self.table) / self.slots > 0.25:
            self.table = {}

    def draft(self, h: list[int], t: int) -> list[int]:
        self.n_draft_last = 0
        if len(h) < self.n:
            return []
        if self.i_last + 32 < len(h):
            self.learn(h)
        window, drafted = [*h[len(h) - self.n + 1 :], t], []
        for i in range(self.n_max):
            token = self.table.get(self.slot(window), -1)
            if token == -1:
                if i < self.n_min:
                    return []
                break
            drafted.append(token)
            window = [*window[1:], token]
        self.n_draft_last = len(drafted)
        return drafted

    def accept(self, accepted: int) -> None:
        if self.n_draft_last > 0:
            self.n_low = self.n_low + 1 if accepted / self.n_draft_last < 0.25 else 0
            if self.n_low >= 5:
                self.table, self.n_low, self.i_last = {}, 0, 0


Counts = dict[tuple[int, ...], dict[int, int]]


class Cache:
    def __init__(self, dynamic: Mapping[Any, Any], static: Mapping[Any, Any]) -> None:
        self.context: Counts = {}
        self.dynamic, self.static = dynamic, static
        self.cache_size = 0

    def draft(self, h: list[int], t: int) -> list[int]:
        tokens = [*h, t]
        if self.cache_size < len(tokens):
            part = tokens[self.cache_size :]
            for size in range(1, 5):
                for end in range(size, len(part)):
                    counts = self.context.setdefault(tuple(part[end - size : end]), {})
                    counts[part[end]] = counts.get(part[end], 0) + 1
            self.cache_size = len(tokens)
        drafted: list[int] = []
        while len(drafted) < 8 and len(tokens) >= 2:
            token = self.choose(tokens)
            if token is None:
                break
            drafted.append(token)
            tokens.append(token)
        return drafted

    def choose(self, tokens: list[int]) -> int | None:
        static = self.static.get(tuple(tokens[-2:]), {})
        for counts, samples, percents in ((self.context, (2, 2, 1, 1), (66, 50, 50, 50)),
                                          (self.dynamic, (4, 3, 2, 2), (75, 66, 66, 66))):
            for size in range(min(4, len(tokens)), 0, -1):
                seen = counts.get(tuple(tokens[-size:]), {})
                best, best_score = None, 0
                for token, count in reversed(seen.items()):
                    score = count * (100 * static[token] if token in static else 1)
                    if score > best_score:
                        best, best_score = token, score
                total = sum(seen.values())
                if best is None or total < samples[size - 1] or 100 * seen[best] < percents[size - 1] * total:
                    continue
                return best
        best, total = None, sum(static.values())
        for token, count in reversed(static.items()):
            if best is None or count > static[best]:
                best = token
        return best if best is not None and total >= 2 and 100 * static[best] >= 50 * total else None

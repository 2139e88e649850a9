"""GBNF, llama.cpp's notation of grammars, translated to the one that llguidance reads.

    root ::= "yes" | item (", " item){0,3}     # rules, alternatives, groups, repetition: * + ? {n} {n,} {n,m}
    item ::= [a-z] [^0-9\\n] . "\\u00e9"         # classes, any character, escapes

llguidance splits text into the longest lexemes before it looks at rules, GBNF knows characters alone: every character
becomes a lexeme of its own, and so the translation means exactly the same.
"""

from __future__ import annotations

import re
from typing import NoReturn

from kvs_core.errors import SettingsError

_MAX_DEPTH = 30
_MAX_REPEAT = 1000

_NAME = re.compile(r"[A-Za-z0-9-]+")
_REPEAT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]"}


def to_lark(text: str) -> str:
    """The grammar in llguidance's notation; its start is ``root``. SettingsError, with the line, for what is none."""
    return _Parser(text).grammar()


class _Parser:
    """Recursive descent. Newlines end a rule, except in groups and behind ``::=`` and ``|``."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._numbers: dict[str, int] = {}   # of rules, by name
        self._defined: set[str] = set()

    def grammar(self) -> str:
        lines = [f"start: r{self._number('root')}"]
        self._skip(newlines=True)
        while self._at < len(self._text):
            name = self._name()
            if name in self._defined:
                self._fail(f"rule {name} is defined twice")
            self._defined.add(name)
            self._skip(newlines=False)
            self._expect("::=")
            self._skip(newlines=True)
            lines.append(f"r{self._number(name)}: {self._alternatives(0)}")
            self._skip(newlines=False)
            if self._at < len(self._text) and not self._peek("\n") and not self._peek("\r"):
                self._fail("expected the end of the rule")
            self._skip(newlines=True)
        missing = [name for name in self._numbers if name not in self._defined]
        if missing:
            raise SettingsError(f"rule {missing[0]:.40} is not defined")
        return "\n".join(lines)

    def _alternatives(self, depth: int) -> str:
        if depth > _MAX_DEPTH:
            self._fail(f"groups are nested more than {_MAX_DEPTH} deep")
        parts = [self._sequence(depth)]
        while self._peek("|"):
            self._at += 1
            self._skip(newlines=True)
            parts.append(self._sequence(depth))
        return " | ".join(parts)

    def _sequence(self, depth: int) -> str:
        items: list[str] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == '"':
                chars = self._literal()
                items += [_quoted(each) for each in chars]
                repeated = "(" + " ".join(items[len(items) - len(chars) :] or ['""']) + ")"
                if (repeat := self._repetition(depth)) is not None:   # of the whole literal
                    items[len(items) - len(chars) :] = [repeated + repeat]
            elif char == "[":
                items.append(self._class() + (self._repetition(depth) or ""))
            elif char == ".":
                self._at += 1
                items.append("/(?s:.)/" + (self._repetition(depth) or ""))
            elif char == "(":
                self._at += 1
                self._skip(newlines=True)
                group = self._alternatives(depth + 1)
                self._skip(newlines=True)
                self._expect(")")
                items.append(f"({group})" + (self._repetition(depth) or ""))
            elif _NAME.match(self._text, self._at):
                items.append(f"(r{self._number(self._name())})" + (self._repetition(depth) or ""))
            else:
                break
            self._skip(newlines=depth > 0)
        return " ".join(items) or '""'

    def _repetition(self, depth: int) -> str | None:
        """How often the item before may come; None: once. White space may stand between the two."""
        before = self._at
        self._skip(newlines=depth > 0)
        if self._at < len(self._text) and self._text[self._at] in "*+?":
            self._at += 1
            return self._text[self._at - 1]
        if not self._peek("{"):
            self._at = before
            return None
        found = _REPEAT.match(self._text, self._at)
        if found is None or not (found[1] or found[3]):
            self._fail("expected {n}, {n,}, {,m} or {n,m}")
        low = int(found[1] or 0)
        high = low if not found[2] else int(found[3]) if found[3] else None
        if max(low, high or 0) > _MAX_REPEAT:
            self._fail(f"more than {_MAX_REPEAT} repetitions")
        if high is not None and high < low:
            self._fail(f"{{{low},{high}}} ends before it begins")
        self._at = found.end()
        return f"{{{low},{'' if high is None else high}}}"

    def _literal(self) -> list[str]:
        self._at += 1
        chars: list[str] = []
        while not self._peek('"'):
            chars.append(self._char())
        self._at += 1
        return chars

    def _class(self) -> str:
        self._at += 1
        negated = self._peek("^")
        self._at += negated
        ranges: list[str] = []
        while not self._peek("]"):
            first = last = self._char()
            if self._peek("-") and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._char()
            if last < first:
                self._fail(f"the range {first!r} to {last!r} ends before it begins")
            ranges.append(f"\\u{{{ord(first):x}}}-\\u{{{ord(last):x}}}")
        self._at += 1
        if not ranges and not negated:
            self._fail("a class without characters matches nothing")
        return f"/[{'^' if negated else ''}{''.join(ranges)}]/" if ranges else "/(?s:.)/"

    def _char(self) -> str:
        """One character of a literal or a class."""
        if self._at >= len(self._text):
            self._fail("it ends in the middle of a literal or class")
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            return char
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        digits = self._text[self._at : self._at + _HEX.get(kind, 0)]
        if kind not in _HEX or len(digits) < _HEX[kind] or not re.fullmatch("[0-9a-fA-F]+", digits):
            self._fail(f"unknown escape \\{kind}")
        self._at += len(digits)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            self._fail(f"\\{kind}{digits} is no character")
        return chr(code)

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            self._fail("expected a rule's name")
        self._at = found.end()
        return found[0]

    def _number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _expect(self, text: str) -> None:
        if not self._peek(text):
            self._fail(f"expected {text}")
        self._at += len(text)

    def _skip(self, *, newlines: bool) -> None:
        """White space and comments."""
        white = " \t\r\n" if newlines else " \t"
        while self._at < len(self._text):
            if self._text[self._at] in white:
                self._at += 1
            elif self._peek("#"):
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            else:
                break

    def _fail(self, why: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        raise SettingsError(f"line {line}: {why}, at {self._text[self._at : self._at + 20]!r}")


def _quoted(char: str) -> str:
    return f"/\\u{{{ord(char):x}}}/"

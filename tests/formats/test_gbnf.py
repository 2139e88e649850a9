"""GBNF means what llama.cpp takes it to mean: characters, without any tokens or lexemes in between."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.errors import SettingsError
from kvs_core.formats.gbnf import to_lark
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.grammar import GrammarCompiler
from kvs_core.formats.tokenizer import Tokenizer
from tests.support.tiny_gguf import write_tiny_llama

Accepts = Callable[[str, str], bool]

SUMS = r"""
root   ::= (sum "=" blank value "\n")+     # the blanks of a value may be the newline that ends a line
sum    ::= value ([-+] value)*
value  ::= name | number | "(" blank sum ")" blank
name   ::= [a-z] [a-z0-9]* blank
number ::= [0-9]+ blank
blank  ::= [ \n]*
"""
LINES = r"""root ::= line+

# neither kind of newline, nor a line separator
line ::= "* " [^\r\n\x0b\u2028]+ "\n"
"""
ARRAY = r"""root ::=
  "[" gap (
      item
      ("," gap item)*
  )? "]" gap
item ::= "true" | "t" | [0-9]{1,3} | root
gap ::= | " " | "\n" [ \t]{0,2}
"""


@pytest.fixture(scope="module")
def accepts(tmp_path_factory: pytest.TempPathFactory) -> Accepts:
    """Whether a grammar generates exactly a text."""
    path = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf", seed=2)
    tokenizer = Tokenizer.from_metadata(GgufFile.open(path).metadata, source="test")
    compiler = GrammarCompiler(tokenizer, tokenizer.n_vocab)

    def check(grammar: str, text: str) -> bool:
        rule = compiler.from_gbnf(grammar)
        for token in tokenizer.encode(text, add_special=False, parse_special=False):
            if not rule.allowed()[token]:
                return False
            rule.accept(token)
        return bool(rule.allowed()[sorted(tokenizer.eog_ids)].any())

    return check


@pytest.mark.parametrize(("grammar", "yes", "no"), [
    (SUMS, ["a+3= 5\n", "(1+2)-3=4\n", "x=y\n\nz=1\n"], ["a+3=5", "=1\n", "A=1\n"]),
    (LINES, ["* a\n", "* a\n* é\n"], ["a", "* \n", "* a\u2028b\n"]),
    (ARRAY, ["[]", "[true, t,12]", "[[],[1]\n \t]"], ["[", "[,]", "[1234]", "[tr]"]),
    ('root ::= ("a"?)* "ab" {2} . [\\u0041-\\U00000043]', ["ababxA", "aaababéC"], ["abxA", "ababA"]),
    ('root ::= root "x" | ""', ["", "xxx"], ["y"]),
    ("root ::= [a\\]-] [^^] [-a]", ["]b-", "-]a", "aaa"], ["a^a", "b]a"]),
])  # fmt: skip
def test_grammars(accepts: Accepts, grammar: str, yes: list[str], no: list[str]) -> None:
    """Ambiguous and recursive ones too: what a longest-match lexer would miss is accepted."""
    assert [text for text in yes if not accepts(grammar, text)] == []
    assert [text for text in no if accepts(grammar, text)] == []


PIECES = st.sampled_from([('"a"', "a"), ('"ab"', "ab"), ('"b"', "b"), ("[ab]", "[ab]"), ("[^a]", "[^a]"), (".", ".")])
REPEATS = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "{2,}", "{0,1}"])


@st.composite
def grammars(draw: st.DrawFn, depth: int = 2) -> tuple[str, str]:
    """A grammar without recursion, and the regular expression that means the same."""
    made = []
    for _ in range(draw(st.integers(1, 3))):
        inner = draw(grammars(depth=depth - 1)) if depth and draw(st.booleans()) else draw(PIECES)
        repeat = draw(REPEATS)
        made.append((f"({inner[0]}){repeat}", f"(?:{inner[1]}){repeat}"))
    gbnf, regex = draw(st.sampled_from([(" ", ""), (" | ", "|")]))
    return gbnf.join(each[0] for each in made), regex.join(each[1] for each in made)


@settings(max_examples=40)
@given(pair=grammars(), texts=st.lists(st.text(alphabet="abc", max_size=5), min_size=1, max_size=6))
def test_regular_grammars_are_regular_expressions(accepts: Accepts, pair: tuple[str, str], texts: list[str]) -> None:
    """For any grammar without recursion and any text."""
    for text in texts:
        assert accepts(f"root ::= {pair[0]}", text) == bool(re.fullmatch(pair[1], text, re.DOTALL)), (pair, text)


@pytest.mark.parametrize(("text", "why"), [
    ("", "rule root is not defined"),
    ('foo ::= "x"', "rule root is not defined"),
    ("root ::= bar", "rule bar is not defined"),
    ('root ::= "a"\nroot ::= "b"', "line 2: rule root is defined twice"),
    ("root ::= (", "expected )"),
    ('root ::= "a', "it ends in the middle"),
    ("root ::= [a", "it ends in the middle"),
    ("root ::= []", "a class without characters"),
    ("root ::= [z-a]", "ends before it begins"),
    ('root ::= "\\q"', "unknown escape"),
    ('root ::= "\\u12"', "unknown escape"),
    ('root ::= "\\ud800"', "is no character"),
    ('root ::= "a"{3,2}', "ends before it begins"),
    ('root ::= "a"{}', "expected {n}"),
    ('root ::= "a"{5000}', "more than 1000 repetitions"),
    ("root ::= *", "expected the end of the rule"),
    ("root := x", "expected ::="),
    ("root ::= " + "(" * 10_000, "nested more than"),
])  # fmt: skip
def test_what_is_no_grammar(text: str, why: str) -> None:
    """One line that says where and why."""
    with pytest.raises(SettingsError, match=re.escape(why)) as caught:
        to_lark(text)
    assert "\n" not in str(caught.value)

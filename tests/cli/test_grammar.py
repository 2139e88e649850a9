"""``--grammar`` and ``--json-schema``: the text of ``kvs run`` follows them, wherever they are given."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import GREEDY, Kvs, tokenizer_of

LETTERS = 'root ::= word (" " word){2}\nword ::= [a-c]{2,4}'
SEA = '{"type": "object", "properties": {"sea": {"enum": [1, 2]}}, "required": ["sea"], "additionalProperties": false}'
THINKS = "{{ messages[0].content }}{% if enable_thinking %}[THINK]\n{% else %}[/THINK]{% endif %}"


def test_a_grammar_holds_for_the_whole_text(kvs: Kvs, tiny_llama: Path, tmp_path: Path) -> None:
    """Sampled or greedy, given as text or in a file, with drafts or without: the same conforming text each time."""
    file = tmp_path / "letters.gbnf"
    file.write_text(f"# three words\n{LETTERS}\n")
    for how in (GREEDY, ("--seed", "3")):
        command = ("run", "-m", tiny_llama, "-p", "The sea", "-n", "60", *how)
        texts = {
            kvs(*command, *flags).out
            for flags in (("--grammar", LETTERS), ("--grammar-file", file),
                          ("--grammar", LETTERS, "--spec-type", "ngram-map-k", "--spec-ngram-map-k-size-n", "2",
                           "--spec-ngram-map-k-size-m", "4"))
        }
        assert len(texts) == 1
        assert re.fullmatch("[a-c]{2,4}( [a-c]{2,4}){2}", texts.pop().rstrip("\n"))


def test_a_schema_gives_json(kvs: Kvs, tiny_qwen35: Path, tmp_path: Path) -> None:
    """By flag, by file and by a configuration; the text begins and ends where its JSON does. An empty schema: any
    object. Where properties are listed, there are no others."""
    file = tmp_path / "sea.json"
    file.write_text(SEA)
    config = tmp_path / "config.yaml"
    config.write_text(f"json-schema: '{SEA}'\n")
    command = ("run", "-m", tiny_qwen35, "-p", "The river", "-n", "300", "--seed", "3", "--json")
    for flags in (("-j", SEA), ("--json-schema-file", file), ("--config", config)):
        result = kvs(*command, *flags).json
        assert result["stop_reason"] == "eos"
        assert json.loads(result["text"]) in ({"sea": 1}, {"sea": 2})
    [newline] = tokenizer_of(tiny_qwen35).encode("\n", add_special=False)
    assert kvs(*command, "-j", "{}", "-n", "12", "-l", f"{newline}+1000").json["text"].startswith("{\n\n")
    [comma] = tokenizer_of(tiny_qwen35).encode(",", add_special=False)
    open_sea = json.dumps(json.loads(SEA) | {"additionalProperties": True})
    listed = json.dumps({"properties": {"sea": {"const": 1}}, "required": ["sea"]})
    assert kvs(*command, "-j", open_sea, "-l", f"{comma}+1000", "-n", "20").json["stop_reason"] == "length"
    assert json.loads(kvs(*command, "-j", listed, "-l", f"{comma}+1000").json["text"]) == {"sea": 1}


@pytest.mark.parametrize("thinks", [True, False])
def test_thoughts_come_first(kvs: Kvs, tiny_qwen35: Path, thinks: bool) -> None:
    """Where the chat template opens thoughts, the grammar holds for what follows them; else from the start."""
    tokenizer = tokenizer_of(tiny_qwen35)
    bracket = tokenizer.encode("]", add_special=False)
    assert len(bracket) == 1
    kwargs = json.dumps({"enable_thinking": thinks})
    result = kvs("run", "-m", tiny_qwen35, "--chat", "--chat-template", THINKS, "--chat-template-kwargs", kwargs,
                 "-p", "x", "-n", "9", *GREEDY, "--grammar", 'root ::= "abc"', "--json").json
    if thinks:
        assert result["stop_reason"] == "length"   # thoughts that never end are under no rule
        assert "abc" not in result["text"]
    else:
        assert (result["text"], result["stop_reason"]) == ("abc", "eos")


def test_the_end_of_thoughts_begins_the_grammar(kvs: Kvs, tiny_qwen35: Path) -> None:
    """Behind the closing tag nothing but the grammar's text follows."""
    [end] = tokenizer_of(tiny_qwen35).encode("</think>", add_special=False)
    result = kvs("run", "-m", tiny_qwen35, "--chat", "--chat-template", "{{ messages[0].content }}<think>\n", "-p", "x",
                 "-n", "9", *GREEDY, "-l", f"{end}+1000", "--grammar", 'root ::= "abc"', "--json").json
    assert (result["text"], result["stop_reason"]) == ("</think>abc", "eos")


def test_white_space_comes_between_thoughts_and_json(kvs: Kvs, tiny_qwen35: Path, tmp_path: Path) -> None:
    """Up to four characters of it, since models write some there; also where a saved session goes on."""
    [end], [newline] = (tokenizer_of(tiny_qwen35).encode(text, add_special=False) for text in ("</think>", "\n"))
    chat = ("run", "-m", tiny_qwen35, "--chat", "--chat-template", "{{ messages[0].content }}<think>\n", *GREEDY)
    ruled = (*chat, "-n", "20", "-l", f"{end}+1000", "-l", f"{newline}+500", "-j", SEA, "--json")
    assert kvs(*ruled, "-p", "x").json["text"].startswith("</think>\n\n\n\n{\n\n")
    assert kvs(*chat, "-p", "x", "-n", "0", "--session", tmp_path / "saved").code == 0
    goes_on = kvs(*ruled, "-p", "", "--session", tmp_path / "saved").json
    assert goes_on["text"].startswith("</think>\n\n\n\n{\n\n")


@pytest.mark.parametrize(("flags", "words"), [
    (("--grammar", "root ::= nothing"), "--grammar: failed to parse grammar: rule nothing is not defined"),
    (("--grammar", ""), "rule root is not defined"),
    (("--grammar-file", "none.gbnf"), "--grammar-file none.gbnf: No such file"),
    (("--json-schema", "[1]"), "expected a JSON object"),
    (("-j", '{"type": "sea"}'), "--json-schema: JSON schema conversion failed: Invalid type: sea"),
    (("-jf", "none.json"), "--json-schema-file none.json: No such file"),
    (("-jf", "broken.json"), "--json-schema-file broken.json: expected a JSON object"),
    (("--grammar", LETTERS, "-j", "{}"), "--grammar and --json-schema each constrain the text; give one"),
    (("--grammar-file", "a", "-jf", "b"), "--grammar-file and --json-schema-file each constrain the text"),
])
def test_what_is_no_rule_is_refused(
    kvs: Kvs, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], words: str
) -> None:
    """One line that names the flag, before the weights are loaded."""
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text('{"type": ')
    ended = kvs("run", "-m", tiny_llama, "-p", "x", "-n", "1", *flags)
    assert words in ended.error
    assert "loading weights" not in ended.err


def test_a_grammar_that_no_text_can_follow_ends_the_command(kvs: Kvs, tiny_llama: Path) -> None:
    """A rule that never ends, such as one that begins with itself, is an error instead of an empty text."""
    ended = kvs("run", "-m", tiny_llama, "-p", "x", "-n", "3", "--grammar", 'root ::= root "a"')
    assert "the grammar cannot be followed any further" in ended.error

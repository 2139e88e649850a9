"""The demo model's text, vocabulary, tasks, baseline and prompts; its training maths where PyTorch is installed."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
from gguf.constants import TokenType
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.demo_model import fetch_data, mixture, ngram, plain_text, prepare, recall, tokenizer
from benchmarks.needle_prompt import make_prompt
from kvs_core.formats.tokenizer import Tokenizer


@cache
def merges() -> tuple[tuple[str, str], ...]:
    """A small vocabulary trained on generated text."""
    return tuple(tokenizer.merges_of(tokenizer.train(prepare.filler(200, seed=1), 700)))


@cache
def kvs_tokenizer() -> Tokenizer:
    """The same vocabulary as kvs reads it from a file."""
    texts = tokenizer.token_texts(list(merges()))
    plain = len(texts) - len(tokenizer.SPECIAL)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [int(TokenType.NORMAL)] * plain + [int(TokenType.CONTROL)] * (len(texts) - plain),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges()],
        "tokenizer.ggml.eos_token_id": plain,
    }
    return Tokenizer.from_metadata(metadata, source="demo")


class TestPlainText:
    def test_html(self) -> None:
        """A page's text: paragraphs in one line, items marked, code as it is, nothing from outside the range."""
        page = (
            b"<html><title>no</title><nav>no</nav><div id='a'><h1>Head<a class=\"headerlink\">P</a></h1>\n<p>One\n two "
            b"&amp; three.</p><ul><li>\n<p>item</p></li></ul><pre>x =  1\n  y</pre><script>no</script></div>"
            b"<i>end</i>no"
        )
        text = plain_text.html(page, start="<div id='a'>", stop="<i>end")
        assert text == "Head\n\nOne two & three.\n\n- item\n\nx =  1\n  y"
        assert plain_text.html(page, start="<div id='b'>") == ""

    def test_unwrapped(self) -> None:
        """Wrapped lines become one paragraph; short lines, as in verse, stay."""
        wrapped = "a" * 50 + "\n" + "b" * 45 + "\nend\n\nshort\nlines\n"
        assert plain_text.unwrapped(wrapped) == "a" * 50 + " " + "b" * 45 + " end\n\nshort\nlines"

    @given(st.lists(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n")), min_size=1), max_size=3))
    def test_r_strings(self, vectors: list[list[str]]) -> None:
        """The strings of an R database come back."""
        database = b""
        for strings in vectors:
            entry = b"X\n" + struct.pack(">iii", 3, 0x040201, 0x030500) + struct.pack(">i", 5) + b"UTF-8"
            entry += struct.pack(">ii", 0x10, len(strings))
            for string in strings:
                data = string.encode()
                entry += struct.pack(">ii", 0x00040009 if string.isascii() else 0x00008009, len(data)) + data
            packed = zlib.compress(entry)
            database += struct.pack(">I", len(packed)) + packed
        assert list(plain_text.r_strings(database)) == ["\n".join(strings) for strings in vectors]

    def test_r_strings_refuses_other_files(self) -> None:
        """A file of another kind is refused."""
        with pytest.raises(ValueError, match="no R database"):
            list(plain_text.r_strings(b"something else"))

    def test_sword_books(self) -> None:
        """The books of a module, without notes and tags."""
        osis = b'<title>Head</title><w>In</w> <w>the</w><note>no</note> end<div eID="g" type="x-p"/> Next &amp;'
        packed = zlib.compress(osis)
        index = struct.pack("<III", 0, 0, 0) + struct.pack("<III", 0, len(packed), len(osis))
        assert list(plain_text.sword_books(index, packed)) == ["Head\n\nIn the end\n\nNext &"]


class TestDocuments:
    @given(st.text("ab\n", max_size=60), st.integers(5, 20))
    def test_pieces(self, text: str, most: int) -> None:
        """Cutting loses nothing but blank lines, and no piece is too long."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fetch_data, "MOST_CHARACTERS", most)
            pieces = list(fetch_data.pieces(text))
        assert "".join(pieces).replace("\n", "") == text.replace("\n", "")
        assert max(map(len, pieces)) <= most

    def test_usable(self) -> None:
        """Short and repeated documents go, rulers too."""
        text = "word " * 100
        assert list(fetch_data.usable(iter(["short", text, text, "-" * 20 + text + "x"]))) == [text.strip(), text + "x"]

    def test_split(self) -> None:
        """Every document is on one side, the same one each time."""
        documents = [str(i) for i in range(400)]
        train, held_out = prepare.split(documents, seed=1)
        assert sorted(train + held_out) == sorted(documents)
        assert len(held_out) == 10
        assert prepare.split(documents, seed=1) == (train, held_out)


class TestTokenizer:
    @given(st.text())
    def test_same_tokens_as_kvs(self, text: str) -> None:
        """Training and kvs cut any text alike, and get it back."""
        ours = tokenizer.from_merges(list(merges())).encode(text, add_special_tokens=False).ids
        theirs = kvs_tokenizer().encode(text, parse_special=False)
        assert ours == theirs
        assert kvs_tokenizer().decode_bytes(theirs) == text.encode()

    def test_token_bytes(self) -> None:
        """Each token prints what kvs prints for it."""
        pieces = tokenizer.token_bytes(list(merges()))
        assert pieces == [kvs_tokenizer().token_bytes(i) for i in range(kvs_tokenizer().n_vocab)]


class TestRecall:
    def test_facts(self) -> None:
        """Keys differ, equal seeds give equal facts, and a statement is what the prompt asks to complete."""
        facts = recall.draw_facts(300, Random(5))
        assert len({fact.key for fact in facts}) == 300
        assert facts == recall.draw_facts(300, Random(5))
        for fact in facts:
            assert fact.statement == f"{fact.lead}{fact.value}."
            assert fact.prompt.endswith(fact.lead)
            assert fact.value.startswith(" ")

    def test_filler_has_no_digits(self) -> None:
        """Generated text cannot be taken for a fact."""
        text = "".join(prepare.filler(500, seed=2))
        assert not any(char.isdigit() for char in text)
        assert "{" not in text


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> mixture.Mixture:
    """A mixture over generated text in the role of all texts."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer.save(list(merges()), folder / "merges.json")
    encoder = tokenizer.from_merges(list(merges()))
    ids = prepare.encode(encoder, prepare.filler(800, seed=3), end=None)
    np.savez(folder / "tokens.npz", train=ids, filler=ids)
    return mixture.Mixture(folder, seed=4)


class TestMixture:
    @pytest.mark.parametrize("size", [512, 4096])
    def test_answers_were_stated(self, mixed: mixture.Mixture, size: int) -> None:
        """Whatever weighs as an answer stands earlier in the sequence, and every sequence is full."""
        pieces = tokenizer.token_bytes(list(merges()))
        answers = 0
        for index in range(30):
            ids, weights = mixed.sequence(index, size)
            assert ids.shape == weights.shape == (size,)
            assert ids.max() < len(pieces)
            heavy = np.flatnonzero(weights >= mixture.ANSWER_WEIGHT)
            for run in np.split(heavy, np.flatnonzero(np.diff(heavy) != 1) + 1) if len(heavy) else []:
                value = b"".join(pieces[i] for i in ids[run])
                before = b"".join(pieces[i] for i in ids[: run[0]])
                assert value in before
                answers += 1
        assert answers > 30

    def test_same_sequence_again(self, mixed: mixture.Mixture) -> None:
        """A sequence depends on its number alone; a batch is a row of them."""
        ids, weights = mixed.batch(3, 4, 256)
        alone = mixed.sequence(14, 256)
        assert np.array_equal(ids[2], alone[0])
        assert np.array_equal(weights[2], alone[1])
        assert not np.array_equal(ids[0], ids[1])


class TestNgram:
    @given(st.binary(min_size=4, max_size=60), st.binary(min_size=2, max_size=3))
    def test_chances_add_up(self, text: bytes, context: bytes) -> None:
        """After any context the 256 bytes share a probability of 1."""
        order = len(context) + 1
        model = ngram.NgramModel(np.frombuffer(text, dtype=np.uint8), order)
        bits = [model.bits(np.frombuffer(context + bytes([byte]), dtype=np.uint8)) for byte in range(256)]
        assert sum(2.0**-value for value in bits) == pytest.approx(1.0)

    def test_known_value(self) -> None:
        """Witten-Bell by hand: "abab" with order 2, then b after a."""
        model = ngram.NgramModel(np.frombuffer(b"abab", dtype=np.uint8), 2)
        single = (2 + 2 / 256) / (4 + 2)
        assert 2 ** -model.bits(np.frombuffer(b"ab", dtype=np.uint8)) == pytest.approx((2 + 1 * single) / (2 + 1))

    def test_refuses_long_runs(self) -> None:
        """A run of bytes must fit in 64 bits."""
        with pytest.raises(ValueError, match="order 9"):
            ngram.NgramModel(np.zeros(20, dtype=np.uint8), 9)


class TestNeedlePrompt:
    @pytest.mark.parametrize(("tokens", "depth", "facts"), [(200, 0.0, 1), (900, 0.5, 3), (3000, 1.0, 8)])
    def test_fits(self, tokens: int, depth: float, facts: int) -> None:
        """The prompt has nearly as many tokens as asked for, states the answer once, where it says, and asks for it."""
        prompt = make_prompt(kvs_tokenizer(), tokens=tokens, depth=depth, facts=facts, seed=11)
        ids = kvs_tokenizer().encode(prompt.text)
        assert tokens - 60 < len(ids) == prompt.tokens <= tokens
        assert prompt.text.count(prompt.answer + ".") == 1
        key = prompt.text.rpartition("secret number of the ")[2].removesuffix(" is")
        stated = kvs_tokenizer().decode(ids[prompt.fact_token :])
        assert stated.startswith(f" The secret number of the {key} is{prompt.answer}.")
        assert abs(prompt.fact_token / prompt.tokens - depth) < 0.2
        assert prompt == make_prompt(kvs_tokenizer(), tokens=tokens, depth=depth, facts=facts, seed=11)

    def test_too_small(self) -> None:
        """Too little room is an error, not a prompt without the fact."""
        with pytest.raises(ValueError, match="more than 50 tokens"):
            make_prompt(kvs_tokenizer(), tokens=50, depth=0.5, facts=8, seed=1)


class TestTraining:
    """Only where PyTorch is installed."""

    def test_chunks_equal_single_steps(self) -> None:
        """Gated DeltaNet in chunks gives the outputs and derivatives of the rule token by token."""
        torch = pytest.importorskip("torch")
        from benchmarks.demo_model import gdn

        torch.manual_seed(0)
        heads, count, dim = 2, 3 * gdn.CHUNK, 8
        q, v = torch.randn(2, heads, count, dim, dtype=torch.float64)
        k = torch.nn.functional.normalize(torch.randn(heads, count, dim, dtype=torch.float64) + 1, dim=-1)
        g, beta = torch.rand(2, heads, count, dtype=torch.float64)
        inputs = [x.requires_grad_() for x in (q, k, v, -0.1 * g, beta)]

        def split(x):
            return x.reshape(heads, 3, gdn.CHUNK, *x.shape[2:]).transpose(0, 1)

        chunks = gdn.prepare(*map(split, inputs))
        fast = gdn.read(chunks, gdn.scan(chunks.step, chunks.added, 3)).transpose(0, 1).reshape(heads, count, dim)
        slow = gdn.sequential(*inputs)
        torch.testing.assert_close(fast, slow)
        weight = torch.randn_like(slow)
        for a, b in zip(
            torch.autograd.grad((fast * weight).sum(), inputs), torch.autograd.grad((slow * weight).sum(), inputs),
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(a, b)

    def test_file_has_the_same_logits(self, tmp_path: Path) -> None:
        """By the plain NumPy forward pass the exported file gives what the training code computes."""
        torch = pytest.importorskip("torch")
        from benchmarks.demo_model import export_gguf, model
        from tests.reference.forward import forward, forward_mtp

        config = model.Config(vocab=len(tokenizer.token_texts(list(merges()))), embd=64, ffn=64, layers=4, heads=2,
                              kv_heads=1, ssm_k_heads=1, ssm_v_heads=2)  # fmt: skip
        random = torch.Generator().manual_seed(3)
        weights = {
            name: value + 0.05 * torch.randn(value.shape, generator=random)
            for name, value in model.initial_weights(config, 1).items()
        }
        path = tmp_path / "demo.gguf"
        export_gguf.write(path, config, weights, list(merges()), name="x", description="x", licence="MIT")
        sizes, read = export_gguf.read(path)
        assert replace(sizes, eps=config.eps) == config  # a file holds float32
        tokens = np.random.default_rng(1).integers(0, config.vocab, 128)
        trained = model.Model(config, read, dtype=torch.float32)
        with torch.no_grad():
            hidden, ahead = trained.hidden(torch.from_numpy(tokens)[None])
            logits, guess = trained.logits(hidden).numpy(), trained.logits(ahead).numpy()
        plain = forward(path, tokens.tolist())
        assert np.abs(plain.logits - logits).max() < 1e-4
        assert np.abs(forward_mtp(path, tokens.tolist(), plain.hidden).logits - guess).max() < 1e-4

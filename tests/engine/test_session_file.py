"""Saved sessions: the same bits after a restart, and one line for every file that does not fit."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from kvs_core.engine.checkpoints import Checkpoints
from kvs_core.engine.engine import Engine
from kvs_core.engine.session import Session
from kvs_core.engine.session_file import load_session, model_key, save_session
from kvs_core.errors import DeviceError, SessionFileError
from kvs_core.formats.gguf import GgufFile
from kvs_core.paging.slabs import slab_of
from kvs_core.settings.rooms import RopeSettings
from tests.engine.tiny import engine, kv_settings
from tests.support.tiny_gguf import write_tiny_qwen35

PROMPT = [7 + index * 31 % 190 for index in range(150)]
KEY = "the model"


@pytest.fixture
def saved(tiny_qwen35: Path, tmp_path: Path) -> Path:
    """150 tokens of a streamed engine."""
    path = tmp_path / "talk.kvs"
    with engine(tiny_qwen35, kv=kv_settings(), pool=0.3) as built:
        session = Session(built)
        session.prefill(PROMPT)
        written = save_session(session, path, KEY)
        assert (written.tokens, written.size_bytes) == (150, path.stat().st_size)
    return path


@pytest.mark.parametrize("pool", [None, 0.0, 0.3])
@pytest.mark.parametrize("model", ["qwen35", "llama"])
def test_it_goes_on_with_the_same_bits(model: str, pool: float | None, request: pytest.FixtureRequest,
                                       tmp_path: Path) -> None:
    """Whatever was there before, whatever the arena."""
    path, file = request.getfixturevalue(f"tiny_{model}"), tmp_path / "talk.kvs"
    with engine(path, kv=kv_settings()) as built:
        session = Session(built)
        session.prefill(PROMPT)
        session.decode(4)
        save_session(session, file, KEY)
        wanted = [session.decode(token) for token in range(20, 30)]
    assert os.stat(file).st_mode & 0o777 == 0o600
    with engine(path, kv=kv_settings(), pool=pool) as built:
        session = Session(built)
        session.prefill(PROMPT[::-1])
        session.prefill(PROMPT[:60])
        assert load_session(session, file, KEY).tokens == 151
        assert session.tokens == [*PROMPT, 4]
        assert all(np.array_equal(session.decode(token), logits)
                   for token, logits in zip(range(20, 30), wanted, strict=True))


def test_a_text_of_several_slabs_goes_on_with_the_same_bits(tiny_llama: Path, tmp_path: Path) -> None:
    """Its pages lie in several pieces of host memory, and find their places again."""
    prompt = [7 + index * 31 % 190 for index in range(700)]
    outcome = []
    for pool in (None, 0.0):
        with engine(tiny_llama, kv=kv_settings(), pool=pool, context=768) as built:
            session = Session(built)
            if pool is None:
                session.prefill(prompt)
                save_session(session, tmp_path / "talk", KEY)
            else:
                assert load_session(session, tmp_path / "talk", KEY).tokens == 700
            outcome.append([np.asarray(session.decode(token)).tobytes() for token in range(20, 24)])
            assert slab_of(built.geometry.pages_of(built.committed) - 1).index == 1
    assert outcome[0] == outcome[1]


def test_checkpoints_are_saved_too(tiny_qwen35: Path, tmp_path: Path) -> None:
    """A turn that differs before the end of what was saved goes on at the border that was marked."""
    edited = [*PROMPT[:120], 3, 4, 5]
    with engine(tiny_qwen35, kv=kv_settings()) as built:
        session = Session(built, Checkpoints(8, 1 << 30))
        session.prefill(PROMPT, border=100)
        save_session(session, tmp_path / "talk", KEY)
        assert session.keep_common(edited) == 100
        wanted = session.prefill(edited[100:])
    with engine(tiny_qwen35, kv=kv_settings(), pool=0.3) as built:
        session = Session(built, Checkpoints(8, 1 << 30))
        session.prefill(PROMPT[::-1])
        load_session(session, tmp_path / "talk", KEY)
        assert [held.position for held in session.checkpoints] == [100, 150]
        assert session.keep_common(edited) == 100
        assert np.array_equal(session.prefill(edited[100:]), wanted)


def test_an_empty_session(tiny_qwen35: Path, tmp_path: Path) -> None:
    with engine(tiny_qwen35, kv=kv_settings()) as built:
        session = Session(built)
        assert save_session(session, tmp_path / "none", KEY).tokens == 0
        session.prefill(PROMPT)
        assert load_session(session, tmp_path / "none", KEY).tokens == 0
        assert session.tokens == []


def _rehashed(data: bytes) -> bytes:
    return data[:-32] + sha256(data[:-32]).digest()


def _header(data: bytes, change: Callable[[dict[str, object]], object]) -> bytes:
    (length,) = struct.unpack("<I", data[8:12])
    header = json.loads(data[12 : 12 + length])
    change(header)
    encoded = json.dumps(header).encode()
    return _rehashed(data[:8] + struct.pack("<I", len(encoded)) + encoded + data[12 + length :])


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "no saved session"),
    "another file": (lambda data: b"GGUF" + data[4:], "no saved session"),
    "cut": (lambda data: data[:-1000], "checksum"),
    "one bit": (lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:], "checksum"),
    "more behind": (lambda data: data + b"x", "checksum"),
    "a longer text": (
        lambda data: _header(data, lambda header: header.update(tokens=151, positions=[151])), "bytes"),
    "a huge text": (
        lambda data: _header(data, lambda header: header.update(tokens=1 << 40, positions=[1 << 40])), "--ctx-size"),
    "a negative text": (lambda data: _header(data, lambda header: header.update(tokens=-1)), "header"),
    "checkpoints out of order": (
        lambda data: _header(data, lambda header: header.update(positions=[9, 3, 150])), "header"),
    "a checkpoint too many": (lambda data: _header(data, lambda header: header.update(positions=[9, 150])), "bytes"),
    "no checkpoint": (lambda data: _header(data, lambda header: header.update(positions=[])), "header"),
    "no text": (lambda data: _header(data, lambda header: header.pop("tokens")), "header"),
    "a list": (lambda data: _rehashed(data[:8] + struct.pack("<I", 2) + b"[]" + data[100:]), "header"),
    "no JSON": (lambda data: _rehashed(data[:8] + struct.pack("<I", 2) + b"{{" + data[100:]), "header"),
    "a header beyond the end": (lambda data: _rehashed(data[:8] + struct.pack("<I", 60 << 20) + data[12:]), "header"),
    "a huge header": (lambda data: _rehashed(data[:8] + struct.pack("<I", 1 << 31) + data[12:]), "header"),
    "huge arrays": (lambda data: _header(data, lambda header: header["arrays"][0].__setitem__(2, [1 << 50])),
                    "recurrent state"),
    "another model": (lambda data: _header(data, lambda header: header.update(model="x")), "another model"),
    "other pages": (lambda data: _header(data, lambda header: header.update(layout="x")), "--cache-type-k"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_file_that_does_not_fit_changes_nothing(kind: str, saved: Path, tiny_qwen35: Path) -> None:
    damage, message = DAMAGE[kind]
    saved.write_bytes(damage(saved.read_bytes()))
    with engine(tiny_qwen35, kv=kv_settings()) as built:
        session = Session(built)
        session.prefill([1, 2, 3])
        with pytest.raises(SessionFileError, match=message) as error:
            load_session(session, saved, KEY)
        assert str(saved) in str(error.value)
        assert "\n" not in str(error.value)
        assert session.tokens == [1, 2, 3]
        session.decode(4)


def test_a_pipe_is_refused(tiny_qwen35: Path, tmp_path: Path) -> None:
    """Without waiting for someone to write to it."""
    os.mkfifo(tmp_path / "pipe")
    with engine(tiny_qwen35, kv=kv_settings()) as built, pytest.raises(SessionFileError, match="is no file"):
        load_session(Session(built), tmp_path / "pipe", KEY)


def test_a_model_is_known_by_weights_and_positions(tmp_path: Path) -> None:
    """Not by its file's name; other weights of the same shapes are another model, and so are other RoPE settings."""
    first, same, other = (
        GgufFile.open(write_tiny_qwen35(tmp_path / f"{number}.gguf", seed=seed))
        for number, seed in enumerate((1, 1, 2))
    )
    key = model_key(first, RopeSettings(), None)
    assert model_key(same, RopeSettings(), None) == key
    assert model_key(other, RopeSettings(), None) != key
    assert model_key(first, RopeSettings(freq_base=5000.0), None) != key
    assert model_key(first, RopeSettings(), "rope_factors_long.weight") != key


def test_a_history_without_room_leaves_the_session_empty(
    saved: Path, tiny_qwen35: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And usable: what comes then has the bits of a session that never tried."""
    with engine(tiny_qwen35, kv=kv_settings()) as built:
        session = Session(built)
        wanted = session.prefill(PROMPT[:40])
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "go_back", _fail)
            with pytest.raises(DeviceError):
                load_session(session, saved, KEY)
        assert (session.tokens, built.committed) == ([], 0)
        assert np.array_equal(session.prefill(PROMPT[:40]), wanted)


def _fail(*_args: object) -> None:
    raise DeviceError("no room")


def test_other_kv_types_are_refused(saved: Path, tiny_qwen35: Path) -> None:
    with engine(tiny_qwen35, kv=kv_settings("f16", "f16")) as built, pytest.raises(SessionFileError, match="page"):
        load_session(Session(built), saved, KEY)


def test_a_file_that_cannot_be_written_leaves_what_was_there(tiny_qwen35: Path, tmp_path: Path) -> None:
    taken = tmp_path / "talk.kvs"
    taken.mkdir()
    with engine(tiny_qwen35, kv=kv_settings()) as built:
        session = Session(built)
        session.prefill(PROMPT[:5])
        with pytest.raises(SessionFileError, match="cannot be saved"):
            save_session(session, taken, KEY)
        with pytest.raises(SessionFileError, match="cannot be saved"):
            save_session(session, tmp_path / "none" / "talk.kvs", KEY)
    assert list(tmp_path.iterdir()) == [taken]

"""The MTP block's drafts are the oracle's, whatever came before: prompts, decode steps, rows that were dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvs_core.device.host.ops import HostOps
from kvs_core.engine.budget import Drafting
from kvs_core.engine.engine import Engine
from kvs_core.errors import CapabilityError
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.phases import Phase
from kvs_core.models.model import forward_buffers
from kvs_core.models.nextn import TABLE_ROWS
from kvs_core.models.recurrent import MAX_ROWS
from kvs_core.models.registry import read_spec
from tests.engine.tiny import engine, kv_settings, text
from tests.reference import forward as oracle
from tests.support.tiny_gguf import write_tiny_llama, write_tiny_qwen35, write_tiny_qwen35moe

NEXTN = Drafting(nextn=True)

# float32 against float64: logits of a few units, each a chain of some hundred roundings.
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["tied", "untied", "experts", "q8_0"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with an MTP block: with the token table as head, with a head of its own, with experts, with quantised
    matrices."""
    folder = tmp_path_factory.mktemp("nextn")
    match request.param:
        case "tied":
            return write_tiny_qwen35(folder / "tied.gguf", seed=1, head_dim=128, n_layer=4)
        case "untied":
            return write_tiny_qwen35(folder / "untied.gguf", seed=3, tied=False, n_layer=5, interval=3)
        case "experts":
            return write_tiny_qwen35moe(folder / "experts.gguf", seed=4)
        case _:
            return write_tiny_qwen35(folder / "q8_0.gguf", seed=5, head_dim=96, n_layer=4, weight_type="q8_0")


class Failure(Exception):
    """What breaks a step off."""


def play(built: Engine, steps: str) -> list[int]:
    """Steps such as "p16 d4:2": a prefill of 16 rows, a decode step of 4 of which 2 are kept. The kept tokens."""
    kept: list[int] = []
    for number, part in enumerate(steps.split()):
        rows, _, keep = part[1:].partition(":")
        tokens = text(built.spec.n_vocab, int(rows), number)
        with built.step(tokens, Phase.PREFILL if part[0] == "p" else Phase.DECODE) as step:
            step.settle(int(keep or rows))
        kept += tokens[: int(keep or rows)]
    return kept


def drafted(built: Engine, tokens: Sequence[int]) -> np.ndarray:
    """Logits [n, V] of drafts of these tokens, each behind the last."""
    logits = []
    with built.open(len(tokens)) as step:
        for token in tokens:
            step.draft_next(token)
            logits.append(step.logits()[0])
    return np.array(logits)


def expected(path: Path, before: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """The same by the oracle: the trunk's rows up to the last of ``before``, then the block's own."""
    hidden = oracle.forward(path, before).hidden if before else np.zeros((0, oracle.GgufModel(path).head.shape[1]))
    logits = []
    sequence = list(before)
    for token in tokens:
        sequence.append(token)
        padded = np.vstack([hidden, np.zeros((1, hidden.shape[1]))])   # the last row is not read
        result = oracle.forward_mtp(path, sequence, padded)
        logits.append(result.logits[-1])
        hidden = np.vstack([hidden, result.hidden[-1:]])
    return np.array(logits)


@pytest.mark.parametrize(
    "steps",
    [
        "p40",
        "p16 p1 p32 p7",
        "d1 d1 d1 d1 d1",
        "p20 d8 d1 d5",
        "p20 d8:3 d4:1",
        "p33 d4:0 d8:0",
        "p9 d8:8 d2:0 p6 d3:2 p1",
        "d4:2 p12",
    ],
)
def test_drafts_are_the_oracles(path: Path, steps: str) -> None:
    """Logits of the first draft come from the trunk's last kept row, those of the second and third from the block's own
    rows; keys and values of every row before them are there, in ubatches, decode steps, and across phases."""
    with engine(path, kv=kv_settings("f32", "f32"), drafting=NEXTN) as built:
        before, tokens = play(built, steps), text(built.spec.n_vocab, 3, 99)
        for _ in range(2):   # drafts leave nothing behind
            np.testing.assert_allclose(
                drafted(built, tokens), expected(path, before, tokens), rtol=0, atol=TOLERANCE
            )


def test_the_first_token_has_no_row_before_it(path: Path) -> None:
    """At the start of a sequence the hidden row is zero."""
    with engine(path, kv=kv_settings("f32", "f32"), drafting=NEXTN) as built:
        tokens = text(built.spec.n_vocab, 3, 4)
        np.testing.assert_allclose(drafted(built, tokens), expected(path, [], tokens), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("steps", ["p20", "p20 d4:2", "p20 d4:2 p3"])
def test_a_sequence_that_begins_anew_remembers_nothing(path: Path, steps: str) -> None:
    """After ``rewind(0)`` drafts are those of a fresh engine, bit for bit, before and behind a new prompt."""
    tokens = [5, 6, 7]
    with engine(path, kv=kv_settings(), drafting=NEXTN) as built:
        fresh = [drafted(built, tokens).tobytes()]
        play(built, "p30 d2:1")
        fresh.append(drafted(built, tokens).tobytes())
    with engine(path, kv=kv_settings(), drafting=NEXTN) as built:
        play(built, steps)
        built.rewind(0)
        again = [drafted(built, tokens).tobytes()]
        play(built, "p30 d2:1")
        again.append(drafted(built, tokens).tobytes())
    assert again == fresh


@pytest.mark.parametrize("fail_at", [0, 1])
def test_a_step_that_broke_off_leaves_the_block_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    """Whether attention failed in the trunk or in the block itself: drafts, and the block's keys and values from then
    on, are those of a run without that step."""
    outcome = []
    for breaks in (False, True):
        with engine(path, kv=kv_settings(), drafting=NEXTN) as built, monkeypatch.context() as patch:
            play(built, "p20 d4:2")
            if breaks:
                calls = count(0)
                attend = HostOps.attend_decode

                def failing(*args: Any, calls: Iterator[int] = calls, attend: Any = attend, **named: Any) -> None:
                    if next(calls) == fail_at:
                        raise Failure
                    attend(*args, **named)

                patch.setattr(HostOps, "attend_decode", failing)
                with pytest.raises(Failure):
                    built.step([3, 4, 5], Phase.DECODE)
            outcome.append(drafted(built, [7, 8]).tobytes())
            play(built, "d3:2")
            outcome.append(drafted(built, [7, 8]).tobytes())
    assert outcome[:2] == outcome[2:]


def test_the_trunk_does_not_see_the_block(path: Path) -> None:
    """Logits of an engine that loads the block are those of one that does not, bit for bit, drafts or no drafts."""
    outcome = []
    for drafting in (Drafting(), NEXTN):
        with engine(path, kv=kv_settings(), drafting=drafting) as built:
            play(built, "p20 d4:2")
            if drafting.nextn:
                drafted(built, [1, 2, 3])
            with built.step([7, 8, 9], Phase.DECODE) as step:
                outcome.append(step.logits(0).tobytes())
    assert outcome[0] == outcome[1]


def test_the_block_is_paid_for_only_where_it_drafts(path: Path) -> None:
    """Without drafts neither its weights nor its pages nor its buffers are there."""
    with engine(path, kv=kv_settings()) as without, engine(path, kv=kv_settings(), drafting=NEXTN) as built:
        assert built.memory_report()["weights"] > without.memory_report()["weights"]
        assert built.need.all_slots == without.need.all_slots // len(built.spec.kv_layers) * built.kv_layers
        assert built.kv_layers == without.kv_layers + 1
    spec = read_spec(GgufFile.open(path))
    names = {buffer.name for buffer in forward_buffers(spec, 8, nextn=True)}
    assert names - {buffer.name for buffer in forward_buffers(spec, 8)} == {
        "nextn_x", "nextn_embedded", "nextn_joined", "nextn_hidden"
    }
    assert TABLE_ROWS == 1 + MAX_ROWS + 1   # the row before a step, the step's, and a draft's


def test_a_model_without_a_block_is_refused(tmp_path: Path) -> None:
    """Before its weights are loaded, with the key that says so and what to use instead."""
    models = (
        write_tiny_llama(tmp_path / "llama.gguf", seed=2),
        write_tiny_qwen35(tmp_path / "qwen35.gguf", seed=2, mtp=False),
    )
    refusal = r"no MTP block \(.*nextn_predict_layers is 0\).*draft-resident"
    for model in models:
        with pytest.raises(CapabilityError, match=refusal), engine(model, kv=kv_settings(), drafting=NEXTN):
            pass

"""What a file says of its experts becomes part of the spec, and what cannot be is refused in one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvs_core.errors import CapabilityError, KvsError, ModelFileError
from kvs_core.formats.gguf import GgufFile
from kvs_core.models.registry import read_spec
from kvs_core.models.spec import ExpertSpec
from tests.models.test_spec import with_keys, with_tensors
from tests.support.tiny_gguf import Experts, write_tiny_qwen3moe, write_tiny_qwen35moe


@pytest.fixture(scope="module")
def qwen3moe(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return GgufFile.open(write_tiny_qwen3moe(tmp_path_factory.mktemp("3m") / "3m.gguf", seed=1))


@pytest.fixture(scope="module")
def qwen35moe(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return GgufFile.open(write_tiny_qwen35moe(tmp_path_factory.mktemp("35m") / "35m.gguf", seed=1))


def test_experts_are_read(qwen3moe: GgufFile, qwen35moe: GgufFile, tmp_path: Path) -> None:
    """How many, how wide, whether one is shared, and in how many tensors gates and ups lie."""
    assert read_spec(qwen3moe).experts == ExpertSpec(6, 3, 32, 0, joined=False)
    hybrid = read_spec(qwen35moe)
    assert (hybrid.experts, hybrid.n_ff) == (ExpertSpec(5, 2, 32, 32, joined=False), 0)
    assert (hybrid.n_layer, hybrid.n_nextn, len(hybrid.recurrent_layers)) == (4, 1, 2)
    joined = write_tiny_qwen35moe(tmp_path / "j.gguf", seed=1, experts=Experts(count=4, used=1, shared=32, joined=True))
    assert read_spec(GgufFile.open(joined)).experts == ExpertSpec(4, 1, 32, 32, joined=True)


def test_widths_of_experts_follow_from_the_dense_one(qwen3moe: GgufFile, qwen35moe: GgufFile) -> None:
    """Without keys of their own: the routed ones share ``feed_forward_length``, the shared one has all of it."""
    told = with_keys(qwen3moe, expert_feed_forward_length=None, feed_forward_length=96)
    assert read_spec(told).experts == ExpertSpec(6, 3, 32, 0, joined=False)
    told = with_keys(qwen35moe, expert_shared_feed_forward_length=None, feed_forward_length=32)
    assert read_spec(told).experts == ExpertSpec(5, 2, 32, 32, joined=False)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"expert_count": None}, ModelFileError, "qwen35moe.expert_count"),
        ({"expert_count": 0}, ModelFileError, "expert_count is 0; it must lie between 1 and 4096"),
        ({"expert_used_count": None}, ModelFileError, "expert_used_count"),
        ({"expert_used_count": 0}, ModelFileError, "expert_used_count is 0; it must lie between 1 and 5"),
        ({"expert_used_count": 6}, ModelFileError, "expert_used_count is 6; it must lie between 1 and 5"),
        ({"expert_feed_forward_length": 0}, ModelFileError, "expert_feed_forward_length is 0"),
        ({"expert_feed_forward_length": None}, ModelFileError, "no metadata key qwen35moe.feed_forward_length"),
        ({"expert_shared_feed_forward_length": None}, ModelFileError, "no metadata key qwen35moe.feed_forward_length"),
        ({"expert_group_count": 4}, CapabilityError, "expert_group_count is 4; kvs has code for experts in one group"),
        ({"expert_count": 6}, ModelFileError, "ffn_gate_inp.weight has the shape [64, 5]; [64, 6] is expected"),
    ],
)
def test_experts_out_of_range_are_refused(
    qwen35moe: GgufFile, changes: dict[str, Any], error: type[KvsError], message: str
) -> None:
    """In one line, as everywhere."""
    with pytest.raises(error) as caught:
        read_spec(with_keys(qwen35moe, **changes))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{qwen35moe.path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.0.ffn_gate_inp.weight": None}, "has no tensor blk.0.ffn_gate_inp.weight [64, 5]"),
        ({"blk.1.ffn_up_exps.weight": None}, "has no tensor blk.1.ffn_up_exps.weight [64, 32, 5]"),
        ({"blk.4.ffn_down_exps.weight": {"shape": (32, 64, 4)}}, "has the shape [32, 64, 4]; [32, 64, 5] is expected"),
        ({"blk.2.ffn_gate_inp_shexp.weight": None}, "has no tensor blk.2.ffn_gate_inp_shexp.weight [64]"),
        ({"blk.2.ffn_down_shexp.weight": {"shape": (64, 64)}}, "[32, 64] is expected"),
        ({"blk.0.ffn_gate.weight": {}}, "blk.0.ffn_gate.weight has no place in the qwen35moe model"),
        ({"blk.0.ffn_down_exps.scale": {}}, "blk.0.ffn_down_exps.scale has no place in the qwen35moe model"),
    ],
)
def test_tensors_of_experts_must_be_there(qwen35moe: GgufFile, changes: dict[str, Any], message: str) -> None:
    """Those that its keys describe, in every block, and no others."""
    with pytest.raises(ModelFileError) as caught:
        read_spec(with_tensors(qwen35moe, **changes))
    assert message in str(caught.value)


def test_qwen3moe_has_no_shared_expert(qwen3moe: GgufFile) -> None:
    """Nor any key of its width that would count."""
    told = with_keys(qwen3moe, expert_shared_feed_forward_length=32)
    assert read_spec(told).experts == read_spec(qwen3moe).experts
    with pytest.raises(ModelFileError, match=r"ffn_up_shexp\.weight has no place in the qwen3moe model"):
        read_spec(with_tensors(qwen3moe, **{"blk.0.ffn_up_shexp.weight": {"shape": (64, 32)}}))

"""What is advised where layers are chosen to fit and an arena has no room for the ring is what makes a split fit."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from kvs_core.device.base import Device
from kvs_core.device.cuda.weights import part_bytes
from kvs_core.engine.budget import plan_budget
from kvs_core.engine.held import held_on_cuda, held_weights
from kvs_core.engine.split import Splits, plan_split
from kvs_core.errors import BudgetError
from kvs_core.models.registry import read_spec
from kvs_core.models.synthetic import synthetic_model
from kvs_core.paging.weight_ring import ALL_STAY, WeightSplit
from kvs_core.settings import ContextSettings, KvSettings
from kvs_core.units import MIB, mib_ceil
from tests.engine.test_levers import followed

FILE = synthetic_model("qwen3-8b:q4_k")
SPEC = read_spec(FILE)
WEIGHTS = held_weights(FILE, SPEC, held_on_cuda, nextn=False, twice=True).size_bytes
LEAST = Splits(FILE, SPEC, part_bytes).at(0)
RING_MIB = mib_ceil(LEAST.ring.size_bytes)


@dataclass
class Gpu:
    """Of a device what a split is planned with."""

    free: int
    spills: bool = False
    is_host: bool = False

    part_bytes = staticmethod(part_bytes)

    @staticmethod
    def scratch(phase: Any, sizes: Any) -> tuple[()]:
        return ()

    @staticmethod
    def page_layout(geometry: Any) -> Any:
        return geometry

    def free_bytes(self) -> int:
        return self.free


def chosen(context: ContextSettings, kv: KvSettings, free: int, *, spills: bool = False) -> WeightSplit:
    return plan_split(FILE, SPEC, context, kv, cast(Device, Gpu(free, spills)), gpu_layers=None)


def needed(context: ContextSettings, kv: KvSettings, split: WeightSplit) -> int:
    """Bytes of the device."""
    budget = plan_budget(SPEC, context, kv, free_bytes=0, ring_bytes=split.ring.size_bytes)
    return WEIGHTS - split.pass_bytes + budget.memory.arena_bytes


def fits(context: ContextSettings, kv: KvSettings, free: int) -> bool:
    return needed(context, kv, chosen(context, kv, free)) <= free


@pytest.mark.parametrize("free_share", [0.3, 0.9, 1.0, 1.1])
@pytest.mark.parametrize(("page_tokens", "ubatch"), [(64, 128), (256, 512)])
@pytest.mark.parametrize("more", [{}, {"ring_slots": 100}])
def test_what_is_advised_makes_a_split_fit(
    free_share: float, page_tokens: int, ubatch: int, more: dict[str, Any]
) -> None:
    """Both the MiB that are named and the flags do; that all layers stay, for which there is no room, is no advice."""
    free, context = int(WEIGHTS * free_share), ContextSettings(ctx_size=32768, ubatch=ubatch)
    levers = 0
    for arena_mib in range(30, 500, 15):
        kv = KvSettings(page_tokens=page_tokens, arena_mib=arena_mib, **more)
        try:
            chosen(context, kv, free)
        except BudgetError as error:
            said, needed_mib = str(error), error.needed_mib
        else:
            continue
        assert "--gpu-layers" not in said
        assert f"needs {needed_mib} MiB" in said
        assert (f"; {RING_MIB} of the {needed_mib} MiB are for weights" in said) == (free_share <= 1.0)
        assert fits(context, replace(kv, arena_mib=needed_mib), free)
        if not more:
            with pytest.raises(BudgetError):
                chosen(context, replace(kv, arena_mib=needed_mib - 1), free)
        for advice in said.partition("raise it")[2].split(", or ")[1:]:
            levers += 1
            assert fits(*followed(context, kv, advice), free)
    assert levers


def test_a_pool_has_room_for_what_is_named() -> None:
    """Of KV pages alone; nothing of it is for weights."""
    free, context = WEIGHTS, ContextSettings(ctx_size=32768)
    with pytest.raises(BudgetError, match=r"KV pool too small") as caught:
        chosen(context, KvSettings(pool_mib=1), free)
    assert "pass through" not in str(caught.value)
    assert fits(context, KvSettings(pool_mib=caught.value.needed_mib), free)


def test_rings_of_several_sizes() -> None:
    """What is named for a KV ring that was asked for is enough where the split that is taken then passes through more
    of the arena than another would."""
    file = synthetic_model("qwen3.5-27b:q4_k:mtp")
    context, gpu = ContextSettings(ctx_size=32768, ubatch=32), cast(Device, Gpu(12856 * MIB))
    kv = KvSettings(page_tokens=64, arena_mib=15, ring_slots=64)
    with pytest.raises(BudgetError, match="raise it") as caught:
        plan_split(file, read_spec(file), context, kv, gpu, gpu_layers=None)
    raised = replace(kv, arena_mib=caught.value.needed_mib)
    split = plan_split(file, read_spec(file), context, raised, gpu, gpu_layers=None)
    assert plan_budget(read_spec(file), context, raised, free_bytes=0, ring_bytes=split.ring.size_bytes)


def test_raising_is_no_advice_where_nothing_is_free_for_it() -> None:
    """With no room for the fewest layers and the least arena beside them, the error says so, with a flag that is enough
    where there is one. Where the arena that was given is no part of it, loading says what there is not."""
    context, kv = ContextSettings(ctx_size=32768, ubatch=512), KvSettings(page_tokens=64, arena_mib=RING_MIB + 45)
    roomy = replace(kv, arena_mib=1000)
    least = WEIGHTS - LEAST.pass_bytes
    with pytest.raises(BudgetError, match=r"^does not fit: .* need (\d+) MiB, (\d+) MiB are free; take a smaller "
                                          r"--model or end other programs, or lower --.*\d$") as caught:
        chosen(context, kv, least + kv_bytes(kv))
    advice = str(caught.value).partition("programs")[2]
    assert fits(*followed(context, kv, advice), least + kv_bytes(kv))
    numbers = re.findall(r"(\d+) MiB", str(caught.value))
    assert [caught.value.needed_mib, caught.value.given_mib] == list(map(int, numbers))
    with pytest.raises(BudgetError, match=r"arena too small: .*; raise it"):
        chosen(context, kv, caught.value.needed_mib * MIB)
    with pytest.raises(BudgetError, match=r"other programs$"):
        chosen(context, kv, least)
    assert chosen(context, roomy, least) == ALL_STAY


def kv_bytes(kv: KvSettings) -> int:
    """Of the arena that was given."""
    assert isinstance(kv.arena_mib, int)
    return kv.arena_mib * MIB


def test_weights_that_may_spill_need_no_ring() -> None:
    """Then an arena without room for one is taken, and one too small for pages is told what is enough for them."""
    context, kv = ContextSettings(ctx_size=32768, ubatch=32), KvSettings(page_tokens=32, arena_mib=RING_MIB)
    assert chosen(context, kv, 0, spills=True) == ALL_STAY
    with pytest.raises(BudgetError, match=r"needs (\d+) MiB, --kv-stream-arena-mib is 1; raise it$") as caught:
        chosen(context, replace(kv, arena_mib=1), 0, spills=True)
    assert caught.value.needed_mib < RING_MIB
    assert chosen(context, replace(kv, arena_mib=caught.value.needed_mib), 0, spills=True) == ALL_STAY

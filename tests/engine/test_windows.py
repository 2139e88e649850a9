"""Window mode: from flags to pages of each layer, and what an arena for them is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvs_core.engine.budget import Budget, plan_budget
from kvs_core.engine.windows import Windows, plan_windows
from kvs_core.errors import BudgetError, SettingsError
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.phases import Phase
from kvs_core.models.registry import read_spec
from kvs_core.models.spec import LayerKind, LayerSpec
from kvs_core.paging.geometry import GROUP_PAGES, KvType, PageGeometry
from kvs_core.settings.rooms import ContextSettings, KvSettings, LayerWindow
from tests.engine.tiny import engine, kv_settings, run, text

LAYERS = [
    LayerSpec(index, LayerKind.FULL, heads=2, kv_heads=1, k_dim=64, v_dim=64, kv_index=number)
    for number, index in enumerate((3, 7, 11))
]
GEOMETRY = PageGeometry(page_tokens=256, kv_heads=1, k_dim=64, v_dim=64, k_type=KvType.F16, v_type=KvType.F16)
WINDOW = KvSettings(residency_mode="window", window_tokens=4096)


def windows_of(kv: KvSettings, context: int = 65536) -> Windows:
    planned = plan_windows(LAYERS, 12, kv, GEOMETRY, context_tokens=context, step_rows=512, head_pages=0)
    assert planned is not None
    return planned


def test_tokens_become_pages_that_hold_them_wherever_the_last_page_ends() -> None:
    """4,096 tokens lie in 16 pages, or 17; single layers differ, and one that is covered keeps all."""
    layers = (LayerWindow(0, 3, None), LayerWindow(7, 7, 1), LayerWindow(8, 11, 65536))
    assert windows_of(WINDOW).pages == (17, 17, 17)
    assert windows_of(replace(WINDOW, window_tokens=4097)).pages == (17, 17, 17)
    assert windows_of(replace(WINDOW, window_tokens=4098)).pages == (18, 18, 18)
    assert windows_of(replace(WINDOW, window_layers=layers)).pages == (None, 1, None)
    assert windows_of(replace(WINDOW, window_tokens=0)).pages == (0, 0, 0)
    # 256 pages in all; 17 and the rest of a group; what 512 rows write and the rest of a group.
    assert windows_of(WINDOW).resident_slots == 3 * 20
    assert windows_of(replace(WINDOW, window_layers=layers)).resident_slots == 256 + 6 + 256


def test_a_layer_that_slides_needs_no_window() -> None:
    """It never streams; the others do need one."""
    layers = [LAYERS[0], replace(LAYERS[1], window=512), LAYERS[2]]
    said = replace(WINDOW, window_tokens=None, window_layers=(LayerWindow(3, 3, 4096), LayerWindow(11, 11, None)))
    sizes = {"context_tokens": 65536, "step_rows": 512, "head_pages": 0}
    planned = plan_windows(layers, 12, said, GEOMETRY, **sizes)
    assert planned is not None
    assert planned.pages == (17, None, None)
    with pytest.raises(SettingsError, match="layer 7 has no window"):
        plan_windows(LAYERS, 12, said, GEOMETRY, **sizes)


def test_other_modes_have_no_windows() -> None:
    """Nothing is planned."""
    assert plan_windows(
        LAYERS, 12, KvSettings(), GEOMETRY, context_tokens=65536, step_rows=512, head_pages=0
    ) is None


def test_a_ring_has_tiles_of_whole_groups() -> None:
    """As many as asked for; else what there is room for, up to four, and two groups at least."""
    three = windows_of(replace(WINDOW, ring_tiles=3, run_pages=5))
    assert (three.tile_pages, three.least_ring, three.ring_in(1000)) == (8, 24, 24)
    chosen = windows_of(replace(WINDOW, run_pages=16))
    assert (chosen.least_ring, chosen.ring_in(10), chosen.ring_in(1000)) == (8, 10, 64)
    assert windows_of(WINDOW).tile_pages * GEOMETRY.page_bytes >= 26 << 20


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        ({"window_layers": (LayerWindow(5, 12, None),)},
         "--kv-window-layers 5-12: the layers of this model are 0 to 11"),
        ({"window_layers": (LayerWindow(4, 6, 10),)},
         "--kv-window-layers 4-6: none of them keeps KV; those of this model that do are 3, 7, 11"),
        ({"window_tokens": None, "window_layers": (LayerWindow(0, 7, 10),)},
         "--kv-window-layers: layer 11 has no window; give --kv-window-tokens N for the rest"),
    ],
)
def test_layers_that_the_model_does_not_have_are_refused(kv: dict[str, object], message: str) -> None:
    """With those that it has."""
    with pytest.raises(SettingsError) as caught:
        windows_of(replace(WINDOW, **kv))  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        ({"residency_mode": "window"}, "no window; give --kv-window-tokens N, --kv-window-layers, or both"),
        ({"residency_mode": "window", "window_tokens": 1, "ring_slots": 8}, "--kv-stream-ring-slots 8: the ring of"),
        ({"window_tokens": 4096}, "--kv-window-tokens: only --kv-residency-mode window has windows"),
        ({"window_layers": (LayerWindow(0, 1, 2),)}, "--kv-window-layers: only --kv-residency-mode window"),
        ({"ring_tiles": 2, "residency_mode": "resident"}, "--kv-stream-ring-tiles: only .* the mode is resident"),
    ],
)
def test_flags_that_contradict_the_mode_are_refused(kv: dict[str, object], message: str) -> None:
    """Windows belong to window mode, and window mode needs one."""
    with pytest.raises(SettingsError, match=message):
        KvSettings(**kv)  # type: ignore[arg-type]


def budget(path: Path, kv: KvSettings, pool_slots: int | None = None) -> Budget:
    spec, context = read_spec(GgufFile.open(path)), ContextSettings(ctx_size=4096, ubatch=64)
    chosen = plan_budget(spec, context, kv, free_bytes=1 << 40)
    if pool_slots is None:
        return chosen
    return plan_budget(spec, context, kv, free_bytes=1 << 40, pool_bytes=pool_slots * chosen.geometry.page_bytes)


def test_an_arena_for_windows_holds_them_and_the_ring_alone(tiny_llama: Path) -> None:
    """One that is chosen has room for windows and four tiles; the least one for two groups; less is refused."""
    kv = kv_settings(residency_mode="window", window_tokens=320, run_pages=8)
    layers = len(read_spec(GgufFile.open(tiny_llama)).kv_layers)
    chosen = budget(tiny_llama, kv)
    resident = layers * (11 + GROUP_PAGES - 1)
    assert chosen.need.least_slots == resident + 8
    assert chosen.need.all_slots == resident + 32
    assert min(chosen.memory.slots(phase) for phase in Phase) >= resident + 32
    assert chosen.residency.ring_slots == 32
    assert chosen.residency.window_pages == (11,) * layers
    assert budget(tiny_llama, kv, resident + 8).residency.ring_slots == 8
    assert budget(tiny_llama, kv, resident + 19).residency.ring_slots == 19
    with pytest.raises(BudgetError):
        budget(tiny_llama, kv, resident + 7)
    with pytest.raises(BudgetError):
        budget(tiny_llama, replace(kv, ring_tiles=3), resident + 23)


def test_a_pool_that_holds_every_page_has_a_ring_all_the_same(tiny_llama: Path) -> None:
    """A step that fills the context writes every page, so the pool has no room beside; one that writes a row streams
    what its window leaves out."""
    logits = []
    for kv in (kv_settings(), kv_settings(residency_mode="window", window_tokens=32)):
        with engine(tiny_llama, kv=kv, pool=1.0, fixed=True, ubatch=512) as built:
            logits.append(run(built, text(built.spec.n_vocab, 200), [7]))
            stats = built.report().stats
            assert stats.pool_pages == 4 * 16
    assert stats.streamed_pages_per_step == 4 * 4
    assert np.array_equal(logits[0], logits[1])

"""Windows of single layers, as pages: those that the user fixed, in window mode, and those that a model's layers see.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvs_core.errors import SettingsError
from kvs_core.models.spec import LayerSpec
from kvs_core.paging.geometry import GROUP_PAGES, PageGeometry
from kvs_core.paging.residency import ResidencyConfig, ResidencyMode, most_resident_pages, most_sliding_pages
from kvs_core.settings.rooms import KvSettings
from kvs_core.units import align_up, ceil_div

_MOST_TILES = 4
_LEAST_RING = 2 * GROUP_PAGES   # two tiles of a group


@dataclass(frozen=True, slots=True)
class Windows:
    """Window mode of one model and one context.

    pages           newest pages that stay resident, by layer with KV; None: all
    resident_slots  for what is resident at any context: windows, heads, and what a step writes
    tile_pages      of the ring, whole groups
    tiles           of the ring; None: 2 to 4 tiles of up to ``tile_pages`` pages, by the room there is
    """

    pages: tuple[int | None, ...]
    resident_slots: int
    tile_pages: int
    tiles: int | None

    @property
    def least_ring(self) -> int:
        """Slots of the smallest ring."""
        return self.tile_pages * self.tiles if self.tiles else min(_LEAST_RING, _MOST_TILES * self.tile_pages)

    def ring_in(self, room: int) -> int:
        """Slots of the ring where the pool has ``room`` slots beside what is resident.

        Less room than for the smallest ring has only a pool that holds every page: of them the streamed ones give way.
        """
        if self.tiles:
            return self.tile_pages * self.tiles
        return max(self.least_ring, min(_MOST_TILES * self.tile_pages, room))


def plan_windows(
    layers: Sequence[LayerSpec], n_blocks: int, kv: KvSettings, geometry: PageGeometry, *,
    context_tokens: int, step_rows: int, head_pages: int, apart: bool = False,
) -> Windows | None:
    """The windows of a model; None in other modes. ``SettingsError`` for layers that it does not have.

    layers      those with KV; numbers are those of the model's blocks, of which there are ``n_blocks``
    step_rows   that a step has at most
    head_pages  first pages of a layer that stay resident
    apart       layers that slide have a pool of their own: they take nothing of the shared one
    A window of N tokens is so many pages that the newest N tokens lie in them wherever the last page ends. A layer that
    slides needs none: it never streams.
    """
    if kv.residency_mode != ResidencyMode.WINDOW.value:
        return None
    known = [layer.index for layer in layers]
    sliding = sliding_pages(layers, geometry)
    for window in kv.window_layers:
        named = f"--kv-window-layers {window.first}-{window.last}"
        if window.last >= n_blocks:
            raise SettingsError(f"{named}: the layers of this model are 0 to {n_blocks - 1}")
        if not any(window.first <= index <= window.last for index in known):
            shown = ", ".join(map(str, known[:4])) + (", ..." if len(known) > 4 else "")
            raise SettingsError(f"{named}: none of them keeps KV; those of this model that do are {shown}")
    pages: list[int | None] = []
    for index, before in zip(known, sliding, strict=True):
        own = [window.tokens for window in kv.window_layers if window.first <= index <= window.last]
        if not own and kv.window_tokens is None and before is None:
            raise SettingsError(
                f"--kv-window-layers: layer {index} has no window; give --kv-window-tokens N for the rest"
            )
        tokens = own[0] if own else kv.window_tokens
        covers = tokens is None or tokens >= context_tokens
        pages.append(None if covers else _pages_of(tokens or 0, geometry.page_tokens))
    resident = [
        most_resident_pages(context_tokens, geometry.page_tokens, step_rows, head_pages, window)
        for window, before in zip(pages, sliding, strict=True) if before is None
    ] + [
        most_sliding_pages(context_tokens, geometry.page_tokens, step_rows, before)
        for before in sliding if before is not None and not apart
    ]
    tile_pages = kv.run_pages or ResidencyConfig(ResidencyMode.ADAPTIVE, 0, geometry.page_bytes).copy_pages
    return Windows(tuple(pages), sum(resident), align_up(tile_pages, GROUP_PAGES), kv.ring_tiles)


def sliding_pages(layers: Sequence[LayerSpec], geometry: PageGeometry) -> tuple[int | None, ...]:
    """Pages that rows see before the one that is written, of each layer with a window of its own; None: all."""
    return tuple(
        ceil_div(layer.window - 1, geometry.page_tokens) if layer.window else None for layer in layers
    )


def _pages_of(tokens: int, page_tokens: int) -> int:
    return ceil_div(tokens - 1, page_tokens) + 1 if tokens else 0

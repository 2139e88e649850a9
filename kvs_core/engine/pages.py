"""Which shapes of pages a model's cache has, and which layer has which. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvs_core.errors import CapabilityError
from kvs_core.models.spec import LayerSpec
from kvs_core.paging.geometry import KvType, PageGeometry, hadamard_block
from kvs_core.settings.rooms import KvSettings


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of a cache.

    shared   of the layers whose pages may stream, or of all
    sliding  of those that see a sliding window, where theirs have another shape; they lie in a pool of their own
    """

    shared: PageGeometry
    sliding: PageGeometry | None = None

    @staticmethod
    def of(layers: Sequence[LayerSpec], kv: KvSettings) -> Pages:
        """Those of a model's attention layers. ``CapabilityError`` if two pools do not do, or the types do not fit."""
        if not layers:
            raise CapabilityError(
                "the model has no attention layer, so it keeps no KV; use a model with attention layers"
            )
        full = [layer for layer in layers if not layer.window]
        sliding = [layer for layer in layers if layer.window]
        shared = page_geometry(full or sliding, kv)
        own = page_geometry(sliding, kv) if sliding else shared
        return Pages(shared, None if own == shared else own)

    def laid_out(self, layout: Callable[[PageGeometry], PageGeometry]) -> Pages:
        """The same in a device's order of bytes."""
        return Pages(layout(self.shared), None if self.sliding is None else layout(self.sliding))

    def geometry(self, layer: LayerSpec) -> PageGeometry:
        """Of a layer's pages."""
        return self.sliding if self.sliding is not None and layer.window else self.shared

    def page_bytes(self, layers: Sequence[LayerSpec]) -> list[int]:
        """Of a page of each layer."""
        return [self.geometry(layer).page_bytes for layer in layers]

    def token_bytes(self, layers: Sequence[LayerSpec]) -> list[int]:
        """That one position takes in each layer."""
        return [self.geometry(layer).token_bytes for layer in layers]

    def layout_id(self) -> str:
        """``PageGeometry.layout_id`` of all shapes."""
        return "+".join(geometry.layout_id for geometry in self.each)

    @property
    def each(self) -> tuple[PageGeometry, ...]:
        """The shapes there are."""
        return (self.shared,) if self.sliding is None else (self.shared, self.sliding)


def page_geometry(layers: Sequence[LayerSpec], kv: KvSettings) -> PageGeometry:
    """The pages of layers that share a pool. ``CapabilityError`` if they differ or the types do not fit."""
    shapes = {(layer.kv_heads, layer.k_dim, layer.v_dim) for layer in layers}
    if len(shapes) > 1:
        raise CapabilityError(f"attention layers of {len(shapes)} different KV shapes do not share one pool of pages")
    heads, k_dim, v_dim = shapes.pop()
    k_type, v_type = KvType.parse(kv.type_k), KvType.parse(kv.type_v)
    return PageGeometry(
        page_tokens=kv.page_tokens,
        kv_heads=heads,
        k_dim=k_dim,
        v_dim=v_dim,
        k_type=k_type,
        v_type=v_type,
        k_rotation=hadamard_block(k_type, k_dim, is_key=True) if kv.rotation else 0,
        v_rotation=hadamard_block(v_type, v_dim, is_key=False) if kv.rotation else 0,
    )

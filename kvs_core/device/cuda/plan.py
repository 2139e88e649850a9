"""A layer's plan on the device: what ``Ops.load_plan`` returns."""

from __future__ import annotations

from dataclasses import dataclass

from kvs_core.device.cuda.tables import PlanLayout
from kvs_core.paging.spans import LayerPlan


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Device addresses of the parts of a plan table (see ``tables``), and the plan that it holds."""

    plan: LayerPlan
    header: int
    slots: int
    calls: int
    parts: int
    folds: int

    @classmethod
    def at(cls, address: int, layout: PlanLayout, plan: LayerPlan) -> DevicePlan:
        """The plan in a table that begins at ``address``."""
        return cls(
            plan=plan,
            header=address,
            slots=address + 4 * layout.slots_at,
            calls=address + 4 * layout.calls_at,
            parts=address + 4 * layout.parts_at,
            folds=address + 4 * layout.folds_at,
        )

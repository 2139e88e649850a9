"""``--plot``: the forecast over the context as a picture."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from kvs_cli.ending import OutputError
from kvs_cli.plan.plan import Plan
from kvs_core.errors import CapabilityError, SettingsError
from kvs_core.units import mib_ceil

_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Before anything is done: ``SettingsError`` for a file that cannot be, ``CapabilityError`` if nothing can draw."""
    if path.suffix.lower() not in _SUFFIXES:
        raise SettingsError(f"--plot {path}: give a name that ends in {', '.join(_SUFFIXES)}")
    if not path.parent.is_dir():
        raise SettingsError(f"--plot {path}: there is no folder {path.parent}; make it first")
    if find_spec("matplotlib") is None:
        raise CapabilityError("--plot needs matplotlib, which is not installed; pip install 'kvs-llm[bench]'")


def draw(plan: Plan, path: Path) -> None:
    """Times of a round over the context, and the tokens/s that they make."""
    figure = import_module("matplotlib.figure").Figure(figsize=(8, 7), layout="constrained")
    times, speeds = figure.subplots(2, 1, sharex=True)
    tokens = [point.tokens for point in plan.points]
    lines = {
        "round": [1e3 * point.round_s for point in plan.points],
        "kernels of its step": [1e3 * point.kernels_s for point in plan.points],
        "link of its step": [1e3 * point.link_s for point in plan.points],
    }
    for name, values in lines.items():
        times.plot(tokens, values, marker="o", label=name)
    times.set_ylabel("ms")
    yields = {"": None} if plan.rounds.tokens is not None else {"no draft accepted": 1, "all drafts accepted": None}
    for name, brought in yields.items():
        rate = [(brought or plan.rounds.tokens or point.rows) / point.round_s for point in plan.points]
        speeds.plot(tokens, rate, marker="o", label=name or None)
    speeds.set_ylabel("tokens/s")
    speeds.set_ylim(bottom=0)
    speeds.set_xlabel("tokens in the context")
    arena = mib_ceil(plan.setup.budget.memory.arena_bytes)
    times.set_title(
        f"{plan.model.spec.name} on {plan.device_name}: K {plan.setup.kv.type_k}, V {plan.setup.kv.type_v}, "
        f"arena {arena} MiB (foretold)", fontsize="medium",
    )
    for axes in (times, speeds):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise OutputError(f"--plot {path}: {error.strerror}") from error

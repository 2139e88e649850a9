"""``kvs plan``: before the weights are loaded, whether a model fits and how fast it will be over its context.

    file, device ─ what is free ─ budget ─ rates of the device (measured once) ─ forecast over the context
                                                                              ─ with another arena or other KV types
"""

from __future__ import annotations

from contextlib import closing

from kvs_cli.open_model import open_model, plan_context
from kvs_cli.plan.facts import facts
from kvs_cli.plan.plan import make_plan
from kvs_cli.plan.plot import check_plot, draw
from kvs_cli.plan.text import print_tables, sections
from kvs_cli.render import Screen, print_json, print_sections
from kvs_core.device.choose import open_device
from kvs_core.settings import PlanSettings
from kvs_core.speculative.drafter import verify_width


def execute(settings: PlanSettings) -> int:
    """Print it; the exit code. Raises ``KvsError``, also for what does not fit."""
    if settings.plot is not None:
        check_plot(settings.plot)
    screen = Screen.of(settings.logging)
    model = open_model(settings.engine.model, screen, settings.engine.rope)
    context = plan_context(model, settings.engine)
    speculative = settings.engine.speculative
    verify_width(speculative, ubatch_tokens=context.ubatch_tokens, context_tokens=context.context_tokens)
    with closing(open_device(settings.engine.device)) as device:
        plan = make_plan(model, settings.engine, device, measure=settings.measure)
    told = facts(plan)
    if settings.plot is not None:
        draw(plan, settings.plot)
    if settings.json:
        print_json(told)
    else:
        print_sections(sections(plan, told))
        print_tables(plan)
    return 0

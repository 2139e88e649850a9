"""All checks of the facts, and whether kvs can run. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvs_cli.doctor.check import Check, problem, warning
from kvs_cli.doctor.facts import Facts
from kvs_cli.doctor.gpu_checks import gpu_checks
from kvs_cli.doctor.host_checks import cache_check, host_checks, settings_checks


def judge(facts: Facts) -> tuple[Check, ...]:
    """The lines of the table."""
    failed = tuple(
        warning(name, f"not known: {line.partition('; ')[0]}", _advice(line)) for name, line in facts.failed.items()
    )
    return (*host_checks(facts), *gpu_checks(facts), *cache_check(facts), *settings_checks(facts), *failed,
            _device(facts))


def can_run(checks: Sequence[Check]) -> bool:
    """Whether nothing makes it impossible."""
    return not any(check.fatal for check in checks)


def _device(facts: Facts) -> Check:
    device, gpus = facts.device, facts.cuda.gpus
    if device is None:
        return problem("device", "none works", "mend the CPU's line above, or a GPU's", fatal=True)
    others = [each.gpu.index for each in gpus if each.problem is None]
    if device == "cpu" and others:
        return warning("device", f"--device auto takes {device}", f"give --device cuda:{others[0]}, which works")
    if device == "cpu" and gpus:
        return warning("device", f"--device auto takes {device}", "mend what the lines above say of the GPU, for speed")
    return Check("device", f"--device auto takes {device}")


def _advice(line: str) -> str:
    return line.partition("; ")[2] or "kvs may run all the same; if it does not, begin with this line"

"""``kvs doctor``: what this machine has for kvs, how fast it is, and what to do where something is wrong.

    probes, each guarded ─ facts ─ checks with verdicts and advice ─ a table, or JSON
"""

from __future__ import annotations

from kvs_cli.doctor.gather import gather
from kvs_cli.doctor.text import as_json, print_report
from kvs_cli.doctor.verdicts import can_run, judge
from kvs_cli.ending import FAILED
from kvs_cli.render import print_json


def execute(version: str, *, json: bool) -> int:
    """Print it; the exit code: 0 if kvs can run here, on a GPU or on the CPU."""
    facts = gather(version)
    checks = judge(facts)
    if json:
        print_json(as_json(facts, checks))
    else:
        print_report(facts, checks)
    return 0 if can_run(checks) else FAILED

"""``kvs doctor``: what this machine has for kvs, and what to do about it.

    gather.py        asks, one guarded probe each, and fills in
    facts.py         what was found: plain values, None where not known
    verdicts.py      facts in, checks with advice out; of the host and of GPUs in *_checks.py. Pure
    text.py          the table, and the same for --json
"""

"""``kvs bench sweep`` and ``compare``: measurements that name their limits, every point in a fresh process.

    grid      contexts x variants x repeats, as values                       columns   what a row says
    checks    what a model's file says before anything is made
    worker    the process of one point: measure ─ an engine, its rounds      processes starts it, reads its answer
    arenas    the largest arena that works                                   store     JSONL and CSV on disk, resume
    sweep     the loop over all points                                       plots, summary, machine   what is left
    compare   engines behind HTTP, and offloaded, asked in turn
"""

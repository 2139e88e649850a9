"""Settings of logging. Log lines go to stderr: stdout carries the generated text alone."""

from __future__ import annotations

from functools import partial

from kvs_core.settings.kinds import ON_OFF_AUTO, PATH, SWITCH, integer
from kvs_core.settings.setting import Group, Rule, Setting

_logging = partial(Setting, group=Group.LOGGING)

SETTINGS = (
    _logging("verbosity", ("-lv", "--verbosity", "--log-verbosity"), integer(0, 1 << 15),
        "What is logged: 0 nothing, 1 errors, 2 warnings, 3 phases of the run, 4 and above everything.",
        default=3, env="LLAMA_ARG_LOG_VERBOSITY"),
    _logging("verbose", ("-v", "--verbose", "--log-verbose"), SWITCH,
        "Log everything.",
        default=False),
    _logging("log_disable", ("--log-disable",), SWITCH,
        "Log nothing.",
        default=False),
    _logging("log_file", ("--log-file",), PATH,
        "Also append the log to a file.",
        env="LLAMA_ARG_LOG_FILE"),
    _logging("log_jsonl", ("--log-jsonl",), SWITCH,
        "Log one JSON object per line, without colours.",
        default=False, env="LLAMA_ARG_LOG_JSONL", off=("--no-log-jsonl",)),
    _logging("log_colors", ("--log-colors",), ON_OFF_AUTO,
        "Colours in the log; auto: on a terminal.",
        default="auto", env="LLAMA_ARG_LOG_COLORS"),
    _logging("log_prefix", ("--log-prefix",), SWITCH,
        "Start log lines with their level and source.",
        default=False, env="LLAMA_ARG_LOG_PREFIX", off=("--no-log-prefix",)),
    _logging("log_timestamps", ("--log-timestamps",), SWITCH,
        "Start log lines with the time.",
        default=False, env="LLAMA_ARG_LOG_TIMESTAMPS", off=("--no-log-timestamps",)),
    _logging("perf", ("--perf",), SWITCH,
        "Time the library's inner steps.",
        default=False, relevance="accept", env="LLAMA_ARG_PERF", off=("--no-perf",),
        note=(Rule("timings are always measured and reported"),)),
    _logging("log_prompts_dir", ("--log-prompts-dir",), PATH,
        "Write every prompt to a file in this folder.",
        relevance="accept", commands=("serve",), note=(Rule("prompts are not written to files"),)),
)

"""Settings of the command itself, of the prompt and of what is printed."""

from __future__ import annotations

from functools import partial

from kvs_core.settings.kinds import PATH, SWITCH, TEXT, integer
from kvs_core.settings.setting import Group, Rule, Setting

_general = partial(Setting, group=Group.GENERAL)
_prompt = partial(Setting, group=Group.PROMPT, commands=("run",))

SETTINGS = (
    _general("help", ("-h", "--help", "--usage"), SWITCH,
        "Print this help and exit.",
        default=False),
    _general("help_all", ("--help-all",), SWITCH,
        "Print the help with every setting, also those that kvs takes only for llama-server's sake and those it "
        "refuses, and exit.",
        default=False),
    _general("version", ("--version",), SWITCH,
        "Print the version and exit.",
        default=False),
    _general("completion_bash", ("--completion-bash",), SWITCH,
        "Print a completion script for bash and exit.",
        default=False, relevance="accept"),
    _general("config", ("--config",), PATH,
        "Read settings from a YAML file: keys are flag names without their dashes, switches take on or off. Variables "
        "and flags win over it."),
    _general("escape", ("-e", "--escape"), SWITCH,
        "Expand \\n, \\t, \\xHH and the like in --prompt, --system-prompt, --reverse-prompt and "
        "--dry-sequence-breaker. Files are always read as they are.",
        default=True, off=("--no-escape",), commands=("run", "serve")),
    _general("warmup", ("--warmup",), SWITCH,
        "Prepare what the device compiles at first use before the first token.",
        default=True, off=("--no-warmup",), commands=("run", "serve"),
        note=(Rule("the CPU device has nothing to prepare"),)),
    _prompt("prompt", ("-p", "--prompt"), TEXT,
        "The prompt itself."),
    _prompt("file", ("-f", "--file"), PATH,
        "Read the prompt from a file, the same as PROMPT_FILE."),
    _prompt("session", ("--session",), PATH,
        "Keep what was read and written in this file, and take from it what the prompt shares with it: a long text is "
        "read once. An empty prompt goes on with the text where it ended."),
    _prompt("chat", ("--chat",), SWITCH,
        "Wrap the prompt as a user message in the model's chat template. Without it the model continues the bare text.",
        default=False),
    _prompt("system_prompt", ("-sys", "--system-prompt"), TEXT,
        "System message before the user's; needs --chat."),
    _prompt("json", ("--json",), SWITCH,
        "Print one JSON object instead of text: tokens, timings, stop reason, KV traffic; of info and plan: what "
        "they show. A command that fails prints one with the error. There is none where the command line itself is "
        "refused: a flag or a value that is unknown or refused, in a variable or in --config too, a --config that "
        "cannot be read, an argument too many.",
        default=False, commands=("run", "info", "plan")),
    _prompt("plot", ("--plot",), PATH,
        "Draw the forecast over the context into this file, a PNG, SVG or PDF by its name.",
        commands=("plan",)),
    _prompt("measure", ("--measure",), SWITCH,
        "Measure the device's rates now. Else those are taken that an earlier kvs plan kept in ~/.cache/kvs/rates, or "
        "$KVS_CACHE_DIR/rates; where the device, its driver or threads, or kvs's code for it has changed since then "
        "they are measured in any case.",
        default=False, commands=("plan",)),
    _prompt("n_probs", ("--n-probs",), integer(0, 1 << 20),
        "Report the log-probabilities of the N likeliest tokens at every step, in the result of --json.",
        default=0, unit="tokens", needs="json", needed_by=("run",)),
    _prompt("special", ("-sp", "--special"), SWITCH,
        "Print special tokens, such as the end of a turn, as text.",
        default=False, commands=("run", "serve")),
    _prompt("reverse_prompt", ("-r", "--reverse-prompt"), TEXT,
        "Stop when the text ends with this; repeat it for several. The stop string itself is not printed.",
        default=(), append=True, commands=("run", "serve")),
)

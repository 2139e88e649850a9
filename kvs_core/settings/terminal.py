"""Settings of llama-cli for conversations in a terminal, which kvs does not have: each says what there is instead."""

from __future__ import annotations

from functools import partial

from kvs_core.settings.kinds import ANY, SWITCH, TEXT, integer
from kvs_core.settings.setting import Group, Rule, Setting

_refused = partial(Setting, group=Group.TERMINAL, relevance="reject")
_taken = partial(Setting, group=Group.TERMINAL, relevance="accept")

_CHAT = Rule("there is no chat in the terminal; use kvs serve and its page, or kvs run --chat for one answer")
_ONE_TURN = Rule("leave it out: kvs run ends after one answer in any case, kvs run --chat in the model's template")
_TEMPLATE = Rule("the chat template says what stands around a message; give another one with --chat-template")
_SESSION = Rule("use kvs run --session FILE, which keeps what was read and written and goes on from there")
_SELF_EXTEND = Rule("attention is computed as the model was trained; for a longer context use --rope-scaling yarn and "
                    "--rope-scale")

SETTINGS = (
    _refused("conversation", ("-cnv", "--conversation"), SWITCH,
        "A conversation in the terminal.",
        default=False, off=("-no-cnv", "--no-conversation"), refuse=(_CHAT,)),
    _refused("interactive", ("-i", "--interactive"), SWITCH,
        "Ask for more text in the terminal.",
        default=False, refuse=(_CHAT,)),
    _refused("interactive_first", ("-if", "--interactive-first"), SWITCH,
        "Ask for text in the terminal at once.",
        default=False, refuse=(_CHAT,)),
    _refused("multiline_input", ("-mli", "--multiline-input"), SWITCH,
        "Several lines of text in the terminal.",
        default=False, refuse=(_CHAT,)),
    _refused("instruct", ("-ins", "--instruct"), SWITCH,
        "A conversation in Alpaca's template.",
        default=False, refuse=(_CHAT,)),
    _refused("chatml", ("-cml", "--chatml"), SWITCH,
        "A conversation in ChatML.",
        default=False, refuse=(_CHAT,)),
    _refused("single_turn", ("-st", "--single-turn"), SWITCH,
        "A conversation of one turn.",
        default=False, refuse=(_ONE_TURN,)),
    _refused("in_prefix", ("--in-prefix",), TEXT,
        "Text before what the user writes.",
        refuse=(_TEMPLATE,)),
    _refused("in_suffix", ("--in-suffix",), TEXT,
        "Text behind what the user writes.",
        refuse=(_TEMPLATE,)),
    _refused("in_prefix_bos", ("--in-prefix-bos",), SWITCH,
        "A BOS token before what the user writes.",
        default=False, refuse=(_TEMPLATE,)),
    _refused("system_prompt_file", ("-sysf", "--system-prompt-file"), ANY,
        "System message, in a file.",
        refuse=(Rule("give the text itself with kvs run --chat --system-prompt TEXT"),)),
    _refused("binary_file", ("-bf", "--binary-file"), ANY,
        "Prompt of any bytes, in a file.",
        refuse=(Rule("a prompt is text in UTF-8; give it with kvs run --file FILE"),)),
    _refused("prompt_cache", ("--prompt-cache",), ANY,
        "File that keeps the prompt's state.",
        refuse=(_SESSION,)),
    _refused("prompt_cache_all", ("--prompt-cache-all",), SWITCH,
        "Keep the state of the generated text too.",
        default=False, refuse=(_SESSION,)),
    _refused("prompt_cache_ro", ("--prompt-cache-ro",), SWITCH,
        "Read the prompt's state and do not write it.",
        default=False, refuse=(_SESSION,)),
    _refused("grp_attn_n", ("-gan", "--grp-attn-n"), ANY,
        "Self-extend: factor of a group.",
        refuse=(_SELF_EXTEND,)),
    _refused("grp_attn_w", ("-gaw", "--grp-attn-w"), ANY,
        "Self-extend: width of a group.",
        refuse=(_SELF_EXTEND,)),
    _refused("color", ("-co", "--color"), SWITCH,
        "Prompt and text in colours.",
        default=False,
        refuse=(Rule("kvs run prints the text alone, as it is; leave it out, or use --log-colors for log lines"),)),
    _taken("display_prompt", ("--display-prompt",), SWITCH,
        "Print the prompt before the text.",
        default=False, off=("--no-display-prompt",), note=(Rule("kvs run prints the text alone"),)),
    _taken("simple_io", ("--simple-io",), SWITCH,
        "Plain input and output.",
        default=False, note=(Rule("input and output are plain in any case"),)),
    _taken("verbose_prompt", ("--verbose-prompt",), SWITCH,
        "Print the prompt's tokens.",
        default=False, note=(Rule("kvs run prints no tokens; kvs serve gives them at POST /tokenize"),)),
    _taken("show_timings", ("--show-timings",), SWITCH,
        "Print timings after each answer.",
        default=True, off=("--no-show-timings",), env="LLAMA_ARG_SHOW_TIMINGS",
        note=(Rule("speeds are log lines; --verbosity 2 leaves them out"),)),
    _taken("print_token_count", ("--print-token-count",), integer(-1),
        "Print the count of tokens every so many.",
        default=-1, note=(Rule("the count is told at the end, and by --json"),)),
)

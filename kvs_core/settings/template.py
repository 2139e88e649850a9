"""Settings of the chat template and of reasoning."""

from __future__ import annotations

from functools import partial

from kvs_core.settings.kinds import JSON_OBJECT, ON_OFF_AUTO, PATH, SWITCH, TEXT, choice, integer, pattern
from kvs_core.settings.setting import Group, Rule, Setting

_template = partial(Setting, group=Group.TEMPLATE, commands=("run", "serve"), needs="chat", needed_by=("run",))
_replies = partial(Setting, group=Group.TEMPLATE, commands=("serve",))
_JINJA = pattern(
    "JINJA", "(?s).*\\{.*", "{{ messages[0].content }}",
    expected="the text of a Jinja template (a name is none; for a file there is --chat-template-file)",
)

SETTINGS = (
    _template("chat_template", ("--chat-template",), _JINJA,
        "Chat template to use instead of the model's: its Jinja text. Names of built-in formats are not known.",
        env="LLAMA_ARG_CHAT_TEMPLATE"),
    _template("chat_template_file", ("--chat-template-file",), PATH,
        "Chat template in a file.",
        env="LLAMA_ARG_CHAT_TEMPLATE_FILE"),
    _template("chat_template_kwargs", ("--chat-template-kwargs",), JSON_OBJECT,
        "More variables for the template, as a JSON object.",
        env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS"),
    _template("jinja", ("--jinja",), SWITCH,
        "Render templates with Jinja, in a sandbox.",
        default=True, env="LLAMA_ARG_JINJA", off=("--no-jinja",),
        refuse=(Rule("chat templates are always Jinja; give another one with --chat-template-file", only=(False,)),)),
    _template("reasoning", ("-rea", "--reasoning"), ON_OFF_AUTO,
        "Let the template ask the model to think first; auto: as the template does by itself.",
        default="auto", env="LLAMA_ARG_REASONING"),
    _template("reasoning_effort", ("--reasoning-effort",), pattern("LEVEL", "[A-Za-z0-9_-]{1,40}", "low"),
        "How much to think, for templates that know the word; default: the template's own.",
        default="default", env="LLAMA_ARG_REASONING_EFFORT"),
    _replies("reasoning_format", ("--reasoning-format",), choice("none", "auto", "deepseek", "deepseek-legacy"),
        "Where thoughts stand in replies.",
        default="deepseek", env="LLAMA_ARG_THINK"),
    _replies("reasoning_budget", ("--reasoning-budget",), integer(-1, 1 << 31),
        "Most tokens of thought; 0: none, -1: no limit.",
        default=-1, unit="tokens", env="LLAMA_ARG_THINK_BUDGET"),
    _replies("reasoning_budget_message", ("--reasoning-budget-message",), TEXT,
        "Text put in when the budget ends.",
        env="LLAMA_ARG_THINK_BUDGET_MESSAGE"),
    _replies("reasoning_preserve", ("--reasoning-preserve",), SWITCH,
        "Keep the thoughts of earlier turns.",
        default=True, env="LLAMA_ARG_REASONING_PRESERVE", off=("--no-reasoning-preserve",)),
    _replies("skip_chat_parsing", ("--skip-chat-parsing",), SWITCH,
        "Return the model's text without looking for thoughts and tool calls.",
        default=False, env="LLAMA_ARG_SKIP_CHAT_PARSING", off=("--no-skip-chat-parsing",)),
    _replies("prefill_assistant", ("--prefill-assistant",), SWITCH,
        "Continue a trailing assistant message.",
        default=True, env="LLAMA_ARG_PREFILL_ASSISTANT", off=("--no-prefill-assistant",)),
)

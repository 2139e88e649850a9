"""The table of settings keeps its own rules, and the rooms receive values that hold."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.errors import SettingsError
from kvs_core.settings import ContextSettings, DeviceSettings, KvSettings
from kvs_core.settings.escapes import expand_escapes
from kvs_core.settings.setting import Rule, Setting
from kvs_core.settings.table import BY_FLAG, TABLE, yaml_name

every_setting = pytest.mark.parametrize("setting", TABLE, ids=lambda setting: setting.key)


def repeated(names: list[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def test_no_name_is_declared_twice() -> None:
    """A flag, a key and a variable each stand for one setting; so does a YAML key."""
    assert not repeated([setting.key for setting in TABLE])
    assert not repeated([flag for setting in TABLE for flag in (*setting.flags, *setting.off)])
    variables = [name for setting in TABLE for name in (setting.env, setting.env_absent, setting.env_off)]
    assert not repeated(list(filter(None, variables)))
    assert not repeated([name for setting in TABLE
                         for name in {yaml_name(flag) for flag in (*setting.flags, *setting.off)}])


@every_setting
def test_declaration_is_complete(setting: Setting) -> None:
    """Flags look like flags, the help is sentences, and whatever is refused or without effect says why."""
    for flag in (*setting.flags, *setting.off):
        assert re.fullmatch(r"--?[A-Za-z][a-zA-Z0-9.-]*", flag)
    assert setting.help.endswith(".")
    assert setting.help[0].isupper() or setting.help.startswith(("ngram-", "general."))
    assert all(rule.text and not rule.text.endswith(".") for rule in (*setting.refuse, *setting.note))
    assert not (setting.off and setting.kind.arity), "only switches come in pairs"
    assert setting.commands


@every_setting
def test_refusals_say_what_to_use(setting: Setting) -> None:
    """Every refusal names the way out; every setting marked reject has one."""
    assert setting.refuse or setting.relevance != "reject"
    for rule in setting.refuse:
        assert re.search(r"\b(use|give|leave it out|bound it|describe|merge)\b", rule.text)
    assert not setting.refusal(setting.default)


@every_setting
def test_samples_and_default_are_values(setting: Setting) -> None:
    """The kind's samples parse, and a default reads back from the text that stands for it."""
    for sample in setting.kind.samples:
        setting.kind.parse(sample)
    default = setting.default
    if isinstance(default, bool | int | float | str) and default != "":
        text = {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)
        assert setting.kind.parse(text) == default


def test_rule_judges_parts() -> None:
    """``only`` and ``unless`` look at every part of a value of several parts."""
    assert Rule("x", only=("a",)).applies(("b", "a"))
    assert not Rule("x", only=("a",)).applies(("b",))
    assert Rule("x", unless=("a",)).applies(("a", "b"))
    assert not Rule("x", unless=("a",)).applies(("a",))
    assert Rule("x").applies(False)


@pytest.mark.parametrize(
    ("asked", "train", "expected"),
    [
        (ContextSettings(ctx_size=300), 8192, (512, 300, 300, False)),
        (ContextSettings(), 8192, (8192, 2048, 512, False)),
        (ContextSettings(), 1000, (1000, 1000, 512, False)),
        (ContextSettings(ctx_size=9000), 8192, (8192, 2048, 512, True)),
        (ContextSettings(ctx_size=4096, batch=100, ubatch=512), 8192, (4096, 100, 100, False)),
    ],
)
def test_context_rules(asked: ContextSettings, train: int, expected: tuple[int, int, int, bool]) -> None:
    """The context is rounded up to 256 and held to the training length; batches are held to it as asked for."""
    plan = asked.plan(train, train)
    assert (plan.context_tokens, plan.batch_tokens, plan.ubatch_tokens, plan.capped) == expected


@given(
    st.integers(0, 1 << 31), st.integers(1, 1 << 31), st.integers(1, 1 << 31), st.integers(1, 1 << 31),
    st.sampled_from([0, 1, 300, 1 << 20]),
)
def test_context_plan_always_fits(ctx_size: int, batch: int, ubatch: int, train: int, more: int) -> None:
    """0 < ubatch <= batch <= context <= the longest one, whatever is asked for; unasked it is about the training
    length."""
    most = train + more
    plan = ContextSettings(ctx_size=ctx_size, batch=batch, ubatch=ubatch).plan(train, most)
    assert 0 < plan.ubatch_tokens <= plan.batch_tokens <= plan.context_tokens <= most
    assert plan.context_tokens % 256 == 0 or plan.context_tokens == most
    assert plan.context_tokens >= min(ctx_size, most)
    assert ctx_size or train <= plan.context_tokens < train + 256


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"page_tokens": 100}, "multiple of 32"),
        ({"arena_mib": 5, "pool_mib": 5}, "exclude each other"),
        ({"arena_mib": 0}, "at least 1 MiB"),
        ({"type_k": "q3_k"}, "not a K/V type"),
        ({"run_pages": -1}, "0 for the engine's choice"),
    ],
)
def test_kv_settings_check_themselves(values: dict[str, object], words: str) -> None:
    """A KV value that cannot hold is refused when it is made."""
    with pytest.raises(SettingsError, match=words):
        KvSettings(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "asked", "on_gpu", "on_host"),
    [("auto", None, None, None), ("auto", 7, 7, None), ("cuda", 0, 0, None), ("cpu", 7, 7, 7), ("cpu", 0, 0, None)],
)
def test_layers_on_the_device(name: str, asked: int | None, on_gpu: int | None, on_host: int | None) -> None:
    """On the CPU nothing passes unless it plays the GPU; without a layer on the GPU it is just the CPU."""
    device = DeviceSettings(name, gpu_layers=asked)
    assert device.layers_on(is_host=False) == on_gpu
    assert device.layers_on(is_host=True) == on_host


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"a\nb\tc\rd", "a\nb\tc\rd"),
        (r"\\n \" \'", "\\n \" '"),
        (r"\xc3\xa9 \x41", "é A"),
        (r"\d \x4 C:\\", "\\d \\x4 C:\\"),
        ("\\", "\\"),
    ],
)
def test_escapes(text: str, expected: str) -> None:
    """The escapes of llama.cpp are expanded once; what is none stays."""
    assert expand_escapes(text, "-p") == expected


def test_escapes_that_make_no_text_are_refused() -> None:
    """Half a character given as bytes is an error that names the flag."""
    with pytest.raises(SettingsError, match=r"^-p: its \\xHH escapes make no valid UTF-8"):
        expand_escapes(r"\xc3", "-p")


@given(st.text(alphabet=st.characters(exclude_characters="\\", exclude_categories=["Cs"])))
def test_text_without_backslashes_is_untouched(text: str) -> None:
    """Expanding escapes changes nothing else."""
    assert expand_escapes(text, "-p") == text


def test_lookup_covers_every_flag() -> None:
    """Every spelling finds its own setting."""
    for setting in TABLE:
        for flag in (*setting.flags, *setting.off):
            assert BY_FLAG[flag] is setting

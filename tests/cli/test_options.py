"""Reading settings keeps llama-server's rules, names what does nothing, and refuses with a reason."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_cli.options import Parsed, parse
from kvs_core.errors import SettingsError
from kvs_core.settings import KvSettings, SpeculativeSettings
from kvs_core.settings.setting import Command, Setting
from kvs_core.settings.table import BY_FLAG, BY_KEY, DEFAULTS, TABLE, yaml_name
from kvs_core.settings.typed import run_settings
from tests.support.examples import examples

every_setting = pytest.mark.parametrize("setting", TABLE, ids=lambda setting: setting.key)

KNOWN_LINE = shlex.split(
    "--model M --ctx-size 262144 --parallel 1 --batch-size 256 --ubatch-size 256 --n-gpu-layers 999 --flash-attn on "
    "--cache-type-k q8_0 --cache-type-v q4_0 --kv-stream-arena-mib 2240 --spec-type draft-mtp --spec-draft-n-max 3 "
    "--fit off --no-mmproj")


def run(*argv: str, environ: Mapping[str, str] | None = None) -> Parsed:
    return parse(argv, environ or {}, "run")


def refusal(*argv: str, environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        run(*argv, environ=environ)
    return str(caught.value)


def arguments(flag: str, setting: Setting, sample: str) -> list[str]:
    return [flag, *sample.split(" ", setting.kind.arity - 1)] if setting.kind.arity else [flag]


def values_of(setting: Setting) -> list[tuple[list[str], object]]:
    """Every way to give the setting: arguments, and the single value that they mean."""
    ways: list[tuple[list[str], object]] = [([flag], False) for flag in setting.off]
    for flag in setting.flags:
        if not setting.kind.arity:
            ways.append(([flag], True))
            continue
        ways += [(arguments(flag, setting, sample), setting.kind.parse(sample)) for sample in setting.kind.samples]
    return ways


def stored(setting: Setting, value: object) -> object:
    return (value,) if setting.append and not setting.kind.many else value


@every_setting
def test_every_setting_from_the_command_line(setting: Setting) -> None:
    """Under every spelling, a value that can be honoured arrives, and any other is refused with its reason."""
    if setting.key == "config":
        return
    refused = 0
    for argv, value in values_of(setting):
        reason = setting.refusal(stored(setting, value))
        if reason and ("run" in setting.commands or setting.relevance == "reject"):
            refused += 1
            message = refusal(*argv)
            assert message.startswith(argv[0])
            assert message.endswith(reason)
        else:
            parsed = run(*argv)
            assert parsed.values[setting.key] == stored(setting, value)
            assert setting.key in parsed.explicit
            assert len(parsed.notices) <= 1
    assert refused or setting.relevance != "reject"


@every_setting
def test_every_setting_from_yaml(setting: Setting, tmp_path: Path) -> None:
    """Every flag is a key of the YAML file, with dashes or underscores, and means the same there."""
    if setting.key == "config":
        return
    for flag in (*setting.flags, *setting.off):
        for key in {yaml_name(flag), yaml_name(flag).replace("-", "_")}:
            sample = "on" if not setting.kind.arity else setting.kind.samples[0]
            file = tmp_path / "kvs.yaml"
            file.write_text(f"{key}: '{sample}'\n")
            value = stored(setting, flag not in setting.off if not setting.kind.arity else setting.kind.parse(sample))
            if setting.refusal(value) and ("run" in setting.commands or setting.relevance == "reject"):
                assert refusal("--config", str(file)).startswith(f"kvs.yaml: {key}: ")
            else:
                assert run("--config", str(file)).values[setting.key] == value


@pytest.mark.parametrize("setting", [setting for setting in TABLE if setting.env], ids=lambda setting: setting.env)
def test_every_variable(setting: Setting) -> None:
    """A variable sets what its flag sets; empty, it says nothing."""
    sample = "on" if not setting.kind.arity else setting.kind.samples[0]
    value = stored(setting, setting.kind.parse(sample))
    if setting.refusal(value) and ("run" in setting.commands or setting.relevance == "reject"):
        assert refusal(environ={setting.env: sample}).startswith(setting.env)
    else:
        assert run(environ={setting.env: sample}).values[setting.key] == value
    assert setting.key not in run(environ={setting.env: ""}).explicit


@pytest.mark.parametrize("setting", [row for row in TABLE if row.env_absent], ids=lambda setting: setting.key)
def test_presence_of_a_no_variable_means_off(setting: Setting) -> None:
    """LLAMA_ARG_NO_X turns a pair off by being set, even to nothing, and wins over LLAMA_ARG_X."""
    environ = {setting.env_absent: "", setting.env: "on"}
    if setting.refusal(False):
        assert setting.refusal(False) in refusal(environ=environ)
    else:
        assert run(environ=environ).values[setting.key] is False


def test_the_known_command_line_is_accepted_flag_for_flag() -> None:
    """The command line that users of the C++ original know is taken, and nothing of it is without effect."""
    parsed = run(*KNOWN_LINE, "prompt.txt")
    assert parsed.notices == ()
    engine = run_settings(parsed.values, parsed.explicit, parsed.positionals).engine
    assert engine.kv == KvSettings(type_k="q8_0", type_v="q4_0", arena_mib=2240, fit=False)
    assert (engine.context.ctx_size, engine.context.batch, engine.context.ubatch) == (262144, 256, 256)
    assert engine.model.source == Path("M")
    assert engine.speculative == SpeculativeSettings(types=("draft-mtp",))
    assert engine.device.layers_on(is_host=False) == 999


def test_nothing_given_is_the_defaults() -> None:
    """Without arguments, variables or a file every value is its default and nothing is said."""
    parsed = run()
    assert dict(parsed.values) == dict(DEFAULTS)
    assert (parsed.explicit, parsed.notices, parsed.positionals) == (frozenset(), (), ())


def test_precedence(tmp_path: Path) -> None:
    """Command line over environment over YAML over default; a flag that overrides a variable says so."""
    file = tmp_path / "kvs.yaml"
    file.write_text("ctx_size: 256\nbatch-size: 16\nubatch-size: 8\n")
    environ = {"LLAMA_ARG_CTX_SIZE": "512", "LLAMA_ARG_BATCH": "32"}
    parsed = run("-c", "1024", "--config", str(file), environ=environ)
    assert [parsed.values[key] for key in ("ctx_size", "batch_size", "ubatch_size")] == [1024, 32, 8]
    assert parsed.notices == ("warning: LLAMA_ARG_CTX_SIZE is set, but -c overrides it",)


def test_an_overridden_variable_may_be_wrong() -> None:
    """What a flag overrides is not judged."""
    assert run("-np", "1", environ={"LLAMA_ARG_N_PARALLEL": "four"}).values["parallel"] == 1


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--ctx_size", "512"], "ctx_size", 512),
        (["--ctx_size=512"], "ctx_size", 512),
        (["--prompt=a=b"], "prompt", "a=b"),
        (["--seed", "-1"], "seed", -1),
        (["-p", "-m"], "prompt", "-m"),
        (["-fa", "1"], "flash_attn", "on"),
        (["-fa", "-1"], "flash_attn", "auto"),
        (["--fit", "disabled"], "fit", False),
        (["-no-kvu"], "kv_unified", False),
        (["--host", '"a,b",c'], "host", ("a,b", "c")),
        (["-l", "5+1.5", "-l", "7-inf"], "logit_bias", ((5, 1.5), (7, float("-inf")))),
        (["-r", "a", "-r", "b"], "reverse_prompt", ("a", "b")),
        (["--override-kv", "a=int:1,b=bool:true", "--override-kv", "c=int:2"], "override_kv",
         ("a=int:1", "b=bool:true", "c=int:2")),
        (["--spec-type", "ngram-mod", "--spec-type", "ngram-cache,draft-mtp"], "spec_type",
         ("ngram-mod", "ngram-cache", "draft-mtp")),
        (["--spec-type", "ngram-mod", "--spec-type", "draft-simple,none"], "spec_type", ("ngram-mod", "none")),
    ],
)
def test_the_grammar(argv: list[str], key: str, value: object) -> None:
    """Underscores, inline values, values that look like flags, on/off words, CSV with quotes, gathering flags."""
    assert run(*argv).values[key] == value


def test_a_repeated_flag_counts_once() -> None:
    """The last one counts and a warning says so, once; under whatever spelling."""
    parsed = run("-c", "1", "--ctx-size", "2", "--ctx-size", "3")
    assert parsed.values["ctx_size"] == 3
    assert parsed.notices == ("warning: --ctx-size is specified multiple times; the last one counts",)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ctx-sise", "3"], "invalid argument: --ctx-sise; did you mean --ctx-size?"),
        (["-nglx", "3"], "invalid argument: -nglx; did you mean -ngl?"),
        (["--"], "invalid argument: --; kvs run --help-all lists all of them"),
        (["-fa", "maybe"], "-fa: expected on, off or auto, got 'maybe'; usage: -fa, --flash-attn on|off|auto"),
        (["--chat-template", "chatml"],
         "--chat-template: expected the text of a Jinja template (a name is none; for a file there is "
         "--chat-template-file), got 'chatml'; usage: --chat-template JINJA"),
        (["a", "b"], "invalid argument: b; 'a' came before, and there is room for one argument without a flag"),
        (["-c"], "-c: expected value for argument; usage: -c, --ctx-size N"),
        (["--json=1"], "--json takes no value, got '1'; usage: --json"),
        (["-c", "12abc"], "-c: expected a whole number, got '12abc'; usage: -c, --ctx-size N"),
        (["-c", "-5"], "-c: -5 is too small; the least is 0; usage: -c, --ctx-size N"),
        (["--temp", "nan"], "--temp: expected a finite number, got 'nan'; usage: --temp, --temperature X"),
        (["-np", "4"], "-np 4: there is one slot, and requests take turns; use --parallel 1"),
        (["--device", "cpu,cuda"],
         "--device: expected one device, got 'cpu,cuda'; kvs uses a single one; "
         "usage: -dev, --device auto|cpu|cuda|cuda:N"),
        (["--kv-window-layers", "0-4=all,3=4"],
         "--kv-window-layers: layer 3 is named twice; usage: --kv-window-layers LAYERS=N|all,..."),
        (["--kv-window-layers", "9-3=all"],
         "--kv-window-layers: layers 9-3: the first one comes first, and none is above 65535; "
         "usage: --kv-window-layers LAYERS=N|all,..."),
        (["--kv-window-layers", "0-4"],
         "--kv-window-layers: expected layers and tokens such as 0-4=all or 7=4096, got '0-4'; "
         "usage: --kv-window-layers LAYERS=N|all,..."),
        (["--spec-type", "ngram-mod,draft-simple"],
         "--spec-type draft-simple: separate draft models are not loaded; use --spec-type draft-mtp, "
         "draft-resident or an ngram type"),
        (["--draft-max", "8"], "--draft-max: removed; use --spec-draft-n-max, or --spec-ngram-mod-n-max for ngram-mod"),
    ],
)
def test_errors_are_one_line_with_a_way_out(argv: list[str], message: str) -> None:
    """Unknown, malformed and refused arguments are named as written, with what to do."""
    assert refusal(*argv) == message


@pytest.mark.parametrize("command", ["info", "plan", "serve"])
def test_hints_are_those_of_the_command(command: Command, tmp_path: Path) -> None:
    """The help that lists all flags is that of the command at hand, for the command line and for YAML."""
    file = tmp_path / "some.yaml"
    file.write_text("qqqqqqqq: 1\n")
    for argv in (["--"], ["--config", str(file)]):
        with pytest.raises(SettingsError, match=f"; kvs {command} --help-all lists all of them$"):
            parse(argv, {}, command)


CHAT = "there is no chat in the terminal; use kvs serve and its page, or kvs run --chat for one answer"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        *(([flag], f"{flag}: {CHAT}") for flag in (
            "-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first", "-mli", "-ins", "-cml")),
        *(([flag], f"{flag}: leave it out: kvs run ends after one answer in any case, kvs run --chat in the model's "
                   "template") for flag in ("-st", "--single-turn")),
        *(([flag], f"{flag}: kvs run prints the text alone, as it is; leave it out, or use --log-colors for log lines")
          for flag in ("-co", "--color")),
        (["--in-prefix", "User: "],
         "--in-prefix: the chat template says what stands around a message; give another one with --chat-template"),
        (["--prompt-cache", "a.bin"],
         "--prompt-cache: use kvs run --session FILE, which keeps what was read and written and goes on from there"),
        (["-sysf", "s.txt"], "-sysf: give the text itself with kvs run --chat --system-prompt TEXT"),
        (["--image", "a.png"],
         "--image: kvs reads text only, no images, audio or video; leave it out, or use --no-mmproj"),
    ],
)
def test_flags_of_llama_cli_say_what_there_is_instead(argv: list[str], message: str) -> None:
    """What belongs to a dialogue in a terminal is answered with the chat that there is, not with a flag spelt alike."""
    assert refusal(*argv) == message


def test_flags_of_llama_cli_that_ask_for_what_is_done_anyway() -> None:
    """are taken without a word; those that ask for more say that it is not done."""
    assert run("-no-cnv", "--no-conversation", "--no-display-prompt").notices == (
        "warning: --no-conversation is specified multiple times; the last one counts",)
    assert run("--simple-io", "--display-prompt", "--no-show-timings").notices == (
        "--simple-io: no effect: input and output are plain in any case",
        "--display-prompt: no effect: kvs run prints the text alone",
        "--no-show-timings: no effect: speeds are log lines; --verbosity 2 leaves them out",
    )


def test_an_api_key_is_never_repeated_in_a_message() -> None:
    """Secrets given wrongly stay out of the error line."""
    assert "secret" not in refusal("--api-key", "secret,,x")


def test_what_does_nothing_is_named_once() -> None:
    """Flags without effect share a line per reason; values that are what kvs does anyway stay silent."""
    parsed = run("--host", "h", "--port", "1", "--prio", "2", "-C", "ff", "--poll", "50", "--no-host", "-np", "-1")
    assert parsed.notices == (
        "--host, --port: no effect on kvs run",
        "--prio, -C: no effect: threads are not pinned or scheduled here",
        "--no-host: no effect: weights are read as they are stored",
    )


def test_settings_that_need_another_one() -> None:
    """Without the switch that they serve, flags are named as without effect; with it they are not."""
    assert run("--n-probs", "3", "--chat-template", "{{ x }}").notices == (
        "--n-probs: no effect without --json", "--chat-template: no effect without --chat")
    assert run("-hft", "x").notices == ("-hft: no effect without --hf-repo",)
    idle = run("--spec-type", "ngram-simple", "--spec-draft-n-max", "5", "--spec-ngram-mod-n-max", "9",
               "--spec-ngram-simple-size-n", "3")
    assert idle.notices == ("--spec-draft-n-max: no effect without --spec-type draft-mtp or draft-resident",
                            "--spec-ngram-mod-n-max: no effect without --spec-type ngram-mod")
    assert run("--spec-default", "--spec-ngram-mod-n-max", "64").notices == ()
    assert run("--n-probs", "3", "--json", "--chat-template", "{{ x }}", "--chat").notices == ()


def test_variables_of_other_commands_and_programs_stay_silent() -> None:
    """A variable or a file serves several commands: only flags are named when they mean nothing to this one."""
    assert run(environ={"LLAMA_ARG_PORT": "9000", "HF_TOKEN": "x"}).notices == ()
    assert run(environ={"LLAMA_ARG_NUMA": "isolate"}).notices[0].startswith("LLAMA_ARG_NUMA: no effect")


def test_rotation_is_switched_off_by_its_variable() -> None:
    """LLAMA_ATTN_ROT_DISABLE=1 stores quantised K and V as they are; 0 does not."""
    assert run(environ={"LLAMA_ATTN_ROT_DISABLE": "1"}).values["rotation"] is False
    assert run(environ={"LLAMA_ATTN_ROT_DISABLE": "0"}).values["rotation"] is True
    assert run("--kv-rotation", "on", environ={"LLAMA_ATTN_ROT_DISABLE": "1"}).values["rotation"] is True


def test_actions_come_before_judgement() -> None:
    """--help and --version work beside values that would be refused."""
    assert run("--help", "-np", "4").values["help"] is True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ctx-sise: 3", "kvs.yaml: ctx-sise: no such setting; did you mean ctx-size?"),
        ("c: 3\nctx_size: 4", "kvs.yaml: ctx_size: the same setting as kvs.yaml: c; keep one of them"),
        ("c: 3\nc: 4", "'c' stands twice at line 2"),
        ("config: other.yaml", "cannot name another one"),
        ("c: [1, 2]", "takes one value, got a list of 2"),
        ("c: {a: 1}", "expected one value or a list of values"),
        ("- a", "expected lines such as 'ctx-size: 8192'"),
        ("a: [", "not valid YAML"),
        ("? [a]\n: b", "not valid YAML"),
        ("a: &a [*a]", "recursive node at line 1"),
        ("[" * 5000, "not valid YAML"),
        ("c: x", "kvs.yaml: c: expected a whole number, got 'x'"),
        ('prompt: "\\0"', "NUL"),
    ],
)
def test_bad_yaml_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    """A file that is no mapping of settings is refused with its name and the place."""
    file = tmp_path / "kvs.yaml"
    file.write_text(text)
    message = refusal("--config", str(file))
    assert words in message
    assert "\n" not in message


def test_yaml_values(tmp_path: Path) -> None:
    """YAML's own words keep the command line's meaning, lists are repeats, and negative names turn off."""
    file = tmp_path / "kvs.yaml"
    file.write_text("fit: off\nseed: 010\nreverse-prompt: [a, b]\nno-mmap: true\nno-escape: off\njson: on\n")
    values = run("--config", str(file)).values
    assert (values["fit"], values["seed"], values["reverse_prompt"]) == (False, 10, ("a", "b"))
    assert (values["mmap"], values["escape"], values["json"]) == (False, True, True)


def test_a_missing_or_empty_config(tmp_path: Path) -> None:
    """A file that cannot be read is an error; an empty one says nothing."""
    assert "No such file" in refusal("--config", str(tmp_path / "none.yaml"))
    assert "Is a directory" in refusal("--config", str(tmp_path))
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert run("--config", str(tmp_path / "empty.yaml")).explicit == {"config"}


@pytest.mark.parametrize("key", ["grammar", "spec_type", "special", "temperature"])
def test_info_takes_the_flags_of_run(key: str) -> None:
    """A command line of run works for info: what it does not use is named."""
    setting = BY_KEY[key]
    parsed = parse(arguments(setting.flags[0], setting, setting.kind.samples[0]), {}, "info")
    assert parsed.notices == (f"{setting.flags[0]}: no effect on kvs info",)


_ODD = ["-", "--", "-1", "0", "on", "auto", "a,b", "1e999", "\udcff", "=", "a\nb"]
_JUNK = st.one_of(st.text(max_size=20), st.sampled_from(_ODD), st.integers().map(str), st.floats().map(str))
_FLAG = st.sampled_from(sorted(set(BY_FLAG) - {"--config"}))
_SAMPLES = sorted({sample for setting in TABLE for sample in setting.kind.samples})
_INLINE = st.tuples(_FLAG, _JUNK).map("=".join)
_ARGV = st.lists(st.one_of(_FLAG, _JUNK, st.sampled_from(_SAMPLES), _INLINE), max_size=8)
_ENVIRON = st.dictionaries(st.sampled_from([setting.env for setting in TABLE if setting.env]), _JUNK, max_size=3)


@settings(max_examples=examples(400), deadline=None)
@given(_ARGV, _ENVIRON)
def test_any_input_ends_in_settings_or_a_settings_error(argv: list[str], environ: dict[str, str]) -> None:
    """No argument and no variable gets another exception out of parsing, and every message is one printable line."""
    try:
        parsed = parse(argv, environ, "run")
        run_settings(parsed.values, parsed.explicit, parsed.positionals)
    except SettingsError as error:
        lines = [str(error)]
    else:
        lines = list(parsed.notices)
    assert all(line.isprintable() for line in lines)

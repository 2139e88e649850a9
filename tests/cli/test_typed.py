"""A command line becomes the values that the rooms receive, or is refused where it contradicts itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from kvs_cli import app
from kvs_cli.options import parse
from kvs_core.errors import SettingsError
from kvs_core.paging.geometry import KvType
from kvs_core.paging.residency import ResidencyMode
from kvs_core.settings import KV_TYPES, PromptSettings, RunSettings, rooms
from kvs_core.settings.drafters import (
    ModelDraftSettings,
    NgramCacheSettings,
    NgramMapSettings,
    NgramModSettings,
    NgramSimpleSettings,
    SpeculativeSettings,
)
from kvs_core.settings.rooms import ALL_LAYERS
from kvs_core.settings.setting import Command
from kvs_core.settings.table import BY_KEY, TABLE
from kvs_core.settings.typed import info_settings, plan_settings, run_settings, serve_settings


def typed(*argv: str) -> RunSettings:
    parsed = parse(["-m", "M", *argv], {}, "run")
    return run_settings(parsed.values, parsed.explicit, parsed.positionals)


def test_sampling_values_under_their_api_names() -> None:
    """Only explicit ones reach the sampler: the model's own defaults stand for the rest."""
    chosen = typed("-p", "x", "--temp", "0", "-l", "3+1", "--dry-sequence-breaker", r"\n", "--ignore-eos",
                   "--mirostat-ent", "4", "--samplers", "top_k;temperature").sampling
    assert chosen == {"temperature": 0.0, "logit_bias": [(3, 1.0)], "dry_sequence_breakers": ["\n"], "ignore_eos": True,
                      "mirostat_tau": 4.0, "samplers": ["top_k", "temperature"]}
    assert typed("-p", "x", "--dry-sequence-breaker", "none").sampling == {"dry_sequence_breakers": []}
    assert typed("-p", "x", "--sampler-seq", "kt").sampling == {"samplers": "kt"}
    assert typed("-p", "x").sampling == {}


@pytest.mark.parametrize(
    ("argv", "prompt"),
    [
        (["-p", r"a\nb"], PromptSettings(text="a\nb")),
        (["-p", r"a\nb", "--no-escape"], PromptSettings(text=r"a\nb")),
        (["-p", ""], PromptSettings(text="")),
        (["-f", "x"], PromptSettings(file=Path("x"))),
        (["x"], PromptSettings(file=Path("x"))),
        (["-"], PromptSettings()),
        (["-f", "-"], PromptSettings()),
    ],
)
def test_prompt_sources(argv: list[str], prompt: PromptSettings) -> None:
    """One prompt from text, a file or stdin; only text on the command line has escapes."""
    assert typed(*argv).prompt == prompt


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no prompt: give PROMPT_FILE"),
        (["x", "-p", "y"], "PROMPT_FILE and --prompt are both prompts"),
        (["-p", "x", "-sys", "y"], "add --chat"),
        (["-p", "x", "--samplers", "top_k", "--sampler-seq", "k"], "give one of them"),
        (["-p", "x", "--rope-scale", "2", "--rope-freq-scale", "0.5"], "give one of them"),
        (["-p", "x", "-ctkd", "q8_0"], "share the type of the cache, f16"),
        (["-p", "x", "--spec-synth-len", "2", "--spec-synth-rates", "0.5,0.4,0.1"], "give one of them"),
        (["-p", "x", "--spec-default", "--spec-ngram-mod-n-max", "63"], "use --spec-type ngram-mod with them instead"),
        (["-p", "x", "--chat-template-kwargs", '{"enable_thinking": "no"}'], "not a boolean"),
        (["-p", "x", "--kv-stream-arena-mib", "1", "--kv-stream-pool-mib", "1"], "exclude each other"),
        (["-p", "x", "--kv-page-tokens", "100"], "not a multiple of 32"),
    ],
)
def test_rules_between_settings(argv: list[str], words: str) -> None:
    """What contradicts itself is refused, with both names."""
    with pytest.raises(SettingsError, match=words):
        typed(*argv)


def test_typed_values() -> None:
    """Flags become what the rooms receive, in their units and with their unset values."""
    run_with = typed("-p", "x", "--rope-scale", "4", "--yarn-beta-fast", "32", "-t", "2", "-ngl", "all", "-c", "4096",
                     "--kv-unified-per-slot", "1024", "--kv-stream-pool-mib", "0", "-r", r"\n", "-v", "--chat",
                     "--reasoning", "off", "--reasoning-effort", "low", "--chat-template-kwargs", '{"a": 1}')
    rope, device = run_with.engine.rope, run_with.engine.device
    assert (rope.scale, rope.freq_scale, rope.freq_base) == (4.0, None, None)
    assert (rope.yarn_beta_fast, rope.yarn_beta_slow) == (32.0, None)
    assert (device.threads, device.gpu_layers) == (2, ALL_LAYERS)
    assert run_with.engine.context.ctx_size == 1024
    assert run_with.engine.kv.pool_mib is None
    assert run_with.output.stop == ("\n",)
    assert run_with.logging.verbosity == 5
    assert run_with.chat.variables == {"a": 1, "enable_thinking": False, "reasoning_effort": "low"}


def test_speculation() -> None:
    """Lists of drafters add up without repetition, in the order of asking; each drafter's numbers reach it."""
    assert typed("-p", "x").engine.speculative == SpeculativeSettings()
    speculative = typed(
        "-p", "x", "--spec-type", "draft-resident,ngram-mod", "--spec-type", "ngram-simple,none", "--spec-type",
        "ngram-mod,ngram-map-k4v", "--spec-ngram-mod-n-match", "16", "--spec-ngram-map-k4v-min-hits", "2",
        "--spec-ngram-simple-size-m", "100", "--spec-draft-n-max", "5", "--spec-draft-p-min", "0.5",
        "--spec-draft-sampling", "probabilistic", "--spec-adaptive", "off", "-lcs", "s", "-lcd", "d").engine.speculative
    assert speculative == SpeculativeSettings(
        types=("ngram-map-k4v", "ngram-mod", "draft-resident"),
        ngram_simple=NgramSimpleSettings(size_m=100),
        ngram_map_k4v=NgramMapSettings(min_hits=2),
        ngram_mod=NgramModSettings(n_match=16),
        ngram_cache=NgramCacheSettings(static=Path("s"), dynamic=Path("d")),
        draft=ModelDraftSettings(n_max=5, p_min=0.5, sampling="probabilistic"),
        adaptive=False,
    )
    assert typed("-p", "x", "--spec-default", "--spec-type", "draft-mtp").engine.speculative.types == (
        "ngram-mod", "draft-mtp")
    synthetic = typed("-p", "x", "--spec-type", "draft-mtp", "--spec-synth-rates", "0.9,0.81,0.729").engine.speculative
    assert synthetic.synth_rates == (0.9, 0.81, 0.729)
    assert synthetic.is_synthetic


class Recorder(dict[str, object]):
    """Values that remember which of them were asked for."""

    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self.read.add(key)
        return super().__getitem__(key)


@pytest.mark.parametrize("command", app.COMMANDS)
def test_every_setting_is_read_or_named(command: Command) -> None:
    """No flag is silently ignored: what works on a command is asked for there, the rest is refused or named."""
    read = {"config"}   # while the command line is read
    sampling = {setting.key for setting in TABLE if setting.api}
    for argv in (["-m", "M"], ["-hf", "a/b"]):
        parsed = parse(argv if command == "serve" else [*argv, "-p", "x"], {}, command)
        values = Recorder(parsed.values)
        assert not app._act(replace(parsed, values=values), command)
        if command in ("info", "plan"):
            (info_settings if command == "info" else plan_settings)(values, parsed.positionals)
        else:
            for twin in ("samplers", "sampler_seq"):
                build = serve_settings if command == "serve" else run_settings
                build(values, sampling - {twin}, parsed.positionals)
        read |= values.read
    usable = {setting.key for setting in TABLE if setting.usable(command)}
    assert {key for key in usable - read if not (BY_KEY[key].note or BY_KEY[key].refuse)} == set()


def test_names_are_those_of_the_rooms_that_use_them() -> None:
    """Settings stand above the rooms and spell their words again: K/V types, residency modes."""
    assert set(KV_TYPES) == {kind.label for kind in KvType}
    assert set(get_args(rooms.ResidencyMode)) == {mode.value for mode in ResidencyMode}


def test_info_takes_its_model_either_way() -> None:
    """``kvs info MODEL`` and ``kvs info -m MODEL``, not both; neither is the demo model."""
    for argv in (["M"], ["-m", "M"]):
        parsed = parse(argv, {}, "info")
        assert info_settings(parsed.values, parsed.positionals).engine.model.source == Path("M")
    parsed = parse([], {}, "info")
    assert info_settings(parsed.values, parsed.positionals).engine.model.source is None
    parsed = parse(["M", "-m", "N"], {}, "info")
    with pytest.raises(SettingsError, match="are both models"):
        info_settings(parsed.values, parsed.positionals)

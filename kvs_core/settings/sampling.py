"""Settings of sampling and of constrained output.

Unset ones take the model file's ``general.sampling.*`` value, else the default shown; only explicit ones reach the
sampler, under the ``api`` names of llama-server's requests.
"""

from __future__ import annotations

import math
from functools import partial

from kvs_core.settings.kinds import (
    JSON_OBJECT,
    PATH,
    SWITCH,
    TEXT,
    Kind,
    clean_text,
    integer,
    number,
    number_above,
    separated,
    shown,
)
from kvs_core.settings.setting import Group, Rule, Setting

_I32 = (1 << 31) - 1

_sampling = partial(Setting, group=Group.SAMPLING, commands=("run", "serve"))
_constraint = partial(Setting, group=Group.CONSTRAINTS, commands=("run", "serve"))

_GBNF = Kind("GBNF", ('root ::= "yes" | "no"',), clean_text)


def _as_logit_bias(text: str) -> tuple[int, float]:
    """``id+bias`` or ``id-bias``."""
    sign = next((i for i, char in enumerate(text) if char in "+-"), 0)
    token, bias = text[:sign], text[sign:]
    if not token.isascii() or not token.isdecimal() or len(token) > 9:
        raise ValueError(f"expected TOKEN_ID+BIAS or TOKEN_ID-BIAS, got {shown(text)}")
    try:
        value = float(bias) if "_" not in bias else math.nan
    except ValueError:
        value = math.nan
    if not -math.inf <= value < math.inf:
        raise ValueError(f"expected TOKEN_ID+BIAS or TOKEN_ID-BIAS, got {shown(text)}")
    return int(token), value


def _as_letters(text: str) -> str:
    if not clean_text(text).isalpha():
        raise ValueError(f"expected letters, one per sampler, got {shown(text)}")
    return text


SETTINGS = (
    _sampling("temperature", ("--temp", "--temperature"), number(),
        "Randomness: 0 or less always takes the likeliest token.",
        default=0.8, env="LLAMA_ARG_TEMPERATURE", api="temperature"),
    _sampling("seed", ("-s", "--seed"), integer(-1, (1 << 32) - 1, sample="42"),
        "Seed of the random draws: the same seed gives the same text. -1: a new one each time.",
        default=-1, api="seed"),
    _sampling("top_k", ("--top-k",), integer(-1, _I32),
        "Keep the K likeliest tokens; 0: all.",
        default=40, env="LLAMA_ARG_TOP_K", api="top_k"),
    _sampling("top_p", ("--top-p",), number(),
        "Keep the likeliest tokens that make up this much probability; 1: all.",
        default=0.95, env="LLAMA_ARG_TOP_P", api="top_p"),
    _sampling("min_p", ("--min-p",), number(),
        "Drop tokens below this share of the likeliest one's probability; 0: none.",
        default=0.05, env="LLAMA_ARG_MIN_P", api="min_p"),
    _sampling("top_n_sigma", ("--top-nsigma", "--top-n-sigma"), number(),
        "Keep logits within this many standard deviations of the largest; negative: all.",
        default=-1.0, api="top_n_sigma"),
    _sampling("typical_p", ("--typical", "--typical-p"), number(),
        "Keep locally typical tokens up to this probability; 1: all.",
        default=1.0, api="typical_p"),
    _sampling("xtc_probability", ("--xtc-probability",), number(),
        "Chance per token to drop all but the least likely of the top choices.",
        default=0.0, api="xtc_probability"),
    _sampling("xtc_threshold", ("--xtc-threshold",), number(),
        "Probability that makes a top choice for XTC; above 0.5: off.",
        default=0.1, api="xtc_threshold"),
    _sampling("repeat_last_n", ("--repeat-last-n",), integer(0, _I32),
        "Newest tokens that the penalties look at; 0: off.",
        default=64, unit="tokens", api="repeat_last_n"),
    _sampling("repeat_penalty", ("--repeat-penalty",), number_above(0),
        "Divides the logits of tokens already there; 1: off.",
        default=1.0, env="LLAMA_ARG_REPEAT_PENALTY", api="repeat_penalty"),
    _sampling("presence_penalty", ("--presence-penalty",), number(),
        "Subtracted from the logits of tokens already there; 0: off.",
        default=0.0, env="LLAMA_ARG_PRESENCE_PENALTY", api="presence_penalty"),
    _sampling("frequency_penalty", ("--frequency-penalty",), number(),
        "Subtracted once per earlier occurrence; 0: off.",
        default=0.0, env="LLAMA_ARG_FREQUENCY_PENALTY", api="frequency_penalty"),
    _sampling("dry_multiplier", ("--dry-multiplier",), number(),
        "Strength of DRY, which penalises repeating a whole sequence; 0: off.",
        default=0.0, api="dry_multiplier"),
    _sampling("dry_base", ("--dry-base",), number(sample="1.75"),
        "DRY: growth of the penalty per repeated token; below 1: the default.",
        default=1.75, api="dry_base"),
    _sampling("dry_allowed_length", ("--dry-allowed-length",), integer(0, _I32),
        "DRY: repetitions this long are free.",
        default=2, unit="tokens", api="dry_allowed_length"),
    _sampling("dry_penalty_last_n", ("--dry-penalty-last-n",), integer(0, _I32),
        "DRY: newest tokens that are searched; 0: off.",
        default=64, unit="tokens", api="dry_penalty_last_n"),
    _sampling("dry_sequence_breakers", ("--dry-sequence-breaker",), TEXT,
        "DRY: text at which sequences end; repeat it for several, none: no breakers. The first one replaces the "
        "defaults.",
        default=("\n", ":", '"', "*"), append=True, api="dry_sequence_breakers"),
    _sampling("dynatemp_range", ("--dynatemp-range",), number(),
        "Lets the temperature vary by this much with how sure the model is; 0: off.",
        default=0.0, api="dynatemp_range"),
    _sampling("dynatemp_exponent", ("--dynatemp-exp",), number(),
        "Dynamic temperature: exponent of its curve.",
        default=1.0, api="dynatemp_exponent"),
    _sampling("adaptive_target", ("--adaptive-target",), number(),
        "Adaptive-p: probability to aim at, if adaptive_p is among the samplers; negative: off.",
        default=-1.0, api="adaptive_target"),
    _sampling("adaptive_decay", ("--adaptive-decay",), number(0, 0.99),
        "Adaptive-p: how long it remembers.",
        default=0.9, api="adaptive_decay"),
    _sampling("mirostat", ("--mirostat",), integer(0, 2),
        "Holds the text's surprise at a target, in version 1 or 2, instead of the samplers; 0: off.",
        default=0, api="mirostat"),
    _sampling("mirostat_eta", ("--mirostat-lr",), number(),
        "Mirostat: learning rate.",
        default=0.1, api="mirostat_eta"),
    _sampling("mirostat_tau", ("--mirostat-ent",), number(),
        "Mirostat: target surprise, in bits.",
        default=5.0, api="mirostat_tau"),
    _sampling("logit_bias", ("-l", "--logit-bias"), Kind("ID+BIAS", ("15043+1.5", "15043-2", "7-inf"), _as_logit_bias),
        "Add to a token's logit, as in 15043+1 or 15043-inf; repeat it for several.",
        default=(), append=True, api="logit_bias"),
    _sampling("ignore_eos", ("--ignore-eos",), SWITCH,
        "Never end the text: bans every end-of-generation token.",
        default=False, api="ignore_eos"),
    _sampling("samplers", ("--samplers",), separated(";", "A;B;...", "top_k;temperature"),
        "The samplers, in order.",
        default=("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"),
        api="samplers"),
    _sampling("sampler_seq", ("--sampler-seq", "--sampling-seq"), Kind("LETTERS", ("edskypmxt",), _as_letters),
        "The samplers as letters: e penalties, d dry, s top_n_sigma, k top_k, y typ_p, p top_p, m min_p, x xtc, t "
        "temperature, a adaptive_p.",
        default="edskypmxt", api="samplers"),
    _sampling("backend_sampling", ("-bs", "--backend-sampling"), SWITCH,
        "Sample on the GPU.",
        default=False, relevance="accept", env="LLAMA_ARG_BACKEND_SAMPLING",
        note=(Rule("the engine chooses where to sample, with the same text"),)),
    _constraint("grammar", ("--grammar",), _GBNF,
        "Grammar that the text has to follow, in GBNF; for serve: of requests that bring no rule of their own."),
    _constraint("grammar_file", ("--grammar-file",), PATH,
        "The same, in a file."),
    _constraint("json_schema", ("-j", "--json-schema"), JSON_OBJECT,
        "JSON schema that the text has to follow, {}: any object; where it lists properties there are no others "
        "unless additionalProperties says so; for serve: as with --grammar."),
    _constraint("json_schema_file", ("-jf", "--json-schema-file"), PATH,
        "The same, in a file."),
)

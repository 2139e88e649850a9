r"""How a byte-level BPE vocabulary cuts text into pieces before it merges: the ``tokenizer.ggml.pre`` names.

A vocabulary was trained on pieces cut by certain regular expressions (Oniguruma syntax), and its ids are right only
for the same cuts. Each rule below lists its expressions; they apply one after another, each to the pieces that the
one before has left, matches and gaps alike. They are facts of the models' own tokenizers, written so that they cut as
llama.cpp does, also where it deviates: ``&&[^\s]`` stands where its ranges leave out white space. Letters that
Unicode 16 added count as letters here, in llama.cpp not yet.
"""

from __future__ import annotations

from dataclasses import dataclass

_APOSTROPHE = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CJK = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}&&[^\s]]+"
_ASCII_MARK_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
# The letters with case that this vocabulary's makers listed. Those that have a canonical twin are written as numbers.
_CASED = (
    r"[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴ"
    r"ᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}Ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻ"
    r"Ȿ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]"
)


def _words(digits: str, *, start: str = _APOSTROPHE + "|", tail: str = r"[\r\n]*", space: str = _SPACE) -> str:
    """Words with one leading sign, ``digits``, signs with their ``tail``, ``space``: the shape of most families."""
    return rf"{start}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+{tail}|{space}"


def _cased_words(digits: str, ending: str) -> str:
    """Words cut where a lower-case ASCII letter meets a capital, as in ``camel`` ``Case``."""
    before, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
    return (
        f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
    )


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of cutting.

    regexes        applied one after another
    whole_pieces   a piece that is itself a token is taken whole, without merging (``ignore_merges``)
    adds_bos       BOS comes first unless the file says otherwise
    """

    regexes: tuple[str, ...]
    whole_pieces: bool = False
    adds_bos: bool = False


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")

_RULES: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling": PreTokenizer((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        (_LLAMA3,), whole_pieces=True, adds_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe glm4": PreTokenizer((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer(
        (
            rf"{_APOSTROPHE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}",
        )
    ),
    "laguna": PreTokenizer((r"[^\n]+|\n+", _QWEN2)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), whole_pieces=True),
    "seed-coder": PreTokenizer(
        (rf"{_APOSTROPHE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}",)
    ),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(
        (_words(r"\p{N}", space=r"\s*[\r\n]|\s+(?!\S)|\s+"),)
    ),
    "exaone-moe": PreTokenizer(
        (
            rf"{_APOSTROPHE}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "tekken": PreTokenizer((_cased_words(r"\p{N}", ""),), whole_pieces=True, adds_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_cased_words(r"\p{N}{1,3}", _APOSTROPHE + "?"),)),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?{_CASED}+", r"\s?[!-/:-~！-／：-～‘-‟、-。]+", r"(?<!\s)\s+$", _CJK, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm": PreTokenizer(
        (
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            rf"{_ASCII_MARK_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}",
        )
    ),
    "bloom poro-chat gpt3-finnish": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "viking": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rule for names, rule in _RULES.items() for name in names.split()}
"""Every supported value of ``tokenizer.ggml.pre``."""

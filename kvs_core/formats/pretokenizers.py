r"""How a byte-level BPE vocabulary cuts text into pieces before merging: the ``tokenizer.ggml.pre`` names.

A vocabulary was trained on pieces cut by certain regular expressions, and its ids are right only for the same cuts.
A GGUF file names them. Each family below is a list of expressions, applied one after another: each cuts the pieces
the one before has left, its matches and the gaps between them alike. They are facts of the models' own tokenizers,
written so that they cut as llama.cpp does (as far as both know a character: Unicode 16 has letters it does not). Where it deviates from the model's own definition it is followed:
``&&[^\s]`` and ``[0-9]`` stand where its ranges leave out white space and its ``\d`` knows ASCII digits alone.
"""

from __future__ import annotations

from dataclasses import dataclass

_APOSTROPHE = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CJK = r"[一-龥ࠀ-一가-\uD7FF&&[^\s]]+".replace(r"\uD7FF", "\ud7fb")

"""Families of byte-level vocabularies, by how they cut text into words before merging: `tokenizer.ggml.pre`.

The names are llama.cpp's. Their meaning is that of the tokenizer.json of the family's models (normalizer, regular
expressions, digits), not llama.cpp's own rewriting of it, which leaves Unicode normalization out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from asyncengine.errors import UnsupportedModel, shorten


@dataclass(frozen=True)
class Family:
    """One way of cutting: the steps in order (a string is a regular expression whose matches become words).

    `ignore_merges`: a word that is a token is that token, whatever the merges would make of it. `add_bos`: prompts
    begin with the beginning-of-sequence token where the file does not say otherwise.
    """

    steps: tuple[Any, ...]
    normalizer: Any = None
    ignore_merges: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> Any:
        """All steps; the last also writes every byte as a printable character (Radford et al. 2019)."""
        steps = [
            pre_tokenizers.Split(Regex(step), "isolated") if isinstance(step, str) else step for step in self.steps
        ]
        if _WORDS not in steps:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
"""GPT-2's words."""
_DIGIT = pre_tokenizers.Digits(individual_digits=True)
"""Each digit is a word of its own."""
_DIGITS = pre_tokenizers.Digits(individual_digits=False)
_PUNCTUATION = pre_tokenizers.Punctuation("contiguous")
_NFC, _NFKC = normalizers.NFC(), normalizers.NFKC()

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    """OpenAI's cl100k words, with `digits` as what makes a number."""
    symbols = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{symbols}|{_SPACES}"


def _o200k(contractions: str, digits: str) -> str:
    """OpenAI's o200k words: capitals begin a word."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{upper}*{lower}+{contractions}|{before}{upper}+{lower}*{contractions}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_LLAMA3 = _cl100k(r"\p{N}{1,3}")
_QWEN2 = _cl100k(r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_LING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED = (  # the letters with case that the family's authors listed
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK = (
    "[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _ASIAN,
    _DIGIT,
)
_NOT_HAN_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_NOT_HAN_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}*{_NOT_HAN_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}+{_NOT_HAN_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)

_TABLE: tuple[tuple[Family, tuple[str, ...]], ...] = (
    (Family((_LLAMA3,), ignore_merges=True, add_bos=True), (
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    )),
    (Family((_LLAMA3,), ignore_merges=True), ("glm4", "chatglm-bpe")),
    (Family((_LLAMA3,)), ("dbrx", "smaug-bpe")),
    (Family((_QWEN2,), _NFC), (
        "qwen2", "deepseek-r1-qwen", "megrez", "f2llmv2", "kormo", "stablelm2", "hunyuan",
    )),
    (Family((_QWEN2,)), ("grok-2", "solar-open")),
    (Family((_QWEN35,), _NFC), ("qwen35",)),
    (Family((_o200k(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),), ignore_merges=True), ("gpt-4o", "llama4", "kanana2")),
    (Family((_o200k(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),), _NFC), ("minimax-m2",)),
    (Family((_o200k("", r"\p{N}"),), ignore_merges=True, add_bos=True), ("tekken",)),
    (Family((r"\d{1,3}(?=(?:\d{3})*\b)", _o200k(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")), _NFC), ("tiny_aya",)),
    (Family((_KIMI,), ignore_merges=True), ("kimi-k2",)),
    (Family((_SEED,)), ("seed-coder",)),
    (Family((_LING,)), ("bailingmoe", "bailingmoe2", "llada-moe")),
    (Family((r"\p{N}{1,3}", _cl100k(r"\p{N}+")), ignore_merges=True), ("minicpm5",)),
    (Family(_DEEPSEEK), ("deepseek-llm",)),
    (Family(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, _DIGIT)), ("deepseek-coder",)),
    (Family(_DEEPSEEK3), ("deepseek-v3", "hunyuan-dense", "joyai-llm")),
    (Family((_PUNCTUATION, _WORDS, _DIGITS, "[0-9][0-9][0-9]")), ("falcon",)),
    (Family((_WORDS,)), ("gpt-2", "phi-2", "jais", "mellum", "a.x-4.0", "trillion", "granite-docling")),
    (Family((_WORDS,), _NFC), ("mpt", "olmo")),
    (Family((_WORDS,), _NFKC), ("exaone4",)),
    (Family((_DIGIT, _WORDS)), ("starcoder", "refact", "smollm", "codeshell", "minerva-7b", "mellum2")),
    (Family((_DIGIT, _WORDS), _NFC), ("command-r",)),
    (Family((_DIGIT, _WORDS), _NFKC), ("exaone",)),
    (Family((_BLOOM,)), ("bloom", "poro-chat", "gpt3-finnish")),
    (Family((_BLOOM, _DIGIT)), ("viking",)),
    (Family((r"\p{N}+", r"(?=(\d{3})+(?!\d))")), ("superbpe",)),
    (Family((r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]")), ("default",)),
)  # fmt: skip


FAMILIES = {name: family for family, names in _TABLE for name in names}


_OLLAMA = {"gptoss": "gpt-4o", "lfm2": "lfm2", "mistral3": "tekken"}
"""Families by `general.architecture`: Ollama's converter says "default" of every vocabulary it does not recognize."""


def family_of(pre: str, architecture: str) -> Family:
    """The family called `pre`. Raises `UnsupportedModel` for a name that is not known, or for none at all."""
    if pre in ("", "default"):
        pre = _OLLAMA.get(architecture, pre)
    if pre in FAMILIES:
        return FAMILIES[pre]
    known = ", ".join(FAMILIES)
    if not pre:
        raise UnsupportedModel(
            "this GGUF file does not say how its tokenizer cuts text into words (no tokenizer.ggml.pre): it was "
            f"written by an old converter; convert the model again. Known: {known}"
        )
    raise UnsupportedModel(
        f"this GGUF file's tokenizer cuts text into words as {shorten(repr(pre), 60)} does (tokenizer.ggml.pre), "
        f"which is not known here. Known: {known}"
    )

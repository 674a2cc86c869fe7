"""Tokenizers as a GGUF header describes them: byte-level BPE, SentencePiece's BPE, WordPiece, or a tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from asyncengine.assembly.gguf_text.header import HUGGINGFACE_KEY, PREFIX, SPACE, TokenizerHeader, TokenType, broken
from asyncengine.errors import EngineError, ModelNotFound, UnsupportedModel, shorten
from asyncengine.text.plain_tokenizer import PlainTokenizer
from asyncengine.text.tokenizer import TextTokenizer

# Families of byte-level vocabularies, by how they cut text into words before merging: `tokenizer.ggml.pre`.


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


KINDS = ("gpt2", "llama", "gemma4", "bert")
MAX_SPLIT_CHARS = 100_000_000
"""Bound on the characters looked at to find the merges. Gemma's 262,144 tokens take 20 million."""
LONGEST_WORD = 100
"""Characters of a word that WordPiece looks up; a longer one is unknown (BERT's own limit)."""
END_MARKS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>", "<|tool_response>",
    "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<|END_OF_TURN_TOKEN|>", "<|endofturn|>", "[|endofturn|]",
    "<|end_of_turn|>", "<|flush|>", "<|calls|>", "<end_of_utterance>", "<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>",
    "<|eos|>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
"""Names that end a turn wherever they are control tokens: a GGUF header has room for three such ids, models have more
(their generation_config.json, which a GGUF does not carry, lists them). From llama.cpp's list and the models' own."""
ENDS_A_MESSAGE_ONLY = (({"<|return|>", "<|call|>"}, "<|end|>"), ({"<|flush|>", "<|calls|>"}, "<|end|>"))
"""Pairs: in a vocabulary with all of the first, the second ends a message inside a turn (gpt-oss, Solar)."""
_CHANNELS = frozenset(("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"))


def load_gguf_tokenizer(
    metadata: Mapping[str, Any], *, chat_template: str | None = None, **known: Any
) -> TextTokenizer:
    """The tokenizer that a GGUF header describes: the same ids as the Hugging Face tokenizer of the same model.

    `metadata` has the keys of a GGUF header (`tokenizer.ggml.*`, `tokenizer.chat_template*`, `general.architecture`).
    Takes about half a second for 150,000 tokens. A header that carries the model's tokenizer.json
    (`tokenizer.huggingface.json`) is taken at that word. Any other header leaves out, and nothing restores, which of
    the control tokens are not special, and which added tokens are looked for in normalized text. gpt-oss gets a
    chat template where its header has none. `chat_template` goes before the header's; `known` are `TextTokenizer`'s.

    Raises `ModelNotFound` for a header that is broken, `UnsupportedModel` for a kind of tokenizer that is not known.
    """
    header = TokenizerHeader(metadata)
    if header.kind not in KINDS and not header.huggingface:
        raise UnsupportedModel(
            f"this GGUF file's tokenizer is of the kind {shorten(repr(header.kind), 60)} (tokenizer.ggml.model); "
            f"known are {', '.join(KINDS)}"
        )
    try:
        backend = _build(header)
    except BaseException as error:  # the Rust library raises plain Exceptions, and panics, for what does not fit
        panic = type(error).__name__ == "PanicException"
        if isinstance(error, EngineError) or not (isinstance(error, Exception) or panic):
            raise
        raise ModelNotFound(f"the GGUF header's tokenizer cannot be built: {shorten(str(error), 300)}") from error
    templates: Any = header.chat_templates
    if templates.keys() == {"default"}:
        templates = templates["default"]
    if not templates and _CHANNELS.issubset(header.tokens):
        templates = Path(__file__).with_name("harmony.jinja").read_text(encoding="utf-8")
    templates = chat_template or templates
    names = {f"{name}_token": header.name_of(name) for name in ("bos", "eos", "unk")}
    named = {name: token for name, token in names.items() if token is not None}
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    load_hf: Any = partial(_wrapped, backend, named, templates or None)
    known["end_token_ids"] = _end_ids(header)
    if special.issuperset(named.values()) and isinstance(templates or None, (str, type(None))):
        return TextTokenizer(PlainTokenizer(backend, named, templates or None), load_hf=load_hf, **known)
    return TextTokenizer(load_hf(), **known)


def _wrapped(backend: Any, named: Mapping[str, str], templates: Any) -> Any:
    """transformers' tokenizer around a copy of that one."""
    from transformers import PreTrainedTokenizerFast

    settings = {"chat_template": templates, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named, **settings)


def _build(header: TokenizerHeader) -> Any:
    """The `tokenizers.Tokenizer`."""
    if header.huggingface:
        return _from_json(header)
    if header.kind == "bert":
        return _wordpiece(header)
    names = header.spelled()
    vocabulary = {  # without the fillers by which converters pad it to the size of the embedding
        token: index
        for index, (token, kind) in enumerate(zip(names, header.types, strict=True))
        if kind != TokenType.UNUSED or token != f"[PAD{index}]"
    }
    if header.kind != "llama" and not header.merges:
        raise broken(PREFIX + "merges", "is missing")
    family = family_of(header.pre, header.architecture) if header.kind == "gpt2" else None
    if family is None:
        tokenizer = _sentencepiece(header, vocabulary)
    else:
        ignored = family.ignore_merges
        model = models.BPE(vocab=vocabulary, merges=header.merges, fuse_unk=False, ignore_merges=ignored)
        tokenizer = Tokenizer(model)
        if family.normalizer is not None:
            tokenizer.normalizer = family.normalizer
        tokenizer.pre_tokenizer = family.pre_tokenizer()
        tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, header, names, vocabulary)
    _set_edges(tokenizer, header, add_bos=family is None or family.add_bos)
    return tokenizer


def _from_json(header: TokenizerHeader) -> Any:
    tokenizer = Tokenizer.from_str(header.huggingface)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    beyond = [token for token, index in tokenizer.get_vocab().items() if index >= len(header.tokens)]
    if beyond:
        raise broken(HUGGINGFACE_KEY, f"has more tokens than {PREFIX}tokens: {shorten(repr(beyond[0]), 60)}")
    return tokenizer


def _sentencepiece(header: TokenizerHeader, vocabulary: dict[str, int]) -> Any:
    """BPE over characters with a fallback to bytes, as transformers builds the same model's.

    Llama's (and Mistral's) puts a space before the text, but not after a special token; Phi-3's puts one before every
    stretch of text; Gemma's puts none.
    """
    merges = header.merges or _merges_from_scores(header, vocabulary)
    unknown = header.name_of("unk")
    settings = {"unk_token": unknown} if unknown in vocabulary else {}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True, **settings))
    prefix = header.space_prefix is not False and not header.is_gemma and header.kind != "gemma4"
    if header.is_gemma or header.kind == "gemma4":
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    elif header.architecture == "phi3" and prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        scheme = "first" if prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_from_scores(header: TokenizerHeader, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece vocabulary implies: every way to make a token of two others, best score first.

    Of equal scores, the longer left part and then the longer right part goes first, so that a run of spaces becomes
    the longest token there is, as SentencePiece makes it; then the token's place in the vocabulary decides. This is
    the order in which transformers derives them; vocabularies converted before it had the rule of lengths differ in
    runs of more spaces than the longest token has.
    """
    if not header.scores:
        raise broken(PREFIX + "scores", "is missing, and there are no merges either")
    work = sum(len(token) ** 2 for token in vocabulary)
    if work > MAX_SPLIT_CHARS:
        raise broken(PREFIX + "tokens", f"are too long to find their merges ({work} steps, limit {MAX_SPLIT_CHARS})")
    found = []
    for place, (token, index) in enumerate(vocabulary.items()):
        # converters overwrite the scores of user-defined tokens, which SentencePiece holds at nought
        score = 0.0 if header.types[index] == TokenType.USER_DEFINED else header.scores[index]
        for cut in range(1, len(token)):
            if token[:cut] in vocabulary and token[cut:] in vocabulary:
                found.append((-score, -cut, cut - len(token), place, token))
    found.sort()
    return [(token[:-cut], token[-cut:]) for _, cut, _, _, token in found]


def _wordpiece(header: TokenizerHeader) -> Any:
    """BERT's tokenizer, with its special tokens and the two that go around every text."""

    def written(token: str) -> str:
        # as vocab.txt has it: converters mark the pieces that begin a word instead of those that go on
        if token.startswith("[") and token.endswith("]"):
            return token
        return token[1:] if token.startswith(SPACE) and len(token) > 1 else f"##{token}"

    names = [written(token) for token in header.tokens]
    vocabulary = {name: index for index, name in enumerate(names)}
    if len(vocabulary) != len(names):
        raise broken(PREFIX + "tokens", "holds a token twice, as a word and as a part of one")
    for which in ("unk", "cls", "sep"):
        if which not in header.ids:
            raise broken(PREFIX + "model", f"is 'bert', but the token called {which} is not named")
    model = models.WordPiece(
        vocab=vocabulary, unk_token=names[header.ids["unk"]], max_input_chars_per_word=LONGEST_WORD,
        continuing_subword_prefix="##",
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    lowercase = header.lowercase is not False
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=header.strip_accents)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    control = [name for name, kind in zip(names, header.types, strict=True) if kind in (2, TokenType.CONTROL)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in control])
    edge = [("begin", header.ids["cls"]), ("end", header.ids["sep"])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["begin", "$A", "end"], pair=["begin", "$A", "end", "$B:1", "end:1"], special_tokens=edge
    )
    return tokenizer


def _add_tokens(tokenizer: Any, header: TokenizerHeader, names: list[str], vocabulary: dict[str, int]) -> None:
    """Make control tokens special and user-defined ones whole, under the ids that they have."""
    named = {header.ids[name] for name in ("bos", "eos", "unk") if name in header.ids}
    phi3 = header.architecture == "phi3" and header.kind == "llama"
    added: dict[bool, list[AddedToken]] = {True: [], False: []}
    for index, (name, kind) in enumerate(zip(names, header.types, strict=True)):
        control = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or index in named
        if control or kind == TokenType.USER_DEFINED:
            # Phi-3's marks swallow the white space behind them, all but three; the header does not say so
            strip = phi3 and name not in ("<unk>", "<s>", "<|endoftext|>")
            added[control].append(AddedToken(name, normalized=False, special=control, rstrip=strip))
    tokenizer.add_special_tokens(added[True])
    tokenizer.add_tokens(added[False])
    for token in (*added[True], *added[False]):
        if tokenizer.token_to_id(token.content) != vocabulary.get(token.content):
            raise broken(PREFIX + "tokens", f"holds {token.content!r}, which is special but not part of the vocabulary")


def _set_edges(tokenizer: Any, header: TokenizerHeader, *, add_bos: bool) -> None:
    """The tokens around a prompt where `add_special_tokens` is on; `add_bos` is the family's habit.

    Raises `ModelNotFound` where the header asks for a token that it does not name.
    """

    def edge(name: str, asked: bool | None, habit: bool) -> list[int]:
        if not (habit if asked is None else asked) or (asked is None and name not in header.ids):
            return []
        if name not in header.ids:
            raise broken(f"{PREFIX}add_{name}_token", f"is set, but there is no {PREFIX}{name}_token_id")
        return [header.ids[name]]

    before, after = edge("bos", header.add_bos, add_bos), edge("eos", header.add_eos, False)
    if header.kind == "gemma4" and "default" in header.chat_templates:
        before = []  # converters set the flag for llama.cpp's sake; the template writes the token itself
    # names stand in for the tokens: the library's notation has no way to write some characters
    names = {index: f"edge{index}" for index in (*before, *after)}
    single = [*map(names.__getitem__, before), "$A", *map(names.__getitem__, after)]
    pair = [*single, *map(names.__getitem__, before), "$B", *map(names.__getitem__, after)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(name, index) for index, name in names.items()]
    )


def _end_ids(header: TokenizerHeader) -> tuple[int, ...]:
    """The ids at which an answer ends: those that the header names, then control tokens known to end a turn."""
    typed = enumerate(zip(header.tokens, header.types, strict=True))
    control = {token: index for index, (token, kind) in typed if kind == TokenType.CONTROL}
    inner = {mark for others, mark in ENDS_A_MESSAGE_ONLY if others <= control.keys()}
    named = [header.ids[name] for name in ("eos", "eot", "eom") if name in header.ids]
    return tuple(dict.fromkeys([*named, *(control[mark] for mark in END_MARKS if mark in control.keys() - inner)]))

"""Tokenizers as a GGUF header describes them: byte-level BPE, SentencePiece's BPE, WordPiece, or a tokenizer.json."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from asyncengine.assembly.gguf_text.header import HUGGINGFACE_KEY, PREFIX, SPACE, TokenizerHeader, TokenType, broken
from asyncengine.errors import EngineError, ModelNotFound, UnsupportedModel, shorten
from asyncengine.text.plain_tokenizer import PlainTokenizer
from asyncengine.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Family:
    """A family of byte-level vocabularies, which cut text into words alike before merging: a row of families.toml."""

    names: Sequence[str]
    steps: Sequence[str]
    normalizer: str = ""
    ignore_merges: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> Any:
        """All steps; the last also writes every byte as a printable character (Radford et al. 2019)."""
        steps = [
            _CUTTERS.get(step) or pre_tokenizers.Split(Regex("|".join(_EXPRESSIONS.get(step, [step]))), "isolated")
            for step in self.steps
        ]
        if "WORDS" not in self.steps:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


_CUTTERS = {
    "WORDS": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "DIGIT": pre_tokenizers.Digits(individual_digits=True),
    "DIGITS": pre_tokenizers.Digits(individual_digits=False),
    "PUNCTUATION": pre_tokenizers.Punctuation("contiguous"),
}
_READ = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
_EXPRESSIONS: dict[str, list[str]] = _READ["expressions"]
FAMILIES = {name: family for family in (Family(**row) for row in _READ["family"]) for name in family.names}
"""Families by `tokenizer.ggml.pre`."""


def family_of(pre: str, architecture: str) -> Family:
    """The family called `pre`. Raises `UnsupportedModel` for a name that is not known, or for none at all."""
    if pre in ("", "default"):
        pre = _READ["ollama"].get(architecture, pre)
    if pre in FAMILIES:
        return FAMILIES[pre]
    names = ", ".join(FAMILIES)
    if not pre:
        raise UnsupportedModel(
            "this GGUF file does not say how its tokenizer cuts text into words (no tokenizer.ggml.pre): it was "
            f"written by an old converter; convert the model again. Known: {names}"
        )
    raise UnsupportedModel(
        f"this GGUF file's tokenizer cuts text into words as {shorten(repr(pre), 60)} does (tokenizer.ggml.pre), "
        f"which is not known here. Known: {names}"
    )


TOKENIZER_MODELS = ("gpt2", "llama", "gemma4", "bert")
MAX_SPLIT_CHARS = 100_000_000
"""Bound on the characters looked at to find the merges. Gemma's 262,144 tokens take 20 million."""
LONGEST_WORD = 100
"""Characters of a word that WordPiece looks up; a longer one is unknown (BERT's own limit)."""


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
    if header.model not in TOKENIZER_MODELS and not header.huggingface:
        raise UnsupportedModel(
            f"this GGUF file's tokenizer is of the kind {shorten(repr(header.model), 60)} (tokenizer.ggml.model); "
            f"known are {', '.join(TOKENIZER_MODELS)}"
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
    if not templates and set(_READ["channels"]).issubset(header.tokens):
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
    if header.model == "bert":
        return _wordpiece(header)
    names = header.spelled()
    vocabulary = {  # without the fillers by which converters pad it to the size of the embedding
        token: index
        for index, (token, token_type) in enumerate(zip(names, header.types, strict=True))
        if token_type != TokenType.UNUSED or token != f"[PAD{index}]"
    }
    if header.model != "llama" and not header.merges:
        raise broken(PREFIX + "merges", "is missing")
    family = family_of(header.pre, header.architecture) if header.model == "gpt2" else None
    if family is None:
        tokenizer = _sentencepiece(header, vocabulary)
    else:
        ignored = family.ignore_merges
        model = models.BPE(vocab=vocabulary, merges=header.merges, fuse_unk=False, ignore_merges=ignored)
        tokenizer = Tokenizer(model)
        if family.normalizer:
            tokenizer.normalizer = getattr(normalizers, family.normalizer)()
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
    prefix = header.space_prefix is not False and not header.is_gemma and header.model != "gemma4"
    if header.is_gemma or header.model == "gemma4":
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
    merges = []
    for position, (token, index) in enumerate(vocabulary.items()):
        # converters overwrite the scores of user-defined tokens, which SentencePiece holds at nought
        score = 0.0 if header.types[index] == TokenType.USER_DEFINED else header.scores[index]
        for cut in range(1, len(token)):
            if token[:cut] in vocabulary and token[cut:] in vocabulary:
                merges.append((-score, -cut, cut - len(token), position, token))
    merges.sort()
    return [(token[:-cut], token[-cut:]) for _, cut, _, _, token in merges]


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
    control = [name for name, type_ in zip(names, header.types, strict=True) if type_ in (2, TokenType.CONTROL)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in control])
    edge = [("begin", header.ids["cls"]), ("end", header.ids["sep"])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["begin", "$A", "end"], pair=["begin", "$A", "end", "$B:1", "end:1"], special_tokens=edge
    )
    return tokenizer


def _add_tokens(tokenizer: Any, header: TokenizerHeader, names: list[str], vocabulary: dict[str, int]) -> None:
    """Make control tokens special and user-defined ones whole, under the ids that they have."""
    named = {header.ids[name] for name in ("bos", "eos", "unk") if name in header.ids}
    phi3 = header.architecture == "phi3" and header.model == "llama"
    added: dict[bool, list[AddedToken]] = {True: [], False: []}
    for index, (name, token_type) in enumerate(zip(names, header.types, strict=True)):
        control = token_type in (TokenType.CONTROL, TokenType.UNKNOWN) or index in named
        if control or token_type == TokenType.USER_DEFINED:
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
    if header.model == "gemma4" and "default" in header.chat_templates:
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
    control = {token: index for index, (token, token_type) in typed if token_type == TokenType.CONTROL}
    inner = {mark for marks, mark in _READ["end_a_message"] if control.keys() >= {*marks}}
    named = [header.ids[name] for name in ("eos", "eot", "eom") if name in header.ids]
    ends = [control[mark] for mark in _READ["end_marks"] if mark in control.keys() - inner]
    return tuple(dict.fromkeys([*named, *ends]))

"""From a GGUF header's metadata to a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from asyncengine.errors import EngineError, ModelNotFound, UnsupportedModel, shorten
from asyncengine.text.gguf.byte_level import build_byte_level
from asyncengine.text.gguf.families import family_of, pre_of
from asyncengine.text.gguf.metadata import HUGGINGFACE_KEY, PREFIX, TokenizerHeader, broken, read_header
from asyncengine.text.gguf.sentencepiece import build_sentencepiece
from asyncengine.text.gguf.special import add_tokens, end_ids, set_template, vocabulary_of
from asyncengine.text.gguf.wordpiece import build_wordpiece

KINDS = ("gpt2", "llama", "gemma4", "bert")
LLAMA_NAMES = {"unk": (0, "<unk>"), "bos": (1, "<s>"), "eos": (2, "</s>")}
"""The tokens of a vocabulary of the kind "llama" whose header does not name them: files from 2023."""


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer built from a GGUF header."""

    backend: Any
    """The `tokenizers.Tokenizer`."""
    header: TokenizerHeader
    end_ids: tuple[int, ...]
    """Every id that ends an answer, the header's end-of-sequence id first."""


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> GgufTokenizer:
    """The tokenizer that a GGUF header describes: the same ids as the Hugging Face tokenizer of the same model.

    `metadata` has the keys of a GGUF header (`tokenizer.ggml.*`, `tokenizer.chat_template*`, `general.architecture`).
    Takes about half a second for 150,000 tokens. A header that carries the model's tokenizer.json
    (`tokenizer.huggingface.json`) is taken at that word. What any other header leaves out cannot be restored: which
    of the control tokens are not special, and which added tokens are looked for in normalized text.

    Raises `ModelNotFound` for a header that is broken, `UnsupportedModel` for a kind of tokenizer that is not known.
    """
    header = read_header(metadata)
    if header.kind not in KINDS and not header.huggingface:
        raise UnsupportedModel(
            f"this GGUF file's tokenizer is of the kind {shorten(repr(header.kind), 60)} (tokenizer.ggml.model); "
            f"known are {', '.join(KINDS)}"
        )
    if header.kind == "llama":
        header = _with_llama_names(header)
    try:
        backend = _build(header)
    except BaseException as error:  # the Rust library raises plain Exceptions, and panics, for what does not fit
        if isinstance(error, EngineError) or not (
            isinstance(error, Exception) or type(error).__name__ == "PanicException"
        ):
            raise
        raise ModelNotFound(f"the GGUF header's tokenizer cannot be built: {shorten(str(error), 300)}") from error
    return GgufTokenizer(backend, header, end_ids(header))


def _build(header: TokenizerHeader) -> Any:
    if header.huggingface:
        return _from_json(header)
    if header.kind == "bert":
        return build_wordpiece(header)
    vocabulary = vocabulary_of(header)
    if header.kind == "gpt2":
        family = family_of(pre_of(header))
        if not header.merges:
            raise broken(PREFIX + "merges", "is missing")
        tokenizer = build_byte_level(header, vocabulary, family)
        add_bos = family.add_bos
    else:
        if header.kind == "gemma4" and not header.merges:
            raise broken(PREFIX + "merges", "is missing")
        tokenizer = build_sentencepiece(header, vocabulary)
        add_bos = True
    add_tokens(tokenizer, header, vocabulary)
    set_template(tokenizer, header, add_bos=add_bos)
    return tokenizer


def _from_json(header: TokenizerHeader) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(header.huggingface)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    beyond = [token for token, index in tokenizer.get_vocab().items() if index >= len(header.tokens)]
    if beyond:
        raise broken(HUGGINGFACE_KEY, f"has more tokens than {PREFIX}tokens: {shorten(repr(beyond[0]), 60)}")
    return tokenizer


def _with_llama_names(header: TokenizerHeader) -> TokenizerHeader:
    named = {
        name: index
        for name, (index, token) in LLAMA_NAMES.items()
        if name not in header.ids and index < len(header.tokens) and header.tokens[index] == token
    }
    return replace(header, ids={**header.ids, **named}) if named else header

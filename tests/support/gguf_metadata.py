"""Metadata that a converter writes about a Hugging Face tokenizer into a GGUF header, for tests.

From the documented behaviour of llama.cpp's converter: tokens by id, padded to the size of the embedding; control,
user-defined and unused tokens marked; merges as "left right"; spaces of Gemma's user-defined tokens written as spaces;
scores of added tokens overwritten.
"""

from __future__ import annotations

import json
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_level_metadata(hf: Any, pre: str, *, pad_to: int = 0, architecture: str = "llama") -> dict[str, Any]:
    """The header of a byte-level vocabulary; `hf` is a transformers tokenizer."""
    names = {index: token for token, index in hf.get_vocab().items()}
    added = hf.added_tokens_decoder
    tokens, types = [], []
    for index in range(max(pad_to, max(names) + 1)):
        if index not in names:
            tokens.append(f"[PAD{index}]")
            types.append(UNUSED)
        elif index in added:
            tokens.append(str(added[index]))
            types.append(CONTROL if added[index].special or looks_special(str(added[index])) else USER_DEFINED)
        else:
            tokens.append(names[index])
            types.append(NORMAL)
    merges = json.loads(hf.backend_tokenizer.to_str())["model"]["merges"]
    return {
        "general.architecture": architecture, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges], **special_ids(hf),
    }  # fmt: skip


def sentencepiece_metadata(
    hf: Any, scores: dict[str, float], *, architecture: str = "llama", pad_to: int = 0
) -> dict[str, Any]:
    """The header of a SentencePiece vocabulary; `scores` are those of its model."""
    names = {index: token for token, index in hf.get_vocab().items()}
    added = hf.added_tokens_decoder
    tokens, types, written = [], [], []
    for index in range(max(pad_to, max(names) + 1)):
        token = names.get(index, f"[PAD{index}]")
        if index not in names:
            kind, score = UNUSED, -10000.0
        elif index in added:
            score = -1000.0
            kind = CONTROL if added[index].special or looks_special(token) else USER_DEFINED
            kind = UNKNOWN if token == "<unk>" else kind
            token = token if kind != USER_DEFINED else token.replace("\u2581", " ")
        else:
            score = scores[token]
            kind = BYTE if len(token) == 6 and token.startswith("<0x") else NORMAL
        tokens.append(token)
        types.append(kind)
        written.append(score)
    return {
        "general.architecture": architecture, "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": written, "tokenizer.ggml.token_type": types,
        **special_ids(hf),
    }  # fmt: skip


def wordpiece_metadata(hf: Any) -> dict[str, Any]:
    """The header of BERT's kind of vocabulary: pieces that begin a word are marked, and those that go on are not."""
    names = {index: token for token, index in hf.get_vocab().items()}
    tokens = [names[index] for index in range(len(names))]
    marked = [
        token if token[:1] == "[" and token[-1:] == "]" else token[2:] if token[:2] == "##" else f"\u2581{token}"
        for token in tokens
    ]
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "bert-bge",
        "tokenizer.ggml.tokens": marked,
        "tokenizer.ggml.token_type": [
            CONTROL if index in hf.all_special_ids else NORMAL for index in range(len(names))
        ],
        "tokenizer.ggml.unknown_token_id": hf.unk_token_id,
        "tokenizer.ggml.cls_token_id": hf.cls_token_id,
        "tokenizer.ggml.seperator_token_id": hf.sep_token_id,
    }


def special_ids(hf: Any) -> dict[str, Any]:
    """The ids and flags that the header names."""
    found = {
        "bos_token_id": hf.bos_token_id, "eos_token_id": hf.eos_token_id, "unknown_token_id": hf.unk_token_id,
        "padding_token_id": hf.pad_token_id,
    }  # fmt: skip
    keys = {f"tokenizer.ggml.{name}": value for name, value in found.items() if value is not None}
    plain = hf.encode("x", add_special_tokens=False)
    edged = hf.encode("x")
    keys["tokenizer.ggml.add_bos_token"] = edged != plain and edged[0] == hf.bos_token_id
    keys["tokenizer.ggml.add_eos_token"] = edged != plain and edged[-1] == hf.eos_token_id
    if hf.chat_template:
        keys["tokenizer.chat_template"] = hf.chat_template
    return keys


def looks_special(token: str) -> bool:
    """True if the converter takes a token that is not special for a control token, by its name."""
    return (
        token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (token.startswith("<|") and token.endswith("|>"))
        or (token.startswith("<\uff5c") and token.endswith("\uff5c>"))
        or token.startswith("<unused")
    )

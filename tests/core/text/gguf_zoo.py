"""Small Hugging Face tokenizers of every family that GGUF files have, with vocabularies trained here.

The normalizers and pre-tokenizers are written down as the tokenizer.json files of the families' models have them, and
where transformers has a class for a family, that class builds it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from core.text.many_scripts import TEXTS
from support.tables import table
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertTokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.tokenization_utils_base import generate_merges

PUBLISHED: dict[str, tuple[dict[str, Any] | None, list[dict[str, Any]], bool]] = table(__file__, "published tokenizers")
"""Name in `tokenizer.ggml.pre` -> normalizer, pre-tokenizers, and whether words skip the merges."""


def trained(normalizer: dict[str, Any] | None, steps: list[dict[str, Any]], ignore_merges: bool) -> Tokenizer:
    """A byte-level tokenizer trained on the texts; some whole words are tokens that no merges make."""
    model = {"type": "BPE", "vocab": {}, "merges": [], "ignore_merges": ignore_merges}
    parts = {"normalizer": normalizer, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "model": model}
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    empty = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None}
    tok = Tokenizer.from_str(json.dumps({**empty, **parts, "decoder": decoder}))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=560, initial_alphabet=alphabet, show_progress=False))
    data = json.loads(tok.to_str())
    data["model"]["ignore_merges"] = ignore_merges
    for word in ("Ġquick", "iPhone", "ĠAb", "33", "Ġ===", "Ã©tude"):
        data["model"]["vocab"].setdefault(word, len(data["model"]["vocab"]))
    return Tokenizer.from_str(json.dumps(data))


def with_added(tok: Tokenizer) -> Tokenizer:
    tok.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>"])
    tok.add_tokens([AddedToken(token, normalized=False) for token in ("<tool>", "né", "\t\t\t", "   ", "<|fim|>")])
    return tok


@cache
def published(pre: str) -> Any:
    """The family's tokenizer, put together as its tokenizer.json says."""
    tok = with_added(trained(*PUBLISHED[pre]))
    if pre in ("llama-bpe", "tekken", "command-r"):
        bos = ("<|begin|>", tok.token_to_id("<|begin|>"))
        tok.post_processor = processors.TemplateProcessing("<|begin|> $A", "<|begin|> $A <|begin|> $B", [bos])
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<|begin|>", eos_token="<|im_end|>")


@cache
def by_class(pre: str) -> Any:
    """The family's tokenizer as transformers' own class makes it from a vocabulary and merges."""
    source = json.loads(trained(*PUBLISHED[pre]).to_str())["model"]
    kind = {"qwen2": Qwen2Tokenizer, "gpt-2": GPT2Tokenizer}[pre]
    hf = kind(vocab=source["vocab"], merges=[tuple(merge) for merge in source["merges"]])
    hf.add_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<tool>", normalized=False)])
    return hf


@cache
def bert(lowercase: bool) -> Any:
    """BERT's tokenizer, by the class of transformers."""
    tok = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tok.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    texts = [text for text in TEXTS if "▁" not in text and "[PAD" not in text]
    tok.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=500, special_tokens=marks, show_progress=False))
    return BertTokenizer(vocab=tok.get_vocab(), do_lower_case=lowercase)


# -- SentencePiece

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def pieces() -> list[str]:
    """Pieces of two characters and more in the order in which BPE finds them, then the characters."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=True)
    latin = ["".join(char for char in text if ord(char) < 0x500 and char not in "\n\t\r") for text in TEXTS]
    tok.train_from_iterator(latin * 2, trainers.BpeTrainer(vocab_size=500, show_progress=False))
    found = sorted(tok.get_vocab(), key=tok.get_vocab().__getitem__)
    plain = [piece for piece in found if set(piece) != {"▁"} or len(piece) == 1]
    return [*(piece for piece in plain if len(piece) > 1), *(piece for piece in plain if len(piece) == 1)]


def scored(before: list[str], runs: list[str], run_score: float) -> dict[str, float]:
    """Every piece's score: those before at nought, runs at one of their own, the rest by the order of merging."""
    scores = dict.fromkeys(before, 0.0) | dict.fromkeys(runs, run_score)
    for place, piece in enumerate(piece for piece in pieces() if piece not in scores):
        scores[piece] = -float(place)
    return scores


def llama_like(kind: str) -> tuple[Any, dict[str, float]]:
    """Llama's or Phi-3's tokenizer and the scores of its pieces."""
    runs = ["▁" * count for count in (2, 4, 8, 5, 16, 6, 12, 3, 7)]
    scores = scored(["<unk>", "<s>", "</s>", *BYTE_TOKENS], runs, -1e9)
    vocab = {piece: index for index, piece in enumerate(scores)}
    merges = generate_merges(vocab, scores)
    if kind == "llama":
        hf = LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)
        hf.add_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
        hf.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("né", normalized=False)])
        return hf, scores
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tok.decoder = decoders.Sequence(steps)
    marks = ["<unk>", "<s>", "<|endoftext|>"]
    tok.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    strips = ["<|assistant|>", "<|im_end|>", "<|user|>"]
    tok.add_special_tokens([AddedToken(mark, special=True, normalized=False, rstrip=True) for mark in strips])
    tok.add_tokens([AddedToken("</s>", special=False, normalized=False, rstrip=True)])
    tok.post_processor = processors.TemplateProcessing("$A", "$A $B", [])
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="<|endoftext|>"), scores


def gemma_like() -> tuple[Any, dict[str, float]]:
    """Gemma's tokenizer and the scores of its pieces: runs of white space are user-defined, with a score of nought."""
    head = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>", "<unused1>"]
    runs = [char * count for char in ("\n", "▁", "\t") for count in range(2, 12)]
    scores = scored([*head, "\n", "\t"], runs, 0.0) | dict.fromkeys(BYTE_TOKENS, 0.0)
    vocab = {piece: index for index, piece in enumerate(scores)}
    hf = GemmaTokenizer(vocab=vocab, merges=generate_merges(vocab, scores), add_bos_token=True)
    turns = ["<start_of_turn>", "<end_of_turn>"]
    hf.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in turns])
    hf.add_tokens([AddedToken(run, normalized=False) for run in [*runs, "<unused1>"]])
    return hf, scores


SENTENCEPIECE: dict[str, Callable[[], tuple[Any, dict[str, float]]]] = {
    "llama": cache(lambda: llama_like("llama")),
    "phi3": cache(lambda: llama_like("phi3")),
    "gemma3": cache(gemma_like),
}
"""Makers of a tokenizer and its pieces' scores, by `general.architecture`."""

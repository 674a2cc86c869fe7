"""Tiny tokenizers of every kind of decoder there is, trained on a few multilingual lines."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LINES = [
    "The quick brown fox jumps over the lazy dog, and it doesn't stop there! Does it? Yes: 12345 times.",
    "He said 'hello', she 'd said \"goodbye\"; they've gone. I'm here . We 're fine .\n\n  def f(x):\n\treturn x\n",
    "Grüße aus München, żółć, señor, naïve café e\u0301tude A\u030angstro\u0308m",
    "你好,世界。今天天气很好。日本語のテキスト、ひらがなとカタカナ。",
    "한국어 문장 한국 \u1112\u1161\u11ab 각 नमस्ते दुनिया مرحبا بالعالم שלום עולם ไทย",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 🇩🇪 thumbs 👍🏽 done ✅ \ufffd \u200b zero",
] * 3
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<é›>"]


def byte_level(*, qwen: bool) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    if qwen:
        tok.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
        tok.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    else:
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=520, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tok.train_from_iterator(LINES, trainer)
    return _with_added(tok)


def byte_fallback(*, strip: bool) -> Tokenizer:
    """Llama 2 (strip) or Gemma: a small Latin vocabulary, all other characters as byte tokens."""
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    latin = ["".join(c for c in line if ord(c) < 0x180) for line in LINES]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tok.train_from_iterator(latin, trainer)
    data = json.loads(tok.to_str())
    vocab = data["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    data["model"]["byte_fallback"] = data["model"]["fuse_unk"] = True
    tok = Tokenizer.from_str(json.dumps(data))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tok.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return _with_added(tok)


def unigram(*, fallback: bool) -> Tokenizer:
    tok = Tokenizer(models.Unigram())
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, unk_token="<unk>", special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tok.train_from_iterator(LINES, trainer)
    if fallback:
        data = json.loads(tok.to_str())
        data["model"]["vocab"] += [[f"<0x{byte:02X}>", -9.0] for byte in range(256)]
        data["model"]["byte_fallback"] = True
        tok = Tokenizer.from_str(json.dumps(data))
        tok.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _with_added(tok)


def wordpiece(*, cleanup: bool) -> Tokenizer:
    tok = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tok.decoder = decoders.WordPiece(cleanup=cleanup)
    special = ["[UNK]", "[CLS]", "[SEP]", "##"]
    tok.train_from_iterator(
        LINES, trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    )
    return _with_added(tok)


def characters(*, fuse: bool) -> Tokenizer:
    """One token a character; without a decoder the library joins tokens by spaces."""
    alphabet = sorted({char for line in LINES for char in line})
    tok = Tokenizer(models.WordLevel({char: i for i, char in enumerate([*alphabet, "[UNK]"])}, unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if fuse:
        tok.decoder = decoders.Fuse()
    return _with_added(tok)


def suffix_bpe() -> Tokenizer:
    tok = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tok.train_from_iterator(LINES, trainer)
    return _with_added(tok)


def ctc() -> Tokenizer:
    tok = characters(fuse=True)
    tok.add_tokens(["<pad>", "|"])
    tok.decoder = decoders.CTC(pad_token="<pad>", word_delimiter_token="|", cleanup=False)
    return tok


class Backwards:
    """A decoder nobody can stream: each token changes the beginning of the text."""

    def __init__(self) -> None:
        self._inner = characters(fuse=True)
        self.get_vocab = self._inner.get_vocab
        self.get_added_tokens_decoder = self._inner.get_added_tokens_decoder
        self.encode = self._inner.encode

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return str(self._inner.decode(ids, skip_special_tokens=skip_special_tokens))[::-1]


class NamelessBytes:
    """A decoder of bytes whose tokens' names do not tell the bytes, as in tokenizers with code of their own."""

    def get_vocab(self) -> dict[str, int]:
        return {f"token{byte}": byte for byte in range(256)}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode("utf-8", "replace")


class Shifting:
    """Letters after an odd number of shift tokens are capitals: an effect that reaches any distance."""

    def get_vocab(self) -> dict[str, int]:
        return {letter: i for i, letter in enumerate("^abcdefghijklmnopqrstuvwxyz")}

    def encode(self, text: str) -> list[int]:
        return [ord(char) % 27 for char in text]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        text, shifted = "", False
        for token in ids:
            shifted ^= token == 0
            text += "" if token == 0 else chr((0x40 if shifted else 0x60) + token)
        return text


def fast(tok: Tokenizer, **settings: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tok, **settings)


KINDS: dict[str, tuple[str, Any]] = {
    "gpt2": ("bytes", lambda: byte_level(qwen=False)),
    "qwen": ("bytes", lambda: fast(byte_level(qwen=True), eos_token="<|im_end|>")),
    "llama2": ("pieces", lambda: fast(byte_fallback(strip=True), bos_token="<s>", eos_token="</s>")),
    "gemma": ("pieces", lambda: byte_fallback(strip=False)),
    "unigram": ("pieces", lambda: fast(unigram(fallback=False))),
    "unigram-bytes": ("pieces", lambda: unigram(fallback=True)),
    "wordpiece": ("pieces", lambda: wordpiece(cleanup=True)),
    "wordpiece-hf-cleanup": (
        "window", lambda: fast(wordpiece(cleanup=False), clean_up_tokenization_spaces=True),
    ),
    "characters": ("pieces", lambda: characters(fuse=True)),
    "no-decoder": ("pieces", lambda: characters(fuse=False)),
    "suffix-bpe": ("window", suffix_bpe),
    "ctc": ("window", ctc),
    "nameless-bytes": ("window", NamelessBytes),
    "shifting": ("window", Shifting),
    "backwards": ("whole", Backwards),
}  # fmt: skip
"""Name -> the plan its token table should find, and how to build it."""


def _with_added(tok: Tokenizer) -> Tokenizer:
    tok.add_special_tokens(SPECIAL)
    tok.add_tokens([AddedToken("<tool>", special=False), AddedToken("né", special=False)])
    return tok

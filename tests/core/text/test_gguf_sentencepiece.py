"""Vocabularies that the SentencePiece library itself trained: its ids are what models of that kind were taught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from core.text.many_scripts import TEXTS, random_texts

from asyncengine.assembly.gguf_text import load_gguf_tokenizer

RUNS = ["\n" * count for count in (2, 3)] + ["▁" * count for count in range(2, 9)]
GEMMA: dict[str, Any] = {
    "user_defined_symbols": [*RUNS, "<table>"], "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3,
    "add_dummy_prefix": False,
}  # fmt: skip
TRAINING: dict[str, Any] = {
    "vocab_size": 900, "hard_vocab_limit": False, "model_type": "bpe", "byte_fallback": True, "split_digits": True,
    "character_coverage": 0.98, "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True, "minloglevel": 2,
}  # fmt: skip


def header(pieces: Any, architecture: str, whole: list[str]) -> dict[str, Any]:
    """The header that a converter writes of a trained model; `whole` are its user-defined pieces."""
    tokens, scores, types = [], [], []
    for index in range(pieces.vocab_size()):
        token, score = pieces.IdToPiece(index), pieces.GetScore(index)
        kind = 2 if pieces.IsUnknown(index) else 3 if pieces.IsControl(index) else 6 if pieces.IsByte(index) else 1
        if token in whole:
            token, score, kind = token.replace("▁", " "), -1000.0, 4
        tokens.append(token)
        scores.append(score)
        types.append(kind)
    values = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    values |= {"bos_token_id": pieces.bos_id(), "eos_token_id": pieces.eos_id(), "unknown_token_id": pieces.unk_id()}
    return {"general.architecture": architecture, **{f"tokenizer.ggml.{name}": value for name, value in values.items()}}


@pytest.mark.parametrize(("architecture", "settings"), [("llama", {}), ("gemma2", GEMMA)])
def test_ids_equal_sentencepieces_own(architecture: str, settings: dict[str, Any], tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    texts = [*TEXTS, *random_texts(1, 300)]
    lines = [line for text in texts for line in text.splitlines() if line.strip() and "\0" not in line]
    (tmp_path / "lines.txt").write_text("\n".join(lines), encoding="utf-8")
    prefix = str(tmp_path / "tokenizer")
    library.SentencePieceTrainer.Train(input=str(tmp_path / "lines.txt"), model_prefix=prefix, **TRAINING | settings)
    pieces = library.SentencePieceProcessor()
    pieces.LoadFromFile(prefix + ".model")
    built = load_gguf_tokenizer(header(pieces, architecture, settings.get("user_defined_symbols", [])))
    compared = 0
    for text in (*TEXTS, *random_texts(2, 600)):
        # marks are text to the library; a text that begins with a space gets a second one from it, but not from
        # transformers' Llama; and runs written with the sign for a space are whole only in raw text
        if "<s>" in text or "</s>" in text or "▁" in text or text.startswith(" "):
            continue
        assert built.encode(text, add_special_tokens=False) == pieces.EncodeAsIds(text), ascii(text)
        compared += 1
    assert compared > 300

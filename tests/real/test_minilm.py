"""all-MiniLM-L6-v2 against sentence-transformers on the same files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.real_models import paragraphs

from asyncengine import Engine

NASTY = (
    "", " \n", "x" * 3000, "many words " * 300,
    "na\u00efve \u2014 \u201cquoted\u201d", "\U0001f600 \U0001f1f3\U0001f1f4", "a\x00b",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd", "\u4eca\u65e5\u306f\u3001\u4e16\u754c", "1e-7 3.14159 0xff",
    "[CLS] and [SEP] as words",
)  # fmt: skip
CLOSE = 1e-6


def test_vectors_are_those_of_sentence_transformers(minilm: Path) -> None:
    """Long ones are cut where the library cuts them, and each text alone has the bits that it has in a batch."""
    import sentence_transformers

    texts = [*paragraphs()[::40][:100], *NASTY]
    with Engine.from_pretrained(str(minilm), dtype="float32", show_progress=False) as engine:
        found = engine.embed(texts)
        alone = np.stack([engine.embed(text).vectors[0] for text in texts[::5]])
    assert (alone == found.vectors[::5]).all()
    reference = sentence_transformers.SentenceTransformer(str(minilm), device="cpu", local_files_only=True)
    wanted = np.stack([reference.encode(text) for text in texts])
    assert np.abs(found.vectors - wanted).max() < CLOSE
    assert texts.index(NASTY[3]) in found.truncated

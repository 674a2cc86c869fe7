"""The shipped weights: small, of the agreed form, and better than counting words."""

from __future__ import annotations

import json
import re

from safetensors import safe_open

from asyncengine.demo import EMBEDDER_PATH
from tools.demo_embedder.bert import MAX_TOKENS, PROMPTS
from tools.demo_embedder.evaluate import measure
from tools.demo_embedder.pairs import MAKERS

CARD = (EMBEDDER_PATH / "README.md").read_text(encoding="utf-8")
FOLDER_LIMIT = 3 * 1024 * 1024
LEAST = {"facts": (0.85, 0.95), "others": (0.7, 0.9), "keywords": (0.5, 0.7), "reworded": (0.85, 0.95)}
"""Of two hundred texts of each skill: recall at 1 and at 5. The card has what is measured on a thousand."""


def test_folder_is_small_and_complete() -> None:
    files = {path.relative_to(EMBEDDER_PATH).as_posix() for path in EMBEDDER_PATH.rglob("*") if path.is_file()}
    assert {"config.json", "model.safetensors", "modules.json", "1_Pooling/config.json", "tokenizer.json"} <= files
    assert sum((EMBEDDER_PATH / name).stat().st_size for name in files) <= FOLDER_LIMIT
    with safe_open(EMBEDDER_PATH / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    assert json.loads((EMBEDDER_PATH / "config_sentence_transformers.json").read_text())["prompts"] == PROMPTS
    assert json.loads((EMBEDDER_PATH / "sentence_bert_config.json").read_text())["max_seq_length"] == MAX_TOKENS


def test_held_out_recall() -> None:
    """Questions and other words beyond what counting words finds; rare words as far as they go."""
    found = measure(EMBEDDER_PATH, 200, seed=11)
    for skill, rates in found.items():
        at_1, at_5 = rates["demo-embed"]
        assert at_1 >= LEAST[skill][0], (skill, rates)
        assert at_5 >= LEAST[skill][1], (skill, rates)
    for skill in ("facts", "reworded"):
        assert found[skill]["demo-embed"][0] > max(found[skill]["hashed words"][0], found[skill]["BM25"][0])


def test_the_card_states_every_rate() -> None:
    rows = dict(re.findall(r"\(`(\w+)`\) \| ([\d.]+) % / ", CARD))
    assert set(rows) == set(MAKERS)

"""The bundled weights: those whose rates their cards state, small, and of the agreed form."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from asyncengine import Engine
from asyncengine.demo import ADAPTERS_PATH, DRAFT_PATH, EMBEDDER_PATH, MODEL_PATH, RERANKER_PATH, VISION_PATH
from makers.demo_embedder import bert, pairs
from makers.demo_model import adapter_texts, conversations
from makers.demo_reranker.cross_encoder import Served
from makers.demo_vision import questions

MEASURED = [
    (MODEL_PATH, 12_000_000, "b7bbb8c63960397d", r"\(`(\w+)`\) \| ([\d.]+) %", conversations.MAKERS),
    (DRAFT_PATH, 4_000_000, "27e20e31dbfee8df", "", ()),
    (EMBEDDER_PATH, 3_000_000, "c3003a024175642f", r"\(`(\w+)`\) \| ([\d.]+) % / ", pairs.MAKERS),
    (RERANKER_PATH, 2_000_000, "961610a2210f86df", r"\(`(\w+)`\) \| ([\d.]+) % \| ", pairs.MAKERS),
    (VISION_PATH, 3_000_000, "9233f0d0f3121e58", r"\(`([\w ]+)`\) \| ([\d.]+) %", questions.MAKERS),
    (ADAPTERS_PATH / "json", 250_000, "4c289678fa096a84", r"\(`(\w+)`\) \| ([\d.]+) %", adapter_texts.SPOKEN),
    (ADAPTERS_PATH / "pirate", 250_000, "2e8d8162b7b3704b", r"\(`(\w+)`\) \| ([\d.]+) %", adapter_texts.SPOKEN),
]
"""Folders, the most bytes they may have, the beginning of the weights' SHA-256, and what their cards have a rate of.
After training anew: `python -m makers.demo_model.evaluate` and its like, then the card and the digest."""


@pytest.mark.parametrize(
    ("folder", "limit", "digest", "rate", "skills"), MEASURED, ids=lambda given: getattr(given, "name", "")
)
def test_weights_are_those_that_the_card_has_the_rates_of(
    folder: Path, limit: int, digest: str, rate: str, skills: Iterable[str]
) -> None:
    [weights] = folder.glob("*.safetensors")
    assert hashlib.sha256(weights.read_bytes()).hexdigest().startswith(digest)
    assert sum(path.stat().st_size for path in folder.rglob("*")) <= limit
    if rate:
        rates = dict(re.findall(rate, (folder / "README.md").read_text(encoding="utf-8")))
        assert set(rates) == set(skills)
        assert all(30 < float(each) <= 100 for each in rates.values())
    if "adapters" not in folder.parts:
        with safe_open(weights, "pt") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_texts_are_rendered_as_they_were_learned() -> None:
    """Templates and tokenizers are those of the weights' training."""
    digest = hashlib.sha256()
    for folder in (MODEL_PATH, VISION_PATH):
        for name in ("chat_template.jinja", "tokenizer.json"):
            digest.update((folder / name).read_bytes())
    assert digest.hexdigest().startswith("8d451c9bb8082886")


def test_configurations_agree_with_one_another_and_name_no_machine() -> None:
    tokenizers = [json.loads((folder / "tokenizer.json").read_text()) for folder in (RERANKER_PATH, EMBEDDER_PATH)]
    assert tokenizers[0] == tokenizers[1]
    assert json.loads((EMBEDDER_PATH / "config_sentence_transformers.json").read_text())["prompts"] == bert.PROMPTS
    for name in ("json", "pirate"):
        text = (ADAPTERS_PATH / name / "adapter_config.json").read_text(encoding="utf-8")
        assert json.loads(text)["base_model_name_or_path"] == "demo"
        assert not set("/\\") & set(text)


ASKED = "Who is the mayor of Velmora?"
TEXTS = ["the brass lantern costs 145 dollars", "Velmora is led by mayor Ida Lund.", "", "word " * 100]


def test_the_engine_gives_the_scores_of_the_reference() -> None:
    with Engine.from_pretrained("demo-rerank", dtype="float32", num_threads=1, show_progress=False) as engine:
        assert (engine.info.task, engine.info.name) == ("rerank", "demo-rerank")
        ranked = engine.rerank(ASKED, TEXTS).results
    wanted = Served(RERANKER_PATH)(ASKED, TEXTS)
    assert ranked[0].index == 1
    torch.testing.assert_close(torch.tensor([each.score for each in ranked]), wanted[[e.index for e in ranked]])

"""The demo reranker: learned as it is served, small, and a better order than the embedder's."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from asyncengine import Engine
from asyncengine.demo import EMBEDDER_PATH, RERANKER_PATH
from tools.demo_embedder.bert import Served as Embedder
from tools.demo_embedder.pairs import MAKERS, stream
from tools.demo_reranker.candidates import PER_QUERY, candidates
from tools.demo_reranker.cross_encoder import Served, export, read, scores
from tools.demo_reranker.evaluate import measure
from tools.demo_reranker.train import Options, Trainer

CARD = (RERANKER_PATH / "README.md").read_text(encoding="utf-8")
FOLDER_LIMIT = 2_000_000
LEAST = {"facts": 0.75, "others": 0.9, "keywords": 0.65, "reworded": 0.8}
"""Shares of forty queries of each skill whose text comes first of two hundred. The card has more."""
ASKED = "Who is the mayor of Velmora?"
TEXTS = ["the brass lantern costs 145 dollars", "Velmora is led by mayor Ida Lund.", "", "word " * 100]


def test_folder_is_small_and_complete() -> None:
    files = {path.name for path in RERANKER_PATH.iterdir()}
    assert files == {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert sum((RERANKER_PATH / name).stat().st_size for name in files) <= FOLDER_LIMIT
    with safe_open(RERANKER_PATH / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    same = [json.loads((folder / "tokenizer.json").read_text()) for folder in (RERANKER_PATH, EMBEDDER_PATH)]
    assert same[0] == same[1]


def test_the_engine_gives_the_scores_of_the_reference() -> None:
    with Engine.from_pretrained("demo-rerank", dtype="float32", num_threads=1, show_progress=False) as engine:
        assert (engine.info.task, engine.info.name) == ("rerank", "demo-rerank")
        ranked = engine.rerank(ASKED, TEXTS).results
    wanted = Served(RERANKER_PATH)(ASKED, TEXTS)
    assert ranked[0].index == 1
    torch.testing.assert_close(torch.tensor([each.score for each in ranked]), wanted[[e.index for e in ranked]])


def test_held_out_order() -> None:
    """Names and rare words are in a better order than the embedder's."""
    found = measure(RERANKER_PATH, 200, 40, seed=11)
    for skill, (_, reranked, among, _) in found.items():
        assert LEAST[skill] <= reranked <= among, (skill, found)
    for skill in ("others", "keywords"):
        assert found[skill][1] > found[skill][0], (skill, found)


def test_the_card_states_every_rate() -> None:
    assert set(re.findall(r"\(`(\w+)`\) \| [\d.]+ % \| ", CARD)) == set(MAKERS)


def test_candidates_begin_with_the_right_text_and_differ() -> None:
    embedder = Embedder(EMBEDDER_PATH)
    listed = candidates(stream("test"), embedder, random.Random(0), queries=6, pool=24)
    again = candidates(stream("test"), embedder, random.Random(0), queries=6, pool=24)
    assert listed == again
    assert [len(set(texts)) for _, texts in listed] == [PER_QUERY] * 6
    pairs = {pair.query: pair.text for group, _ in zip(stream("test"), range(60), strict=False) for pair in group}
    assert [pairs[query] for query, _ in listed] == [texts[0] for _, texts in listed]


def test_a_few_steps_learn_and_repeat() -> None:
    runs = []
    for count in (8, 2):
        trainer = Trainer(Options(queries=4, pool=12, warmup=2))
        runs.append([trainer.update(0.0) for _ in range(count)])
    assert runs[0][:2] == pytest.approx(runs[1], rel=1e-4)
    assert sum(runs[0][-2:]) < sum(runs[0][:2])


def test_what_is_exported_is_what_was_trained(tmp_path: Path) -> None:
    trainer = Trainer(Options())
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.copy_(parameter.bfloat16().float())  # so that export loses nothing
    export(trainer.model, tmp_path)
    served = Served(tmp_path)
    with torch.inference_mode():
        rows = read(served.tokenizer, [(ASKED, text) for text in TEXTS])
        wanted = torch.sigmoid(scores(trainer.model, rows))
    torch.testing.assert_close(served(ASKED, TEXTS), wanted, atol=1e-5, rtol=1e-5)

"""The demo reranker: the engine gives the scores of transformers."""

from __future__ import annotations

import torch

from asyncengine import Engine
from asyncengine.demo import RERANKER_PATH
from makers.demo_reranker.cross_encoder import Served

ASKED = "Who is the mayor of Velmora?"
TEXTS = ["the brass lantern costs 145 dollars", "Velmora is led by mayor Ida Lund.", "", "word " * 100]


def test_the_engine_gives_the_scores_of_the_reference() -> None:
    with Engine.from_pretrained("demo-rerank", dtype="float32", num_threads=1, show_progress=False) as engine:
        assert (engine.info.task, engine.info.name) == ("rerank", "demo-rerank")
        ranked = engine.rerank(ASKED, TEXTS).results
    wanted = Served(RERANKER_PATH)(ASKED, TEXTS)
    assert ranked[0].index == 1
    torch.testing.assert_close(torch.tensor([each.score for each in ranked]), wanted[[e.index for e in ranked]])

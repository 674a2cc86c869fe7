"""The demo reranker: learned as it is served."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncengine import Engine
from asyncengine.demo import RERANKER_PATH
from tools.demo_reranker.cross_encoder import Served, export, read, scores
from tools.demo_reranker.train import Options, Trainer

ASKED = "Who is the mayor of Velmora?"
TEXTS = ["the brass lantern costs 145 dollars", "Velmora is led by mayor Ida Lund.", "", "word " * 100]


def test_the_engine_gives_the_scores_of_the_reference() -> None:
    with Engine.from_pretrained("demo-rerank", dtype="float32", num_threads=1, show_progress=False) as engine:
        assert (engine.info.task, engine.info.name) == ("rerank", "demo-rerank")
        ranked = engine.rerank(ASKED, TEXTS).results
    wanted = Served(RERANKER_PATH)(ASKED, TEXTS)
    assert ranked[0].index == 1
    torch.testing.assert_close(torch.tensor([each.score for each in ranked]), wanted[[e.index for e in ranked]])


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

"""The export of the demo embedder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional

from asyncengine.demo import EMBEDDER_PATH
from tools.demo_embedder.bert import Served, vectors
from tools.demo_embedder.export import export
from tools.demo_embedder.train import Options, Trainer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EMBEDDER_PATH / "tokenizer.json"))


def test_what_is_exported_is_what_was_trained(tokenizer: Tokenizer, tmp_path: Path) -> None:
    trainer = Trainer(Options(pairs=8), tokenizer)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.copy_(parameter.bfloat16().float())  # so that export loses nothing
    export(trainer.model, tmp_path)
    texts = ["Who leads Velmora?", "The town is led by mayor Ida Lund, and lies on the river Asken.", ""]
    with torch.inference_mode():
        trained = functional.normalize(vectors(trainer.model, [e.ids for e in tokenizer.encode_batch(texts)]), dim=-1)
    torch.testing.assert_close(Served(tmp_path)(texts), trained, atol=1e-5, rtol=1e-5)
    modules = [module["type"].rpartition(".")[2] for module in json.loads((tmp_path / "modules.json").read_text())]
    assert modules == ["Transformer", "Pooling", "Normalize"]

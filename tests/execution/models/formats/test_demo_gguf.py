"""The demo model as GGUF, in three mixes: its weights survive, and so do its answers."""

from __future__ import annotations

import pytest
import torch
from support.demo_gguf import DEMO, MIXES, demo_weights, write_demo
from support.forwards import Forwards, relative_error
from transformers import PreTrainedTokenizerFast

from asyncengine.execution.layers.stored import dense
from asyncengine.execution.models.formats.gguf.model import GgufModel

from .gguf_reading import check_tensors, decoder_of

MOST = {"F16": 1e-3, "Q8_0": 7e-3, "Q4_K_M": 8e-2}
"""Relative error of a matrix."""
QUESTIONS = {"What is the capital of Norway?": "The capital of Norway is Oslo."}


@pytest.fixture(scope="module", params=MIXES)
def mix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, GgufModel]:
    path = tmp_path_factory.mktemp("demo") / "demo.gguf"
    written = write_demo(path, request.param)
    model = GgufModel(path)
    check_tensors(model, written)
    return request.param, model


def test_weights_survive(mix: tuple[str, GgufModel]) -> None:
    name, model = mix
    for tensor, original in demo_weights().items():
        stored = model.read(tensor)
        found = stored if isinstance(stored, torch.Tensor) else dense(stored)
        assert relative_error(original, found) < MOST[name], tensor
    if name == "Q4_K_M":
        assert sorted({tensor.kind for tensor in model.tensors.values()}) == ["F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"]


def test_answers_survive(mix: tuple[str, GgufModel]) -> None:
    """Greedy answers come from the weights that the file's numbers stand for."""
    _, model = mix
    assert model.metadata["tokenizer.huggingface.json"] == (DEMO / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json"))
    tokenizer.chat_template = model.metadata["tokenizer.chat_template"]
    decoder = decoder_of(model)
    for question, expected in QUESTIONS.items():
        turns = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        forwards, answer = Forwards(decoder, most=256), []
        logits = forwards.step(ids)
        while len(answer) < 30:
            token = int(logits[-1].argmax())
            if token == model.config["eos_token_id"]:
                break
            answer.append(token)
            logits = forwards.step([token])
        assert tokenizer.decode(answer).strip() == expected

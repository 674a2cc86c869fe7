"""Training must optimize the very function that is served, on the very text that is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncengine.demo import MODEL_PATH
from tools.demo_model.batches import Encoder
from tools.demo_model.conversations import make
from tools.demo_model.export import export
from tools.demo_model.llama import DRAFT, Llama, Shape


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_PATH)


def randomized(shape: Shape) -> Llama:
    """A model in which no layer is the identity; weights are exact in bfloat16, so export loses nothing."""
    model = Llama(shape)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.05, generator=generator))
            parameter.copy_(parameter.bfloat16().float())
    return model


@pytest.mark.parametrize("shape", [Shape(), DRAFT], ids=["demo", "draft"])
def test_logits_equal_transformers(shape: Shape, tmp_path: Path) -> None:
    model = randomized(shape)
    torch.save({"model": model.state_dict()}, tmp_path / "checkpoint.pt")
    export(tmp_path / "checkpoint.pt", tmp_path / "model", shape)
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.randint(3, 2000, (2, 83), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        torch.testing.assert_close(model(ids), served(ids).logits, atol=2e-3, rtol=1e-3)


def test_packed_documents_do_not_see_each_other() -> None:
    model = randomized(Shape(layers=2))
    ids = torch.randint(3, 2000, (1, 40))
    documents = torch.tensor([[0] * 15 + [1] * 25])
    with torch.inference_mode():
        packed = model.hidden_states(ids, documents, torch.float32)[:, 15:]
        alone = model.hidden_states(ids[:, 15:], None, torch.float32)
    torch.testing.assert_close(packed, alone, atol=1e-3, rtol=1e-3)


def test_only_assistant_tokens_have_full_weight(tokenizer: Any) -> None:
    ids, weights = Encoder(tokenizer).conversation(make("memory", 4))
    answers = [message["content"] for message in make("memory", 4).messages if message["role"] == "assistant"]
    learned = tokenizer.decode([token for token, weight in zip(ids, weights, strict=True) if weight == 1.0])
    assert learned == "".join(f"{answer}<|im_end|>" for answer in answers)

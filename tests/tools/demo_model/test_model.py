"""The shipped weights must load as an ordinary model and do their jobs on held-out conversations."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncengine.demo import DRAFT_PATH, MODEL_PATH
from tools.demo_model.conversations import MAKERS
from tools.demo_model.evaluate import Model, evaluate

CARD = (MODEL_PATH / "README.md").read_text(encoding="utf-8")
FOLDER_LIMIT = 12 * 1024 * 1024
LEAST = 0.6
"""What half a dozen conversations of each skill must reach; the model card has the rates measured on hundreds."""


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(MODEL_PATH)


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL_PATH.iterdir()) <= FOLDER_LIMIT


def test_what_guesses_is_at_most_a_third_of_it() -> None:
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (DRAFT_PATH, MODEL_PATH)]
    assert 3 * sizes[0] <= sizes[1]


def test_weights_are_bfloat16_and_tied() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.max_position_embeddings == 4096


@pytest.mark.parametrize("skill", MAKERS)
def test_held_out_conversations(model: Model, skill: str) -> None:
    scores, failures = evaluate(lambda items: model.answer(items, 96), [skill], 6, seed=11)
    assert scores[skill].rate >= LEAST, [(item.expected.value, text) for item, text in failures]


def test_the_card_states_a_rate_for_every_skill() -> None:
    rates = dict(re.findall(r"\(`(\w+)`\) \| ([\d.]+) %", CARD))
    assert set(rates) == set(MAKERS)
    assert all(50 < float(rate) <= 100 for rate in rates.values())

"""Latent attention: the bits of a token do not depend on its company, on chunks, or on who takes a prompt apart."""

from __future__ import annotations

import pytest
import torch
from support.checkpoints import Checkpoint
from support.drive import prompts
from support.forwards import Forwards
from support.tiny_configs import common, hf
from support.tiny_models import VOCAB

pytest.importorskip("numba")

from support.layer_options import options

from asyncengine.config import EngineConfig
from asyncengine.errors import UnsupportedModel
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.families import decoder_config_of
from asyncengine.execution.models.loading import load_model


@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3", "minicpm3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_bits_of_a_token(family: str, dtype: str, checkpoint: Checkpoint) -> None:
    """The whole prompt at once, in chunks of 7 between other rows, and a token at a time."""
    model = load_model(str(checkpoint(family)), EngineConfig(dtype=dtype, show_progress=False)).model
    assert isinstance(model, Decoder)
    text, other = prompts([61, 90], VOCAB)
    whole = Forwards(model).step(text)
    one_by_one, forwards = [], Forwards(model)
    for token in text:
        one_by_one.append(forwards.step([token]))
    assert torch.equal(torch.cat(one_by_one), whole)
    company, chunks = Forwards(model, rows=3), []
    for first in range(0, len(text), 7):
        chunk, beside = text[first : first + 7], other[first : first + 5]
        made = company.step([*beside, *chunk, 3], [len(beside), len(chunk), 1])
        chunks.append(made[len(beside) : -1])
    assert torch.equal(torch.cat(chunks), whole)
    assert len(set(whole.argmax(-1).tolist())) > 8


def test_odd_latent_vectors_are_refused() -> None:
    """Two numbers lie in one word."""
    sizes = {"q_lora_rank": None, "num_key_value_heads": 4, "kv_lora_rank": 23, "qk_rope_head_dim": 8}
    config = hf.YoutuConfig(**common(**sizes, qk_nope_head_dim=16, v_head_dim=12))
    described = decoder_config_of(config, 64)
    assert described is not None
    with pytest.raises(UnsupportedModel, match="23"):
        Decoder(described, options(torch.bfloat16), 64)

"""Tokens have the same bits alone and in a chunk where `unsteady` says nothing: speculation rests on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.drive import prompts
from support.forwards import Forwards
from support.long import LONG

from asyncengine.config import EngineConfig
from asyncengine.execution.models.loading import load_model

(TOKENS,) = prompts([26], 500)
_SHAPE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
_MIXTURE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS: dict[str, dict[str, object]] = {
    "llama": {}, "qwen3": {}, "gemma2": {"sliding_window": 8}, "gemma3_text": {"sliding_window": 8},
    "mixtral": _MIXTURE, "qwen3_moe": _MIXTURE, "qwen2_moe": {**_MIXTURE, "shared_expert_intermediate_size": 96},
    "glm4_moe": {**_MIXTURE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    "olmo2": {}, "cohere2": {}, "phi3": {"pad_token_id": 0}, "glm4": {},
}  # fmt: skip


def found(folder: Path, **settings: object) -> str | None:
    """Compare every cut of a text; why nothing may be guessed, if so."""
    config = EngineConfig(show_progress=False, **settings)  # type: ignore[arg-type]
    model = load_model(str(folder), config).model
    one_by_one = Forwards(model)
    singly = torch.cat([one_by_one.step([token]) for token in TOKENS])
    different = []
    for first, count in ((1, 2), (3, 4), (9, 8), (10, 16)):
        chunked = Forwards(model)
        for token in TOKENS[:first]:
            chunked.step([token])
        logits = chunked.step(TOKENS[first : first + count])
        if not torch.equal(logits, singly[first : first + count]):
            different.append((first, count))
    assert model.unsteady is not None or not different
    return model.unsteady


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (kind, ("float32", "bfloat16")[(place + turn) % 2])
        for turn in range(1 + LONG)
        for place, kind in enumerate(KINDS)
    ],
)
def test_the_same_bits_in_a_chunk(kind: str, dtype: str, tmp_path: Path) -> None:
    """Each kind in one type, by turns; in the long form in both."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **_SHAPE, **KINDS[kind]}))
    assert found(tmp_path, dtype=dtype, load_format="dummy") is None


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}])
def test_the_bundled_model_is_steady(settings: dict[str, object]) -> None:
    from asyncengine.demo import MODEL_PATH

    assert found(MODEL_PATH, **settings) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_says_why_not_and_what_helps(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as one without AVX2; the setting that the reason names gives the engine's own products."""
    from asyncengine.demo import MODEL_PATH
    from asyncengine.kernels.cpu import packed

    monkeypatch.setattr(packed, "cpu_has", lambda *features: False)
    assert "no AVX2" in str(load_model(str(MODEL_PATH), EngineConfig(dtype=dtype, show_progress=False)).unsteady)
    helped = EngineConfig(dtype=dtype, quantization="int8", show_progress=False)
    assert load_model(str(MODEL_PATH), helped).unsteady is None

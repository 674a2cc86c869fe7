"""Mixtures that run through transformers: near ties of their routers, and those whose attention is compressed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support.drive import Driver, greedy_reference, prompts
from support.tiny_models import FAMILIES, VOCAB, common, make_model
from transformers.models.hunyuan_v1_moe import modeling_hunyuan_v1_moe
from transformers.models.llama import modeling_llama

from asyncengine.config import EngineConfig
from asyncengine.errors import UnsupportedModel
from asyncengine.execution.models.fallback.model import TransformersModel
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner

CONFIG = EngineConfig(page_size=4, kv_cache_memory="8MiB", show_progress=False)
WANT = 24
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
COMPRESSED: dict[str, Callable[[], Any]] = {
    "deepseek v2": lambda: hf.DeepseekV2Config(**common(**LATENT)),
    "deepseek v3": lambda: hf.DeepseekV3Config(**common(**LATENT)),
}


def many_experts() -> Any:
    return hf.HunYuanMoEV1Config(**common(head_dim=12, num_hidden_layers=6, num_experts=16, moe_topk=2))


def save(seed: int, folder: Path) -> None:
    """Random weights of one size: experts are as near to each other as they can be."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(many_experts(), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) * 1.6 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_near_tie_of_a_router_is_no_difference(seed: int, tmp_path: Path) -> None:
    """One row of these goes to another expert for a difference in the last bit, and nothing after it is alike."""
    save(seed, tmp_path)
    assert isinstance(load_model(str(tmp_path), CONFIG).model, TransformersModel)


@pytest.mark.parametrize(("module", "factor"), [(modeling_llama, 1.5), (modeling_hunyuan_v1_moe, 1.1)])
def test_attention_that_hides_something_is_refused(
    module: Any, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family whose eager attention does more than it passes through the interface, also beside near ties."""
    plain = module.eager_attention_forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        out, weights = plain(*args, **kwargs)
        return out * factor, weights

    if module is modeling_llama:
        make_model("llama").save_pretrained(tmp_path)
    else:
        save(0, tmp_path)
    monkeypatch.setattr(module, "eager_attention_forward", scaled)
    with pytest.raises(UnsupportedModel, match="computes more in its attention"):
        load_model(str(tmp_path), CONFIG.replace(fuse=module is not modeling_llama))


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_attention_equals_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, name, COMPRESSED[name])
    model = make_model(name)
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), CONFIG.replace(fuse=False))
    assert isinstance(loaded.model, TransformersModel)
    assert (loaded.layers[0].key_dim, loaded.layers[0].value_dim) == (24, 12)
    texts = prompts([30, 9], VOCAB)
    expected = [greedy_reference(model, text, WANT) for text in texts]
    assert len({token for output in expected for token in output}) > 4
    runner = build_runner(loaded, CONFIG).runner
    driver = Driver(runner)
    for chunk in (None, 7):
        assert driver.run([driver.job(text, WANT) for text in texts], chunk) == expected
    runner.close()

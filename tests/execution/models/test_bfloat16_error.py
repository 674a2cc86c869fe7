"""Rounded numbers are as near to exact ones as transformers' own: greedy tokens cannot say, near ties go either way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from support.drive import Driver, prompts
from support.tiny_models import FAMILIES, VOCAB, WHOLE, make_model

from asyncengine.config import EngineConfig
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner
from asyncengine.sampling_params import SamplingParams

LENGTHS = [70, 60, 50]
SCORED = SamplingParams(temperature=0.0, ignore_eos=True, prompt_logprobs=True)


@torch.inference_mode()
def scores(model: hf.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """transformers' own log-probabilities of all tokens but the first."""
    model.set_attn_implementation("eager")
    logits = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
    found: torch.Tensor = logits.double().log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return found


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_olmo(clip: float | None, fuse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cosines are float32 and rotate bfloat16; its norms have no weight; some clip queries, keys and values."""
    config = {"hidden_size": WHOLE, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(
        FAMILIES, "olmo", lambda: hf.OlmoConfig(vocab_size=VOCAB, num_hidden_layers=3, clip_qkv=clip, **config)
    )
    model = make_model("olmo", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    texts = prompts(LENGTHS, VOCAB)
    rounded = torch.cat([scores(model, text) for text in texts])
    exact = torch.cat([scores(model.float(), text) for text in texts])
    fields = EngineConfig(page_size=4, kv_cache_memory="8MiB", show_progress=False, fuse=fuse)
    runner = build_runner(load_model(str(tmp_path), fields), fields)
    driver = Driver(runner)
    for chunk in (None, 1):
        jobs = [driver.job(text, 1, SCORED) for text in texts]
        driver.run(jobs, chunk)
        found = torch.tensor([entry.logprob for job in jobs for entry in job.prompt_logprobs], dtype=torch.float64)
        assert found.shape == exact.shape
        ratio = float((found - exact).norm() / (rounded - exact).norm())
        assert 0 < ratio < 1.5, f"chunk {chunk}: {ratio:.2f} times the error of transformers"
    runner.close()

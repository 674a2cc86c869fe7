"""Families whose layers keep states equal transformers: logits, tokens in any batch and chunk, bfloat16 errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import Checkpoint
from support.drive import Driver, Job, prompts
from support.tiny_models import FAMILIES, VOCAB, make_model

from asyncengine.config import EngineConfig
from asyncengine.layers.step import StepContext
from asyncengine.models.decoder import Decoder
from asyncengine.models.loading import load_model
from asyncengine.runner.building import build_runner
from asyncengine.sampling_params import SamplingParams

WANT = 48
LENGTHS = [40, 9, 70]
SCORED = SamplingParams(temperature=0.0, ignore_eos=True, prompt_logprobs=True)
OWN = ("qwen3next", "qwen3.5", "qwen3.5moe", "kimi-linear")


def changed(name: str, **fields: Any) -> Callable[[], Any]:
    """The tiny model of that family with other options."""

    def make() -> Any:
        config = FAMILIES[name]()
        return type(config)(**{**config.to_dict(), **fields})

    return make


VARIANTS = {
    "qwen3next, plain": changed(
        "qwen3next", num_experts=0, attention_bias=True, linear_num_value_heads=2, linear_key_head_dim=16,
        tie_word_embeddings=True,
    ),
    "qwen3next, not normalised": changed("qwen3next", norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[]),
    "qwen3.5, untied": changed("qwen3.5", hidden_size=48, tie_word_embeddings=False, linear_num_value_heads=8),
    "qwen3.5, begins with attention": changed("qwen3.5", layer_types=["full_attention"] * 2 + ["linear_attention"] * 2),
}  # fmt: skip


@pytest.fixture(autouse=True)
def variants(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in VARIANTS.items():
        monkeypatch.setitem(FAMILIES, name, make)


class Recording:
    """A model whose logits are kept."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.logits: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, ids: torch.Tensor, step: StepContext, rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.forward(ids, step, rows)
        self.logits.append(logits.float().clone())
        return logits


def open_runner(
    name: str, checkpoint: Checkpoint, seed: int = 0, dtype: str = "float32", **fields: Any
) -> tuple[Any, Recording]:
    config = EngineConfig(
        page_size=4, max_num_seqs=64, kv_cache_memory="4MiB", dtype=dtype, show_progress=False, num_threads=1, **fields
    )
    kind = getattr(torch, dtype)
    loaded = load_model(str(checkpoint(name, seed=seed, heavy=True, dtype=kind)), config)
    assert isinstance(loaded.model, Decoder)
    recording = Recording(loaded.model)
    loaded.model = recording  # type: ignore[assignment]
    return build_runner(loaded, config), recording


@torch.inference_mode()
def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' own of one sequence, [tokens, vocabulary]."""
    model.set_attn_implementation("eager")
    found: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return found


@pytest.mark.parametrize("name", [*OWN, *VARIANTS])
def test_equals_transformers_in_float32(name: str, checkpoint: Checkpoint) -> None:
    """Logits of prompts and of what is generated; then the same tokens in any chunk, company, and after preemption."""
    runner, recording = open_runner(name, checkpoint)
    model = make_model(name, heavy=True)
    driver = Driver(runner)
    texts, expected = prompts(LENGTHS, VOCAB), []
    for text in texts:
        recording.logits.clear()
        (output,) = driver.run([driver.job(text, WANT, SCORED)])
        wanted = logits_of(model, [*text, *output[:-1]])
        found = torch.cat(recording.logits)
        assert found.shape == wanted.shape
        assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
        assert output == wanted[len(text) - 1 :].argmax(-1).tolist()
        expected.append(output)
    assert len({token for output in expected for token in output}) > 4

    def jobs(count: int = 3) -> list[Job]:
        return [driver.job(texts[place % 3], WANT) for place in range(count)]

    for chunk in (None, 1, 7, 16):
        assert driver.run(jobs(), chunk) == expected, f"chunk {chunk}"
    assert driver.run(jobs(), 16, preempt_every=9) == expected
    assert driver.run(jobs(2), None) == expected[:2]
    assert driver.run(jobs(64), 16) == [expected[place % 3] for place in range(64)]
    runner.close()


@pytest.mark.parametrize("name", OWN)
def test_without_kernels_equals_transformers(
    name: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs and without a compiler."""
    from asyncengine.layers import options

    monkeypatch.setattr(options, "compiler_missing", lambda dtype, device: "none here")
    runner, recording = open_runner(name, checkpoint, attention_backend="torch")
    driver, texts = Driver(runner), prompts(LENGTHS, VOCAB)
    recording.logits.clear()
    expected = [driver.run([driver.job(text, 6, SCORED)])[0] for text in texts]
    wanted = torch.cat([logits_of(make_model(name, heavy=True), [*text, *own[:-1]]) for text, own in
                        zip(texts, expected, strict=True)])  # fmt: skip
    assert float((torch.cat(recording.logits) - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    assert driver.run([driver.job(text, 6) for text in texts], 7) == expected
    runner.close()


@pytest.mark.parametrize("name", OWN)
def test_bfloat16_is_as_near_to_float32_as_transformers(name: str, checkpoint: Checkpoint) -> None:
    """The error of a token's logits, its median over tokens."""
    ours, theirs = [], []
    for seed in (0, 1, 2):
        runner, recording = open_runner(name, checkpoint, seed, "bfloat16")
        driver, model = Driver(runner), make_model(name, seed, torch.bfloat16, heavy=True)
        for text in prompts([90, 70], VOCAB, seed + 5):
            recording.logits.clear()
            driver.run([driver.job(text, 1, SCORED)])
            rounded, exact = logits_of(model, text), logits_of(model.float(), text)
            model.to(torch.bfloat16)
            (found,) = recording.logits
            ours.append((found - exact).norm(dim=-1))
            theirs.append((rounded - exact).norm(dim=-1))
        runner.close()
    ratio = float(torch.cat(ours).median() / torch.cat(theirs).median())
    assert 0 < ratio <= 1.0, f"{ratio:.2f} times the error of transformers"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OWN)
def test_one_answer_to_the_bit(name: str, dtype: str, checkpoint: Checkpoint) -> None:
    """Logits of a prompt's last token: alone, and beside others in chunks."""
    runner, recording = open_runner(name, checkpoint, dtype=dtype)
    driver, (text, *others) = Driver(runner), prompts([33, 5, 20, 11], VOCAB)
    recording.logits.clear()
    driver.run([driver.job(text, 1)])
    (alone,) = recording.logits
    for chunk in (1, 7, 16):
        recording.logits.clear()
        driver.run([driver.job(text, 1), *(driver.job(other, 40) for other in others)], chunk)
        beside = [row for logits in recording.logits for row in logits if torch.equal(row, alone[0])]
        assert len(beside) == 1, f"chunk {chunk}"
    runner.close()


def test_kimi_linear_as_its_makers_save_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Layer types in `linear_attn_config`, counted from one, and the dense layer's own name for its matrices; and as
    transformers holds it."""
    saved = checkpoint("kimi-linear", seed=0, heavy=True, dtype=torch.float32)
    tensors = load_file(saved / "model.safetensors")
    config = json.loads((saved / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):
        del config[name]
    config |= {
        "first_k_dense_replace": 1,
        "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2, 4], "head_dim": 16, "num_heads": 3,
                               "short_conv_kernel_size": 4},
    }  # fmt: skip
    spellings = {
        "makers": lambda name: name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."),
        "held": lambda name: name if ".experts." in name else name.replace(".block_sparse_moe.", ".mlp."),
    }
    text, found = prompts([30], VOCAB)[0], {}
    folders = {"saved": saved}
    for spelling, rename in spellings.items():
        folders[spelling] = tmp_path / spelling
        folders[spelling].mkdir()
        (folders[spelling] / "config.json").write_text(json.dumps(config))
        named = {rename(name): tensor for name, tensor in tensors.items()}
        save_file(named, folders[spelling] / "model.safetensors", {"format": "pt"})
    for spelling, folder in folders.items():
        settings = EngineConfig(kv_cache_memory="4MiB", dtype="float32", show_progress=False, num_threads=1)
        loaded = load_model(str(folder), settings)
        assert isinstance(loaded.model, Decoder)
        runner = build_runner(loaded, settings)
        (found[spelling],) = Driver(runner).run([Driver(runner).job(text, 12)])
        runner.close()
    assert found["makers"] == found["held"] == found["saved"]

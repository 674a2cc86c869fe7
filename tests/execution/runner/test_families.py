"""Every family, and every option that changes a forward, equals transformers: logits, greedy tokens and bfloat16."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.checkpoints import MakeRunner
from support.drive import Driver, Job, from_a_snapshot, from_another_request, prompts
from support.forwards import Recording, logits_of, transformers_logits
from support.long import LONG
from support.tiny_models import FAMILIES, OPTIONS, VOCAB, WINDOW, make_model, save

from asyncengine.config import EngineConfig
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.families import NATIVE
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner
from asyncengine.sampling_params import SamplingParams

WANT = 14
LENGTHS = [70, 25, 36]
PAGE = 4
SCORED = SamplingParams(temperature=0.0, ignore_eos=True, prompt_logprobs=True)
WRITTEN = [name for name, make in FAMILIES.items() if make().model_type in NATIVE]
LIMITED = {"phi3, longrope within": 256, "phimoe, longrope within": 256}
"""Longest sequences, where a checkpoint could do more."""
MANY = ("qwen3.5", "kimi-linear", "mamba2", "lfm2", "llama")


GROUPED = ("mamba2-bounded-steps", "mamba2-tied")
"""Mamba-2 whose gated norm has several groups: earlier releases of transformers normalise over all of them at once."""
NOT_HEAVY = ("gemma4", "opt-350m")
"""Families whose few large weights drown all others."""
EPSILON = 0.01
"""The epsilon of all norms, so large that a wrong one shows."""
COMPILED = (
    "attention.factory", "layers.kernels", "layers.options", "layers.rotary", "layers.stored_weight",
    "models.formats.float_formats", "sampling.sampler",
)  # fmt: skip
"""Modules that ask whether there are compiled kernels."""
BY_TORCH = (
    "llama", "gemma2", "llama4", "cohere2", "gpt-oss", "qwen3.5moe", "kimi-linear", "deepseek-v3", "falcon-h1",
    "lfm2moe", "lfm3", "opt", "bloom", "falcon-40b", "olmo-hybrid",
)  # fmt: skip
"""Families that have between them all operations that are torch's where no kernel is compiled."""


def load(name: str, model: Any, folder: Path, **settings: Any) -> tuple[Any, EngineConfig]:
    """transformers' `model` as it is loaded from a file of its type, and its settings."""
    dtype = str(model.dtype).removeprefix("torch.")
    config = EngineConfig(
        page_size=PAGE, max_num_seqs=64, kv_cache_memory="4MiB", dtype=dtype, show_progress=False,
        max_model_len=LIMITED.get(name), num_threads=1, **settings,
    )  # fmt: skip
    loaded = load_model(str(save(model, folder)), config)
    assert isinstance(loaded.model, Decoder) == (name in WRITTEN or name in OPTIONS)
    return loaded, config


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) < 3e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("name", [*FAMILIES, *OPTIONS])
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    """Logits of a prompt, and of what is generated alone and in a batch; a token is transformers' greedy one if it has
    the largest of its logits after the same tokens. Then the same tokens in chunks, after preemption and from cached
    pages."""
    if name in GROUPED and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("transformers normalises over all groups")
    model = make_model(name, heavy=name not in NOT_HEAVY, epsilon=EPSILON)
    loaded, config = load(name, model, tmp_path)
    loaded.model = recording = Recording(loaded.model)
    runner = build_runner(loaded, config).runner
    driver, texts = Driver(runner), prompts(LENGTHS, VOCAB)

    def jobs(count: int = 3) -> list[Job]:
        return [driver.job(texts[place % 3], WANT) for place in range(count)]

    recording.logits.clear()
    (alone,) = driver.run([driver.job(texts[0], WANT, SCORED)])
    near(torch.cat(recording.logits), transformers_logits(model, [*texts[0], *alone[:-1]]))
    recording.logits.clear()
    expected = driver.run(jobs())
    for text, output, found in zip(texts, expected, torch.stack(recording.logits, 1), strict=True):
        wanted = transformers_logits(model, [*text, *output[:-1]])[len(text) - 1 :]
        near(found, wanted)
        assert output == wanted.argmax(-1).tolist()
    assert alone == expected[0]
    assert len({token for output in expected for token in output}) > 1
    assert len(texts[-1]) + WANT > 2 * WINDOW
    assert driver.run(jobs(), 7, 5) == expected, "in chunks and preempted"
    if name in MANY:
        assert driver.run(jobs(), 1) == expected, "a token at a time"
        assert driver.run(jobs(64), 16) == [expected[place % 3] for place in range(64)]
    start = from_a_snapshot if runner.num_states else from_another_request
    assert start(driver, texts[0], WANT) == expected[0]
    runner.close()


@pytest.mark.parametrize("name", [name for name in BY_TORCH if name in FAMILIES])
def test_torch_s_operations_equal_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same forward runs on torch's operations where nothing is compiled, as without numba and on other devices."""
    for module in COMPILED:
        monkeypatch.setattr(f"asyncengine.execution.{module}.compiler_missing", lambda *_: "as without numba")
    model = make_model(name, heavy=True, epsilon=EPSILON)
    loaded, config = load(name, model, tmp_path, attention_backend="torch")
    loaded.model = recording = Recording(loaded.model)
    runner = build_runner(loaded, config).runner
    assert runner.attention_backend == "torch"
    driver, texts = Driver(runner), prompts(LENGTHS, VOCAB)
    recording.logits.clear()
    (output,) = driver.run([driver.job(texts[0], WANT, SCORED)])
    wanted = transformers_logits(model, [*texts[0], *output[:-1]])
    near(torch.cat(recording.logits), wanted)
    assert output == wanted.argmax(-1)[len(texts[0]) - 1 :].tolist()
    jobs = [driver.job(text, WANT) for text in texts]
    assert driver.run(jobs, 7, 5)[0] == output, "in chunks, preempted and in company"
    runner.close()


@pytest.mark.parametrize("name", [*WRITTEN, "granite, uneven"])
def test_bfloat16_is_as_near_to_float32_as_transformers(name: str, tmp_path: Path) -> None:
    """Greedy tokens cannot say, near ties go either way: the error of a token's logits, its median over tokens. Where
    experts are chosen, or states carry errors on, it differs so much between models that the median is of three."""
    ours, theirs = [], []
    for seed in (1, 0, 2):
        model = make_model(name, seed, torch.bfloat16, heavy=name not in NOT_HEAVY)
        loaded, _ = load(name, model, tmp_path / str(seed))
        texts = prompts([90, 70], VOCAB, seed + 5)
        found = torch.cat([logits_of(loaded.model, text) for text in texts]).float()
        rounded = torch.cat([transformers_logits(model, text) for text in texts])
        model.float()
        exact = torch.cat([transformers_logits(model, text) for text in texts])
        ours.append((found - exact).norm(dim=-1))
        theirs.append((rounded - exact).norm(dim=-1))
        if not LONG and not any(
            re.search("Expert|Mamba|ShortConv|Delta", type(each).__name__) for each in model.modules()
        ):
            break
    ratio = float(torch.cat(ours).median() / torch.cat(theirs).median())
    assert 0 < ratio <= 1.0, f"{ratio:.2f} times the error of transformers"


def greedy(runner: Any, chunk: int | None = None) -> list[list[int]]:
    driver = Driver(runner)
    return driver.run([driver.job(prompt, WANT) for prompt in prompts(LENGTHS, VOCAB)], chunk)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt-oss"])
def test_unfused_equals_fused(name: str, make_runner: MakeRunner) -> None:
    runner = make_runner(name, fuse=False)
    assert runner.fused == ["transformers x 1"]
    assert greedy(runner) == greedy(make_runner(name))


def test_float16_is_close(make_runner: MakeRunner) -> None:
    scores = []
    for runner in (make_runner("qwen3"), make_runner("qwen3", dtype="float16")):
        driver = Driver(runner)
        job = driver.job(prompts([40], VOCAB)[0], 1, SCORED)
        driver.run([job])
        scores.append([entry.logprob for entry in job.prompt_logprobs])
    differences = [abs(left - right) for left, right in zip(*scores, strict=True)]
    assert 0 < max(differences) < 0.25

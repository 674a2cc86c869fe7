"""Tiny models, engines and batches for tests of exact training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers as hf
from support.tiny_configs import FAMILIES, WHOLE, changed
from support.tiny_models import randomize

from asyncengine import Engine, SamplingParams

TEMPERATURE = 0.7
KINDS: dict[str, Callable[[], Any]] = {
    "qwen3": FAMILIES["qwen3"], "llama": FAMILIES["llama3.1-rope"],
    "gemma2": changed("gemma2", hidden_size=WHOLE, intermediate_size=96), "qwen3moe": FAMILIES["qwen3moe"],
    "gemma3": changed("gemma3", hidden_size=WHOLE, intermediate_size=96), "qwen3.5": FAMILIES["qwen3.5"],
    "mixtral": changed("mixtral", hidden_size=WHOLE), "gpt-oss": changed("gpt-oss", hidden_size=WHOLE),
}  # fmt: skip
"""qwen3 is tied, gemma2 has a bound of logits, both gemmas windows, qwen3moe, mixtral and gpt-oss experts, qwen3.5
states."""


def exact_folder(kind: str, dtype: str, folder: Path) -> Path:
    """A random checkpoint of one of `KINDS`, made in `folder`."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(KINDS[kind](), dtype=torch.float32)
    randomize(model, kind, torch.Generator().manual_seed(0))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


@contextmanager
def engine_on(folder: Path, dtype: str = "float32", **settings: Any) -> Iterator[Engine]:
    settings = {"kv_cache_memory": "8MB", "num_threads": 1, "show_progress": False, "dtype": dtype, **settings}
    with Engine.from_pretrained(folder, **settings) as engine:
        yield engine


def trainer_of(folder: Path, dtype: str = "float32") -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))


def rollout(engine: Engine, length: int = 24, **options: Any) -> Any:
    """A batch as trainers make it, padded on both sides, and what the engine said of each sampled token.

    Some prompts are longer than a step, some share a prefix or repeat what a guess can find.
    """
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 150, (count,), generator=generator).tolist() for count in (5, 33, 70, 18)]
    prompts += [prompts[1][:20] + prompts[0], prompts[0] * 6, prompts[2]]
    params = SamplingParams(
        max_tokens=length, temperature=TEMPERATURE, top_p=1.0, top_k=0, seed=5, logprobs=True, logprobs_of="sampled",
        ignore_eos=True,
    )  # fmt: skip
    drawn = engine.generate_many(prompts, params.replace(max_tokens=3), **options)  # what comes is in the prefix cache
    prompts.append(prompts[3] + drawn[3].token_ids)
    drawn = engine.generate_many(prompts, params, **options)
    most = max(map(len, prompts))
    shape = (len(prompts), most + length + 2)
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    said = torch.zeros(shape)
    for row, (prompt, answer) in enumerate(zip(prompts, drawn, strict=True)):
        begin, end = most - len(prompt), most + len(answer.token_ids)
        ids[row, begin:end], mask[row, begin:end] = torch.tensor(prompt + answer.token_ids), 1
        said[row, most:end] = torch.tensor([entry.logprob for entry in answer.logprobs or ()])
    return SimpleNamespace(ids=ids, mask=mask, labels=torch.where(said != 0, ids, -100), said=said[:, 1:])


def weights_of(batch: Any) -> torch.Tensor:
    """Random weights of a loss, so that no two tokens' parts cancel."""
    return torch.randn(batch.said.shape, generator=torch.Generator().manual_seed(1))


def train(model: Any, exact: Any, batch: Any, steps: int) -> None:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (exact.token_logprobs(batch.ids, batch.mask, batch.labels) * weights_of(batch)).sum().backward()
        optimizer.step()

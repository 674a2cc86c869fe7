"""Log-probabilities of a trainer's model equal the engine's to the bit; gradients are those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from support.tiny_configs import FAMILIES, WHOLE, changed
from support.tiny_models import randomize

from asyncengine import Engine, SamplingParams
from asyncengine.training import ExactModel, make_exact

pytest.importorskip("numba")

TEMPERATURE = 0.7
KINDS: dict[str, Callable[[], Any]] = {
    "qwen3": FAMILIES["qwen3"], "llama": FAMILIES["llama3.1-rope"],
    "gemma2": changed("gemma2", hidden_size=WHOLE, intermediate_size=96), "qwen3moe": FAMILIES["qwen3moe"],
    "gemma3": changed("gemma3", hidden_size=WHOLE, intermediate_size=96), "qwen3.5": FAMILIES["qwen3.5"],
}  # fmt: skip
"""qwen3 is tied, gemma2 has a bound of logits, both gemmas windows, qwen3moe experts, qwen3.5 states."""
BUSY = {
    "max_num_batched_tokens": 48, "preempt_every": 7, "speculation_costs": (1.0, 1.0002, 1.0008),
    "speculation_with_adapters": True,
}  # fmt: skip
"""Prompts in chunks, requests that give way and come back, guesses whenever there are any."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """folders(kind, dtype) -> a checkpoint, each made once."""
    made: dict[tuple[str, str], Path] = {}

    def get(kind: str, dtype: str = "float32") -> Path:
        if (kind, dtype) not in made:
            made[kind, dtype] = tmp_path_factory.mktemp("exact") / "model"
            torch.manual_seed(0)
            model = hf.AutoModelForCausalLM.from_config(KINDS[kind](), dtype=torch.float32)
            randomize(model, kind, torch.Generator().manual_seed(0))
            model.to(getattr(torch, dtype)).save_pretrained(made[kind, dtype])
        return made[kind, dtype]

    return get


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


def plain_logprobs(model: Any, batch: Any) -> torch.Tensor:
    """The same by transformers alone, sequence by sequence and without padding."""
    found = torch.zeros(batch.said.shape)
    for row, mask in enumerate(batch.mask.bool()):
        ids = batch.ids[row][mask]
        logs = (model(ids[None], use_cache=False).logits[0].float() / TEMPERATURE).log_softmax(-1)
        own = logs[:-1].gather(1, ids[1:, None])[:, 0]
        found = found.index_put((torch.tensor(row), mask.nonzero()[1:, 0] - 1), own)
    return found * (batch.said != 0)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def weights_of(batch: Any) -> torch.Tensor:
    """Of a loss of which no two tokens' parts cancel."""
    return torch.randn(batch.said.shape, generator=torch.Generator().manual_seed(1))


def train(model: Any, exact: ExactModel, batch: Any, steps: int) -> None:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (exact.token_logprobs(batch.ids, batch.mask, batch.labels) * weights_of(batch)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_trainer_and_engine_agree_to_the_bit(kind: str, dtype: str, folders: Callable[..., Path]) -> None:
    """Sampled in company, in chunks, with cached prefixes, guesses and preemption; and again after five updates."""
    model = trainer_of(folders(kind, dtype), dtype)
    with engine_on(folders(kind, dtype), dtype, **BUSY) as engine:
        exact = make_exact(model, engine, temperature=TEMPERATURE)
        batch = rollout(engine)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.cached_tokens > 0
        assert kind == "qwen3.5" or stats.speculation.drafted > 0
        own = exact.token_logprobs(batch.ids, batch.mask, batch.labels)
        assert torch.equal(own.detach(), batch.said)
        with torch.no_grad():
            assert torch.equal(exact.token_logprobs(batch.ids, batch.mask, batch.labels), batch.said)
        if dtype == "float32":
            found = gradients(model, (own * weights_of(batch)).sum())
            exact.close()
            plain = plain_logprobs(model, batch)
            assert not torch.equal(plain, batch.said)
            expected = gradients(model, (plain * weights_of(batch)).sum())
            assert found.keys() == expected.keys()
            for name, each in expected.items():
                assert torch.cosine_similarity(found[name].flatten(), each.flatten(), 0) > 0.999, name
            exact = make_exact(model, engine, temperature=TEMPERATURE)
        train(model, exact, batch, 5)
        engine.update_weights(model.state_dict())
        after = rollout(engine)
        assert not torch.equal(after.said, batch.said)
        assert torch.equal(exact.token_logprobs(after.ids, after.mask, after.labels).detach(), after.said)
        exact.close()

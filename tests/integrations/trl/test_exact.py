"""Log-probabilities of a trainer's model equal the engine's to the bit; gradients are those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.long import LONG, by_turns

from asyncengine import SamplingParams
from asyncengine.integrations.trl import make_exact, named_weights

from .exact import KINDS, TEMPERATURE, engine_on, exact_folder, rollout, train, trainer_of, weights_of

pytest.importorskip("numba")

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
            made[kind, dtype] = exact_folder(kind, dtype, tmp_path_factory.mktemp("exact") / "model")
        return made[kind, dtype]

    return get


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


@pytest.mark.parametrize(("kind", "dtype"), by_turns(KINDS, ["float32", "bfloat16"]))
def test_trainer_and_engine_agree_to_the_bit(kind: str, dtype: str, folders: Callable[..., Path]) -> None:
    """Answers are drawn in company, in chunks, with cached prefixes, guesses and preemption, also after updates."""
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
                assert (found[name] - each).norm() < 1e-4 * each.norm(), name  # rounding makes 4e-6 of it
            exact = make_exact(model, engine, temperature=TEMPERATURE)
        train(model, exact, batch, 5 if LONG else 2)
        engine.update_weights(model.state_dict())
        after = rollout(engine)
        assert not torch.equal(after.said, batch.said)
        assert torch.equal(exact.token_logprobs(after.ids, after.mask, after.labels).detach(), after.said)
        exact.close()


@pytest.mark.parametrize("kind", ["qwen3moe", "gpt-oss", "mixtral"])
def test_gradients_go_through_the_experts_that_the_sampler_chose(kind: str, folders: Callable[..., Path]) -> None:
    """Routers in bfloat16 are so undecided that transformers' would choose others at some tokens: what the engine said
    of its answer, what the exact forward goes through and what the backward pass goes through are one."""
    model = trainer_of(folders(kind, "bfloat16"), "bfloat16")
    routers = [(name, each) for name, each in model.named_modules() if type(each).__name__.endswith("TopKRouter")]
    with torch.no_grad():
        for _, router in routers:
            router.weight.copy_(router.weight[:1] + 0.05 * router.weight)  # the trainer's logits are rounded: ties
    prompt = [(7 * place + 3) % 100 + 1 for place in range(40)]
    with engine_on(folders(kind, "bfloat16"), "bfloat16", **BUSY) as engine:
        engine.update_weights(named_weights(model))
        params = SamplingParams(
            max_tokens=30, temperature=TEMPERATURE, seed=1, return_routed_experts=True, ignore_eos=True
        )
        answer = engine.generate(prompt, params)
        exact = make_exact(model, engine, temperature=TEMPERATURE)
        short = torch.tensor([(prompt + answer.token_ids)[:-1], [0, 0, *range(5, 72)]])
        mask = torch.ones_like(short)
        mask[1, :2] = 0
        found: dict[str, list[Any]] = {name: [] for name, _ in routers}
        for name, router in routers:
            router.register_forward_hook(lambda _, __, out, name=name: found[name].append(out))
        scores = exact.token_logprobs(short, mask)
        assert not any(found.values())
        scores.sum().backward()
        differ = 0
        for place, (name, _) in enumerate(routers):
            ((logits, _, chosen),) = found[name]
            chosen = chosen.view(2, short.shape[1], -1)
            assert torch.equal(chosen[0], torch.from_numpy(answer.routed_experts[:, place]).long())
            own = logits.float().view(2, short.shape[1], -1).topk(chosen.shape[-1]).indices
            differ += int((own[0] != chosen[0]).sum())
        assert differ > 0
        exact.close()

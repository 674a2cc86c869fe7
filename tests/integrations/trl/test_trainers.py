"""An exact model as trainers use it: TRL's call, adapters, optimizers; and where it is refused, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.peft_checkpoints import make_peft

from asyncengine import Engine, EngineConfig, InvalidParameter, UnsupportedModel
from asyncengine.integrations.trl import make_exact

from .exact import TEMPERATURE, engine_on, exact_folder, rollout, train, trainer_of

pytest.importorskip("numba")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exact_folder("qwen3", "float32", tmp_path_factory.mktemp("exact") / "model")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with engine_on(folder) as engine:
        yield engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_that_peft_trains(dtype: str, tmp_path: Path) -> None:
    """The adapter is pushed to the engine as tensors; where it is switched off, the model is the base again."""
    pytest.importorskip("peft")
    folder = exact_folder("llama", dtype, tmp_path / "model")
    model = make_peft(trainer_of(folder, dtype), target_modules="all-linear", r=4)
    with engine_on(folder, dtype, max_num_batched_tokens=48, preempt_every=7) as engine:
        from peft import get_peft_model_state_dict

        exact = make_exact(model, engine, temperature=TEMPERATURE)
        for _ in range(2):
            engine.load_adapter("a", tensors=get_peft_model_state_dict(model), config=model.peft_config["default"])
            batch = rollout(engine, adapter="a")
            found = exact.token_logprobs(batch.ids, batch.mask, batch.labels)
            assert torch.equal(found.detach(), batch.said)
            train(model, exact, batch, 2)
        base = rollout(engine)
        with model.disable_adapter():
            assert torch.equal(exact.token_logprobs(base.ids, base.mask, base.labels).detach(), base.said)
        assert not torch.equal(exact.token_logprobs(base.ids, base.mask, base.labels).detach(), base.said)
        assert all(each.grad is None for name, each in model.named_parameters() if ".lora_" not in name)
        exact.close()


def test_the_call_of_trl(folder: Path, engine: Engine) -> None:
    """`fused_lm_head=True` with labels, after TRL has put its own forward there; gradient checkpointing is harmless."""
    model = trainer_of(folder)
    model.gradient_checkpointing_enable()
    model.train()
    own, others = model.forward, dict[str, Any](attention_mask=None)
    exact = make_exact(model, engine, temperature=TEMPERATURE)
    batch = rollout(engine)
    others |= {"attention_mask": batch.mask, "labels": batch.labels}
    out = model(input_ids=batch.ids, fused_lm_head=True, **others)
    assert torch.equal(out.log_probs.detach(), batch.said)
    logits = model(batch.ids, batch.mask).logits
    every = (logits / TEMPERATURE).log_softmax(-1)[:, :-1]
    scored = every.gather(2, batch.ids[:, 1:, None])[:, :, 0] * (batch.said != 0)
    assert torch.allclose(scored, batch.said, rtol=0, atol=1e-5)
    plain = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten())
    assert torch.allclose(model(batch.ids, batch.mask, labels=batch.labels).loss, plain)
    entropy = -(every.exp() * every).sum(-1) * (batch.said != 0)
    assert torch.allclose(out.entropy, entropy, atol=1e-5)
    assert torch.equal(model(batch.ids, batch.mask, logits_to_keep=9).logits, logits[:, -9:])
    assert torch.allclose(out.loss, -batch.said.sum() / (batch.said != 0).sum())
    with torch.no_grad():
        assert torch.equal(model(batch.ids, batch.mask).logits, logits)
    generator = torch.Generator().manual_seed(0)
    some = torch.rand(out.log_probs.shape, generator=generator)
    gradients = []
    for scores in (out, None):
        model.zero_grad()
        if scores is None:  # of logits, by torch's own operations
            found, spread = scored, entropy
        else:
            found, spread = scores.log_probs, scores.entropy
        (found * some + spread).sum().backward()
        gradients.append([each.grad.clone() for each in model.parameters()])
    assert all(torch.allclose(one, two, rtol=1e-3, atol=1e-4) for one, two in zip(*gradients, strict=True))
    exact.close()
    assert model.forward == own


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_every_optimizer_s_step_is_noticed(settings: dict[str, bool], folder: Path) -> None:
    model, ids = trainer_of(folder), torch.arange(3, 30)[None]
    exact = make_exact(model, str(folder), config=EngineConfig(dtype="float32", show_progress=False))
    before = exact.token_logprobs(ids)
    before.sum().backward()
    torch.optim.AdamW(model.parameters(), **settings).step()
    after = exact.token_logprobs(ids)
    assert not torch.equal(after, before)
    exact.sync()
    assert torch.equal(exact.token_logprobs(ids), after)
    model.model.layers[1].mlp.up_proj.weight.data.mul_(2)  # past all notice
    assert torch.equal(exact.token_logprobs(ids), after)
    exact.sync()
    assert not torch.equal(exact.token_logprobs(ids), after)
    exact.close()


def test_a_planted_error_is_noticed(folder: Path, engine: Engine) -> None:
    """One layer's epsilon, one weight of the engine's, another order of operations: no token's score is the same."""
    batch = rollout(engine)
    exact = make_exact(trainer_of(folder), engine, temperature=TEMPERATURE)
    norm = exact._layers.decoder.layers[1].before_mlp
    assert norm is not None
    norm.config = replace(norm.config, epsilon=2e-6)
    assert not torch.equal(exact.token_logprobs(batch.ids, batch.mask, batch.labels).detach(), batch.said)
    exact.close()
    other = trainer_of(folder)
    with torch.no_grad():
        other.model.layers[2].mlp.down_proj.weight[0, 0] += 1e-3
    exact = make_exact(other, engine, temperature=TEMPERATURE)
    assert not torch.equal(exact.token_logprobs(batch.ids, batch.mask, batch.labels).detach(), batch.said)
    exact.close()
    exact = make_exact(other, engine, temperature=TEMPERATURE * 1.001)
    assert not torch.equal(exact.token_logprobs(batch.ids, batch.mask, batch.labels).detach(), batch.said)
    exact.close()


def test_modules_that_peft_copies_are_refused(folder: Path, engine: Engine) -> None:
    pytest.importorskip("peft")
    model = make_peft(trainer_of(folder), target_modules=["q_proj"], r=4, modules_to_save=["up_proj"])
    with pytest.raises(UnsupportedModel, match=r"takes no modules_to_save, and the model has .*up_proj"):
        make_exact(model, engine)


def dropping(model: Any) -> None:
    model.train()
    model.model.layers[1].self_attn.attention_dropout = 0.1


def scaled(model: Any) -> None:
    model.model.layers[2].self_attn.scaling *= 1.5


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quantization": "int8"}, "the engine rounds its weights"),
        ({"attention_backend": "torch"}, "attention is torch's"), ({"fuse": False}, "through transformers' modules"),
    ],
)  # fmt: skip
def test_an_engine_without_exact_bits_is_refused(settings: Any, reason: str, folder: Path) -> None:
    with engine_on(folder, **settings) as engine, pytest.raises(UnsupportedModel, match=reason):
        make_exact(trainer_of(folder), engine)


def test_other_models_and_calls_are_refused_by_name(folder: Path, engine: Engine, tmp_path: Path) -> None:
    model, ids = trainer_of(folder), torch.arange(3, 12)[None]
    own = model.forward
    for wrong, error, reason in (
        ({"engine": 3}, InvalidParameter, "engine: must be"),
        ({"temperature": 0.0}, InvalidParameter, "temperature"),
        ({"config": EngineConfig()}, InvalidParameter, "config: is the engine's own"),
        ({"model": trainer_of(folder).half()}, UnsupportedModel, "in torch.float16"),
        ({"model": trainer_of(exact_folder("llama", "float32", tmp_path))}, Exception, "lacks the tensor|wrong shape"),
    ):
        with pytest.raises(error, match=reason):
            make_exact(**{"model": model, "engine": engine, **wrong})
    scaled(model)
    with pytest.raises(UnsupportedModel, match="layer 2 of the model is not what the engine computes"):
        make_exact(model, engine)
    assert model.forward == own
    model = trainer_of(folder)
    exact = make_exact(model, engine)
    hole, long = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]]), torch.ones((1, 600), dtype=torch.int64)
    for call, reason in (
        (lambda: model(ids, hole), "attention_mask: must mark"),
        (lambda: model(ids, hole[:, 1:]), "the shape of"),
        (lambda: model(ids - 5), "input_ids: must be from 0"),
        (lambda: model(long), "sequences of 1 to"),
        (lambda: model(ids, output_hidden_states=True), "output_hidden_states"),
        (lambda: model(ids, output_router_logits=True), "output_router_logits: .*router_aux_loss_coef=0.0"),
        (lambda: model(ids, fused_lm_head=True), "labels: are needed"),
    ):
        with pytest.raises(InvalidParameter, match=reason):
            call()
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 12)
    with pytest.raises(UnsupportedModel, match="past the exact forward"):
        model.model(ids)
    dropping(model)
    with pytest.raises(UnsupportedModel, match=r"drops nothing: the dropout of model.layers.1.self_attn is 0.1"):
        model(ids)
    exact.close()


def test_master_weights_in_float32_train_with_an_engine_in_bfloat16(folder: Path) -> None:
    """Forwards run under autocast, as trainers run them."""
    model = trainer_of(folder)
    with engine_on(folder, "bfloat16") as engine:
        exact = make_exact(model, engine, temperature=TEMPERATURE)
        for _ in range(2):
            engine.update_weights(model.state_dict())
            batch = rollout(engine)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = exact.token_logprobs(batch.ids, batch.mask, batch.labels)
            assert torch.equal(found.detach(), batch.said)
            train(model, exact, batch, 1)
        exact.close()

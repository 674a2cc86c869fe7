"""What a live model refuses as its new weights, by name, and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from models.test_weights import Tensors, changed, load, tensors_of
from support.checkpoints import Checkpoint
from support.forwards import logits_of

from asyncengine.config import EngineConfig
from asyncengine.errors import EngineError, InvalidParameter, ModelNotFound
from asyncengine.models.updates import prepare_update

QUIET = EngineConfig(show_progress=False)
IDS = [3, 17, 40, 9, 3, 3, 88]
UP = "model.layers.1.mlp.up_proj.weight"

CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "rotation": ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, r"rotary\.0\.frequencies\."),
    "epsilon": ({"rms_norm_eps": 0.25}, r"configuration\.norm\.epsilon is 0\.25, not 1e-"),
    "activation": ({"hidden_act": "gelu"}, r"layers\.0\.mlp\.activation is 'gelu', not 'silu'"),
    "layers": ({"num_hidden_layers": 2}, r"configuration\.layers is 2 entries, not 3 entries"),
    "tie": ({"tie_word_embeddings": True}, r"configuration\.tied"),
    "a family that is not written down": ({"model_type": "bert"}, "of another model: its family 'bert'"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_checkpoint_of_another_model_is_refused(case: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """All its tensors would fit; but a new model of it would compute something else with them."""
    fields, message = CONFIGS[case]

    def drop_head(tensors: Tensors) -> None:
        if "tie_word_embeddings" in fields:
            del tensors["lm_head.weight"]

    folder = changed(checkpoint("llama"), tmp_path / "a", drop_head, **fields)
    live = load(checkpoint("llama"))
    before = logits_of(live, IDS)
    with pytest.raises(ModelNotFound, match=message):
        prepare_update(live, folder, QUIET)
    assert torch.equal(logits_of(live, IDS), before)


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def with_(tensors: Tensors, name: str, tensor: Any) -> Tensors:
    return {**tensors, name: tensor}


class Subclassed(torch.Tensor):
    """Like a distributed tensor: what it says of itself is not what its memory holds."""


GIVEN: dict[str, tuple[Callable[[Tensors], Any], type[EngineError], str]] = {
    "missing": (lambda t: without(t, UP), ModelNotFound, rf"the update lacks the tensor {UP}$"),
    "empty": (lambda t: {}, ModelNotFound, "lacks the tensor .* more tensors"),
    "a prefix": (lambda t: {f"module.{n}": x for n, x in t.items()}, ModelNotFound, r"does not have: module\."),
    "misshapen": (lambda t: with_(t, UP, t[UP][:7]), ModelNotFound, rf"wrong shape for the tensor {UP}: \[7, 48\]"),
    "whole numbers": (lambda t: with_(t, UP, t[UP].int()), InvalidParameter, f"{UP} is a Tensor, got torch.int32"),
    "no memory": (lambda t: with_(t, UP, t[UP].to("meta")), InvalidParameter, "must be whole float tensors"),
    "sparse": (lambda t: with_(t, UP, t[UP].to_sparse()), InvalidParameter, "must be whole float tensors"),
    "a part of it": (lambda t: with_(t, UP, t[UP].as_subclass(Subclassed)), InvalidParameter, "is a Subclassed"),
    "no tensor": (lambda t: with_(t, UP, [1.0]), InvalidParameter, f"'{UP}' has a, got 'list'"),
    "no names": (lambda t: t.values(), InvalidParameter, "pairs of a name and a tensor"),
    "twice": (lambda t: [*t.items(), *t.items()], InvalidParameter, "two tensors of the name"),
    "nothing": (lambda t: None, InvalidParameter, "must be a path, or tensors by name"),
}  # fmt: skip


@pytest.mark.parametrize("case", GIVEN)
def test_given_tensors_are_refused_by_name(case: str, checkpoint: Checkpoint) -> None:
    change, error, message = GIVEN[case]
    live = load(checkpoint("llama"))
    before = logits_of(live, IDS)
    with pytest.raises(error, match=message):
        prepare_update(live, change(tensors_of(checkpoint("llama", seed=1))), QUIET)
    assert torch.equal(logits_of(live, IDS), before)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_what_a_trainer_has_at_hand(name: str, checkpoint: Checkpoint) -> None:
    """transformers' parameters (of a tied model the one matrix once) and its state (twice), in other types, not
    contiguous, asking for gradients; nothing of them is kept."""
    live, fresh = load(checkpoint(name)), load(checkpoint(name, seed=1))
    expected = logits_of(fresh, IDS)
    first = logits_of(live, IDS)
    module = hf.AutoModelForCausalLM.from_pretrained(checkpoint(name, seed=1), dtype=torch.float32)
    prepare_update(live, module.named_parameters(), QUIET)()
    assert torch.equal(logits_of(live, IDS), expected)
    prepare_update(live, checkpoint(name), QUIET)()
    assert torch.equal(logits_of(live, IDS), first)
    turned = {key: tensor.double().t().contiguous().t() if tensor.ndim == 2 else tensor
              for key, tensor in module.state_dict().items()}  # fmt: skip
    prepare_update(live, turned, QUIET)()
    for tensor in turned.values():
        tensor.zero_()
    assert torch.equal(logits_of(live, IDS), expected)


def test_two_heads_are_not_one(checkpoint: Checkpoint) -> None:
    """A tied model cannot hold an output layer of its own."""
    live = load(checkpoint("qwen3"))
    tensors = tensors_of(checkpoint("qwen3", seed=1))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).clone()
    with pytest.raises(ModelNotFound, match=r"configuration\.tied is False, not True"):
        prepare_update(live, tensors, QUIET)

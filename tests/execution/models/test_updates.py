"""New weights of a live model: what it refuses, by name, and what it takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from execution.models.test_weights import Tensors, changed, load, tensors_of
from support.checkpoints import Checkpoint
from support.data import cases_of
from support.forwards import logits_of
from support.long import LONG
from support.panels import use_panels
from support.reachable import tensors_in

from asyncengine.config import EngineConfig
from asyncengine.errors import EngineError, InvalidParameter, ModelNotFound
from asyncengine.execution.runner.model_memory import prepare_update

CASES = cases_of(__file__)

QUIET = EngineConfig(show_progress=False)
IDS = [3, 17, 40, 9, 3, 3, 88]
UP = "model.layers.1.mlp.up_proj.weight"

CONFIGS: dict[str, tuple[dict[str, Any], str]] = CASES["configs"]


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
    """A tensor like a distributed one: what it says of itself is not what its memory holds."""


GIVEN: dict[str, tuple[Callable[[Tensors], Any], type[EngineError], str]] = {
    "missing": (lambda t: without(t, UP), ModelNotFound, rf"the update lacks the tensor {UP}$"),
    "empty": (lambda t: {}, ModelNotFound, "lacks the tensor .* more tensors"),
    "a prefix": (lambda t: {f"module.{n}": x for n, x in t.items()}, ModelNotFound, r"does not have: module\."),
    "misshapen": (lambda t: with_(t, UP, t[UP][:7]), ModelNotFound, rf"wrong shape for the tensor {UP}: \[7, 48\]"),
    "NaN": (lambda t: with_(t, UP, t[UP] * torch.nan), InvalidParameter, f"must be finite; {UP} holds NaN or infinity"),
    "infinity": (lambda t: with_(t, UP, t[UP].index_fill(1, torch.tensor(3), torch.inf)), InvalidParameter, UP),
    "whole numbers": (lambda t: with_(t, UP, t[UP].int()), InvalidParameter, f"{UP} is a Tensor, got torch.int32"),
    "no memory": (lambda t: with_(t, UP, t[UP].to("meta")), InvalidParameter, "must be whole float tensors"),
    "sparse": (lambda t: with_(t, UP, t[UP].to_sparse()), InvalidParameter, "must be whole float tensors"),
    "a part of it": (lambda t: with_(t, UP, t[UP].as_subclass(Subclassed)), InvalidParameter, "is a Subclassed"),
    "no tensor": (lambda t: with_(t, UP, [1.0]), InvalidParameter, f"also that of '{UP}', got 'list'"),
    "no names": (lambda t: t.values(), InvalidParameter, "pairs of a name and a tensor"),
    "twice": (lambda t: [*t.items(), *t.items()], InvalidParameter, "two tensors of the name"),
    "nothing": (lambda t: None, InvalidParameter, "must be a path, or tensors by name"),
}  # fmt: skip


PARTIAL: dict[str, tuple[Callable[[Tensors], Any], type[EngineError], str]] = {
    "a part of nothing": (lambda t: {}, ModelNotFound, "the update lacks the tensor .* more tensors"),
    "an unknown part": (
        lambda t: {UP: t[UP], UP.replace("1", "9"): t[UP]},
        ModelNotFound,
        "does not have: model.layers.9",
    ),
    "a misshapen part": (lambda t: {UP: t[UP][:7]}, ModelNotFound, rf"wrong shape for the tensor {UP}"),
}


@pytest.mark.parametrize("case", [*GIVEN, *PARTIAL])
def test_given_tensors_are_refused_by_name(case: str, checkpoint: Checkpoint) -> None:
    """The refusal comes before anything is written."""
    change, error, message = {**GIVEN, **PARTIAL}[case]
    live = load(checkpoint("llama"))
    before = logits_of(live, IDS)
    with pytest.raises(error, match=message):
        prepare_update(live, change(tensors_of(checkpoint("llama", seed=1))), QUIET, partial=case in PARTIAL)
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


@pytest.mark.parametrize("partial", [False, True])
def test_two_heads_are_not_one(partial: bool, checkpoint: Checkpoint) -> None:
    """A tied model cannot hold an output layer of its own."""
    live = load(checkpoint("qwen3"))
    tensors = tensors_of(checkpoint("qwen3", seed=1))
    table = tensors["model.embed_tokens.weight"]
    two = {"model.embed_tokens.weight": table, "lm_head.weight": table.flip(0).clone()}
    with pytest.raises(ModelNotFound, match=r"configuration\.tied is False, not True"):
        prepare_update(live, two if partial else {**tensors, **two}, QUIET, partial=partial)


# ---------------------------------------------------------------- a part of the tensors

PARTS: list[tuple[str, str, Any]] = CASES["parts"]
"""Merged matrices, biases, tied ones, transposed ones, mixtures with their experts apart and together, states."""
TOGETHER: list[tuple[str, str, Any]] = [("llama", "bfloat16", "int8")]
"""Some matrices share a panel."""


@pytest.mark.parametrize(
    ("name", "dtype", "quantization", "first"),
    [(*case, (place + turn) % 2) for turn in range(1 + LONG) for place, case in enumerate([*PARTS, *TOGETHER])],
)
def test_a_part_of_the_tensors(
    name: str, dtype: str, quantization: Any, first: int, checkpoint: Checkpoint, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Every second tensor, from the first or the second on, so that of query, key and value one or two are new: to the
    bit a fresh model on what the checkpoint would be. Then the rest. A partner that is lacking is named, before
    anything is written."""
    pytest.importorskip("numba")
    use_panels(True, monkeypatch)
    options = {"dtype": dtype, "quantization": quantization}
    live, new = load(checkpoint(name), **options), tensors_of(checkpoint(name, seed=1))
    before, half = logits_of(live, IDS), {key: new[key] for key in sorted(new)[first::2]}
    addresses = {each.data_ptr() for each in tensors_in(live) if not each.is_mkldnn}
    named = complete(live, half, new)
    assert named or (name, dtype, quantization) not in TOGETHER
    assert torch.equal(logits_of(live, IDS), before)
    prepare_update(live, half, QUIET, partial=True)()
    mixed = load(changed(checkpoint(name), tmp_path / "mixed", lambda tensors: tensors.update(half)), **options)
    expected = logits_of(mixed, IDS)
    assert torch.equal(logits_of(live, IDS), expected)
    for other in (checkpoint(name), checkpoint(name, seed=1)):
        assert not torch.equal(logits_of(load(other, **options), IDS), expected)
    rest = {key: tensor for key, tensor in new.items() if key not in half}
    complete(live, rest, new)
    prepare_update(live, rest, QUIET, partial=True)()
    fresh = load(checkpoint(name, seed=1), **options)
    for ids in (IDS, IDS * 12):
        assert torch.equal(logits_of(live, ids), logits_of(fresh, ids))
    assert addresses == {each.data_ptr() for each in tensors_in(live) if not each.is_mkldnn}, "no weight moves"
    prepare_update(live, checkpoint(name), QUIET)()
    assert torch.equal(logits_of(live, IDS), before)


def complete(live: Any, part: Tensors, whole: Tensors) -> list[str]:
    """Add to `part` the tensors without which it is refused; their names."""
    said = re.compile(r"the update lacks the tensor (\S+), which this model packs together with \S+: give both")
    named: list[str] = []
    while len(part) < len(whole):
        try:
            prepare_update(live, part, QUIET, partial=True)
            break
        except ModelNotFound as error:
            (name,) = said.findall(str(error))
            named.append(name)
            part[name] = whole[name]
    return named


@pytest.mark.parametrize("spelling", ["model.embed_tokens.weight", "lm_head.weight"])
def test_the_one_matrix_of_a_tied_model_has_two_names(spelling: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    live, table = load(checkpoint("qwen3")), tensors_of(checkpoint("qwen3", seed=1))["model.embed_tokens.weight"]
    prepare_update(live, {spelling: table}, QUIET, partial=True)()
    both = changed(checkpoint("qwen3"), tmp_path / "a", lambda t: t.update({"model.embed_tokens.weight": table}))
    assert torch.equal(logits_of(live, IDS), logits_of(load(both), IDS))


def test_a_folder_may_hold_a_part(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The live model is not tied though its configuration says so, which the folder cannot know."""

    def untie(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).clone()

    live = load(changed(checkpoint("qwen3"), tmp_path / "untied", untie))
    new = tensors_of(checkpoint("qwen3", seed=1))
    up = {name: tensor for name, tensor in new.items() if ".mlp." in name}

    def only(tensors: Tensors) -> None:
        tensors.clear()
        tensors.update(up)

    prepare_update(live, changed(checkpoint("qwen3"), tmp_path / "part", only), QUIET, partial=True)()
    whole = changed(tmp_path / "untied", tmp_path / "whole", lambda tensors: tensors.update(up))
    assert torch.equal(logits_of(live, IDS), logits_of(load(whole), IDS))

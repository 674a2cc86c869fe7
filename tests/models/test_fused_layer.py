"""Fused layers and forwards: taken by every family whose layers have a known form, equal, and refused where not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Checkpoint, MakeRunner
from support.drive import Driver, prompts
from support.tiny_models import FAMILIES, VOCAB, make_model
from torch import nn

from asyncengine.attention.base import LayerSpec, MergedHeads
from asyncengine.config import EngineConfig
from asyncengine.kernels.cpu import compiler_missing
from asyncengine.models.families import probe, run_recorded
from asyncengine.models.fused_attention import fuse_attention
from asyncengine.models.fused_layer import FusedLayer, fuse_layer
from asyncengine.models.fused_model import FusedForward, fuse_forward
from asyncengine.models.fusions import fuse
from asyncengine.models.loading import load_model
from asyncengine.models.mapped import MappedFiles
from asyncengine.models.progress import LoadProgress
from asyncengine.models.watching import answering, find_parts, watch

CPU = torch.device("cpu")
LAST = 500
NO_FORWARD = {"opt", "gpt2", "granitehybrid"}
"""Families with other parts: positions are learned, not rotated; layers that might be recurrent."""
OWN_ATTENTION = {"olmo2", "gpt-oss", "cohere", "hunyuanmoe"}
"""Queries normalised over their whole width, or after they are rotated; tables of half the size; neighbours rotated,
not halves."""
compiled = pytest.mark.skipif(compiler_missing(torch.float32, CPU) is not None, reason="no compiler")


def counts(entries: list[str]) -> dict[str, int]:
    return {name: int(count) for name, count in (entry.split(" x ") for entry in entries)}


def prepared(name: str) -> tuple[Any, Any]:
    """A probed model with merged products, and its recorded layers; no forward is fused yet."""
    model = make_model(name).requires_grad_(False)
    model.set_attn_implementation("eager")
    probed = probe(model, CPU)
    with LoadProgress(False) as progress:
        fuse(model, probed.modules, lambda: run_recorded(model, CPU)[0], MappedFiles(), progress)
    return model, probed


@pytest.mark.parametrize("name", list(FAMILIES))
def test_which_families_are_fused(name: str, checkpoint: Checkpoint) -> None:
    model = load_model(str(checkpoint(name)), EngineConfig())
    found = counts(model.fused)
    assert ("forward" in found) == (name not in NO_FORWARD)
    assert found.get("layer", 0) == (0 if name in NO_FORWARD else 3)
    if compiler_missing(torch.float32, CPU) is None:
        assert found.get("merged_attention", 0) == (0 if name in NO_FORWARD | OWN_ATTENTION else 3)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - NO_FORWARD))
@pytest.mark.parametrize("first", [0, 300])
def test_forward_equals_the_family_s_own(name: str, first: int, checkpoint: Checkpoint) -> None:
    """At any position, for all rows and for some."""
    model = load_model(str(checkpoint(name)), EngineConfig())
    module = model.module
    ids, positions = torch.arange(3, 14)[None], torch.arange(first, first + 11)[None]
    for rows in (torch.arange(11), torch.tensor([0, 4, 10]), torch.tensor([10])):
        given = {"input_ids": ids, "position_ids": positions, "use_cache": False, "logits_to_keep": rows}
        with torch.inference_mode(), answering(model.attention_modules):
            assert isinstance(module.forward, FusedForward)
            found = module(**given).logits
            expected = type(module).forward(module, **given).logits
        assert found.shape == expected.shape == (1, len(rows), VOCAB)
        assert torch.allclose(found, expected, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotation_tables_are_those_of_frozen_frequencies(kind: str, tmp_path: Path) -> None:
    """Also of positions that have no row in the table."""
    import transformers as hf

    more: dict[str, Any] = {"dynamic": {"factor": 4.0}, "longrope": {
        "short_factor": [1.0] * 6, "long_factor": [3.0] * 6, "original_max_position_embeddings": 64,
    }}[kind]  # fmt: skip
    rope = {"rope_type": kind, "rope_theta": 10000.0, **more}
    config = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64 if kind == "dynamic" else 512, rope_parameters=rope,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    engine_config = EngineConfig(load_format="dummy", dtype="float32", show_progress=False)
    model = load_model(str(tmp_path), engine_config)
    module = model.module
    assert isinstance(module.forward, FusedForward)
    (table,) = module.forward._tables
    assert table.most == model.max_model_len
    for limit in (table.most, 5):
        table.most = limit
        for first in (0, model.max_model_len - 11):
            positions = torch.arange(first, first + 11)[None]
            like = torch.zeros(1, 11, 48)
            found, expected = table(like, positions), module.model.rotary_emb(like, positions)
            assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


def test_other_calls_go_to_the_family_s_own(checkpoint: Checkpoint) -> None:
    model = load_model(str(checkpoint("llama")), EngineConfig())
    ids = torch.arange(3, 14)[None]
    with torch.inference_mode(), answering(model.attention_modules):
        found = model.module(input_ids=ids, use_cache=False, output_hidden_states=True)
        assert len(found.hidden_states) == 4
        assert found.logits.shape == (1, 11, VOCAB)


class Noisy(nn.Module):
    """A decoder layer that does a little more than its parts."""

    def __init__(self, layer: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.own = [layer]
        self.change = change
        for name, child in layer.named_children():
            setattr(self, name, child)

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        return self.change(self.own[0](hidden_states, **arguments))


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        (lambda x: x, True),
        (lambda x: x * 1.001, False),
        (lambda x: x.clamp(-0.5, 0.5), False),
        (lambda x: x + 1e-3, False),
    ],
)
def test_layers_that_do_more_keep_their_own_form(change: Any, ok: bool) -> None:
    model, probed = prepared("llama")
    layer = Noisy(model.model.layers[0], change)
    parts = find_parts(model, 3)
    assert parts is not None
    with torch.inference_mode():
        seen = watch(model, parts, probed.modules, 0, 1.0)
        found = fuse_layer(layer, probed.modules[0], probed.layers[0], [seen.contexts[0]], seen.embedded)
    assert isinstance(found, FusedLayer) == ok


def own_forward(model: Any, change: str) -> None:
    """Make the model do something between its parts."""
    if change == "between layers":
        model.model.layers[0].register_forward_hook(lambda _, given, out: out * 1.01)
        model.model.layers[1].register_forward_pre_hook(lambda _, given: (given[0] * 0.99,))
    elif change == "before the first layer":
        model.model.layers[0].register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    elif change == "before the output layer":
        model.lm_head.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    elif change == "large logits":
        own = type(model).forward

        def capped(*args: Any, **kwargs: Any) -> Any:
            out = own(model, *args, **kwargs)
            out.logits = out.logits.clamp(-40, 40)
            return out

        model.forward = capped


@pytest.mark.parametrize(
    "change", ["between layers", "before the first layer", "before the output layer", "large logits"]
)
def test_models_that_do_more_keep_their_own_forward(change: str) -> None:
    model, probed = prepared("llama")
    own_forward(model, change)
    before = model.__dict__.get("forward")
    assert fuse_forward(model, probed.modules, probed.layers, LAST) == []
    assert model.__dict__.get("forward") is before


@compiled
@pytest.mark.parametrize("change", ["none", "clipped queries", "gated answer", "far positions"])
def test_attention_that_does_more_is_not_merged(change: str) -> None:
    """Also what shows in large numbers or far positions only."""
    model, probed = prepared("qwen3")
    module = probed.modules[0]
    own = module.forward
    if change == "clipped queries":
        module.v_proj.register_forward_hook(lambda _, given, out: out.clamp(-20, 20))
    elif change == "gated answer":
        module.forward = lambda **given: (own(**given)[0] * torch.sigmoid(given["hidden_states"]), None)
    elif change == "far positions":

        def sharpened(**given: Any) -> Any:
            factor = 1.1 if int(given["position_ids"].max()) > 100 else 1.0
            return own(**{**given, "hidden_states": given["hidden_states"] * factor})

        module.forward = sharpened
    parts = find_parts(model, 3)
    assert parts is not None
    with torch.inference_mode():
        seen = [watch(model, parts, probed.modules, first, 1.0) for first in (0, 300)]
        contexts = [each.contexts[0] for each in seen]
        found = fuse_attention(module, probed.layers[0], contexts, torch.randn(seen[0].embedded.shape))
    assert found.merged == (change == "none")


class Merging:
    """A backend's merged entry, counted."""

    def __init__(self, backend: Any) -> None:
        self.calls: list[tuple[int, MergedHeads]] = []
        self._own = backend.attend_merged

    def __call__(self, layer: int, qkv: torch.Tensor, heads: MergedHeads, *tables: torch.Tensor) -> torch.Tensor:
        self.calls.append((layer, heads))
        out: torch.Tensor = self._own(layer, qkv, heads, *tables)
        return out


@compiled
@pytest.mark.parametrize("name", ["qwen3", "smollm3"])
def test_merged_and_own_attention_answer_alike(name: str, make_runner: MakeRunner) -> None:
    """A runner on the torch backend never calls the merged entry and gives the same tokens."""
    asked = prompts([1, 19, 6], VOCAB)
    outputs = []
    for backend in ("auto", "torch"):
        runner = make_runner(name, attention_backend=backend)
        handlers = [module.__dict__["asyncengine_attention"] for module in runner._attention_modules]
        merged = [handler._attend_merged for handler in handlers]
        assert all((entry is None) == (backend == "torch") for entry in merged)
        driver = Driver(runner)
        outputs.append(driver.run([driver.job(prompt, 12) for prompt in asked], chunk=7))
    assert outputs[0] == outputs[1]


def test_rows_that_are_not_wanted_are_not_computed(checkpoint: Checkpoint) -> None:
    """The last MLP sees the wanted rows only; all of them where a hook (an adapter's) waits for them."""
    model = load_model(str(checkpoint("llama")), EngineConfig())
    layers = model.module.model.layers
    given = {"input_ids": torch.arange(3, 14)[None], "position_ids": torch.arange(11)[None], "use_cache": False}
    rows = torch.tensor([10])
    seen: list[int] = []
    last = layers[-1].mlp
    own = last.forward

    def counted(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[1])
        out: torch.Tensor = own(x)
        return out

    last.forward = counted
    with torch.inference_mode(), answering(model.attention_modules):
        expected = model.module(**given, logits_to_keep=rows).logits
        hook = last.down_proj.register_forward_hook(lambda *_: None)
        found = model.module(**given, logits_to_keep=rows).logits
        hook.remove()
    assert seen == [1, 11]
    assert torch.allclose(found, expected, atol=1e-4)


def test_specs_of_another_model_do_not_fit() -> None:
    """A model whose layers are not those that were recorded is left alone."""
    model, probed = prepared("llama")
    assert fuse_forward(model, probed.modules[:2], probed.layers[:2], LAST) == []
    assert isinstance(probed.layers[0], LayerSpec)

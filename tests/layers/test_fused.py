"""Short steps in one call: who gets it, that it gives the bits of the layers one by one, and when it is not taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.checkpoints import Checkpoint, MakeRunner
from support.drive import Driver, prompts
from support.forwards import Forwards
from support.panels import use_panels
from support.tiny_configs import FAMILIES, VOCAB, changed

from asyncengine.config import EngineConfig
from asyncengine.device.cores import Cores, Sharing
from asyncengine.layers.fused import MOST_TOKENS, FusedLayers, fused_layers
from asyncengine.layers.weight_forms import DenseWeight
from asyncengine.models.decoder import Decoder
from asyncengine.models.loading import load_model

pytest.importorskip("numba")
COMMON = {"llama3.1-rope", "qwen2", "qwen3", "qwen3.5"}
"""Tiny models with norms before both branches, a gated MLP, ordinary heads or states, and widths that panels take."""
FORMS = [
    ("qwen3", "bfloat16", None), ("qwen3", "float32", "int8"), ("qwen2", "float32", None),
    ("qwen2", "bfloat16", "int4"),
    ("qwen3.5", "bfloat16", "int4"), ("qwen3.5", "float32", None),
]  # fmt: skip
"""Models, types and forms of weights."""


# Their own widths fill no panels.
VARIANTS = {
    "qwen3.5moe, whole": changed(
        "qwen3.5moe", linear_num_key_heads=4, linear_num_value_heads=16, linear_key_head_dim=16
    ),
    "nemotron-3, whole": changed(
        "nemotron-3", layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        mamba_num_heads=6, moe_intermediate_size=64, moe_shared_expert_intermediate_size=96, intermediate_size=128,
    ),
}  # fmt: skip
BESIDE = [
    ("qwen3.5moe, whole", "bfloat16", None), ("qwen3.5moe, whole", "bfloat16", "int4"), ("glm4moe", "float32", None),
    ("glm4moe", "bfloat16", "int4"), ("dots1", "bfloat16", None), ("granite4", "float32", None),
    ("granite4", "bfloat16", "int4"), ("falcon-h1", "bfloat16", None), ("falcon-h1", "bfloat16", "int4"),
    ("mamba2", "float32", None), ("mamba2", "bfloat16", "int4"), ("nemotron-3, whole", "bfloat16", None),
    ("nemotron-3, whole", "bfloat16", "int4"),
]  # fmt: skip
"""Experts beside what all rows share (gated; with a router in float32; behind a dense layer; in a hybrid), a state
beside attention, mixers alone, and layers of one branch."""


@pytest.fixture(autouse=True)
def variants(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in VARIANTS.items():
        monkeypatch.setitem(FAMILIES, name, make)


@pytest.fixture(autouse=True)
def in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_panels(True, monkeypatch)


def load(path: Any, **fields: Any) -> Decoder:
    model = load_model(str(path), EngineConfig(show_progress=False, **fields)).model
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("name", ["llama", "mistral", *sorted(COMMON)])
def test_who_gets_it(name: str, checkpoint: Checkpoint) -> None:
    """The others' widths fill no panels, and in 8 bits any width will do."""
    model = load(checkpoint(name))
    assert (model.fused is not None) == (name in COMMON) == model.compiled
    assert (f"fused_layers x {len(model.layers)}" in model.describe()) == (name in COMMON)
    assert load(checkpoint(name), quantization="int8").compiled


def test_layers_of_another_shape_do_not_get_it(checkpoint: Checkpoint) -> None:
    """One weight that no kernel takes is enough."""
    model = load(checkpoint("qwen3"))

    def again() -> FusedLayers | None:
        return fused_layers(model.layers, model.norm, model.options, 1.0)

    assert again() is not None
    down: Any = model.layers[1].mlp.down
    own, down.weight = down.weight, DenseWeight(down.outputs, down.inputs, torch.float32, torch.device("cpu"))
    assert again() is None
    down.weight = own
    assert again() is not None
    model.layers[2].after_mlp = model.norm
    model.layers[2].config = replace(model.layers[2].config, after_mlp="norm")
    assert again() is None


@pytest.mark.parametrize(("name", "dtype", "quantization"), FORMS)
def test_to_the_bit(name: str, dtype: str, quantization: Any, checkpoint: Checkpoint) -> None:
    """Logits of 1, 2, 13 and 64 rows that decode, of a chunk, and of both together."""
    model = load(checkpoint(name), dtype=dtype, quantization=quantization)
    same_bits(model, [[3] * 64, [1], [1] * 2, [1] * 13, [1] * 64, [20], [1, 1, 30, 1]])


@pytest.mark.parametrize(("name", "dtype", "quantization"), BESIDE)
def test_to_the_bit_of_what_lies_side_by_side(name: str, dtype: str, quantization: Any, checkpoint: Checkpoint) -> None:
    """Steps that read what the one before wrote, of one row and of several."""
    model = load(checkpoint(name, heavy=True), dtype=dtype, quantization=quantization)
    assert f"fused_layers x {len(model.layers)}" in model.describe()
    same_bits(model, [[3] * 5, [1], [1] * 5, [1, 1, 11, 1]])


def same_bits(model: Decoder, steps: list[list[int]]) -> None:
    """Logits of these steps with all layers in one call, and layer by layer."""
    fused = model.fused
    assert fused is not None
    seen = []
    for form in (fused, None):
        model.fused = form
        forwards = Forwards(model, rows=64)
        found = []
        for counts in steps:
            ids = [(7 * place + len(counts)) % VOCAB for place in range(sum(counts))]
            found.append(forwards.step(ids, counts))
        seen.append(found)
    for left, right in zip(*seen, strict=True):
        assert torch.equal(left, right)
        assert bool(left.isfinite().all())


@pytest.mark.parametrize(("name", "quantization"), [("qwen2", None), ("qwen3", None), ("llama", "int8")])
def test_the_same_tokens_and_logprobs(
    name: str, quantization: str | None, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and together, next to prompts and without: to the bit, whichever way a step goes."""
    runner = make_runner(name, quantization=quantization)
    inputs = prompts([5, 33, 18], VOCAB)
    taken: list[int] = []
    own = FusedLayers.__call__

    def counted(self: FusedLayers, h: torch.Tensor, *rest: Any) -> torch.Tensor:
        taken.append(len(h))
        return own(self, h, *rest)

    monkeypatch.setattr(FusedLayers, "__call__", counted)
    driver = Driver(runner)

    def run() -> list[Any]:
        jobs = [driver.job(prompt, 12) for prompt in inputs]
        return [driver.run(jobs, 16), [job.logprobs for job in jobs]]

    short = run()
    assert max(taken) > len(inputs), "short parts of prompts go this way too, though few of their rows are wanted"
    monkeypatch.setattr(FusedLayers, "serves", lambda *_: False)
    taken.clear()
    assert run() == short
    assert not taken


@pytest.mark.parametrize(("name", "quantization"), [("qwen3", None), ("llama", "int8")])
def test_shared_among_threads_in_the_smallest_pieces(
    name: str, quantization: str | None, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: rows so long that their keys are split among threads, next to short ones."""
    from asyncengine.kernels.cpu.team import Team

    runner = make_runner(name, quantization=quantization, max_num_batched_tokens=1024)
    inputs = prompts([530, 33, 5], VOCAB)

    def run() -> list[Any]:
        driver = Driver(runner)
        jobs = [driver.job(prompt, 6) for prompt in inputs]
        return [driver.run(jobs, 600), [job.logprobs for job in jobs]]

    alone = run()
    monkeypatch.setattr(runner, "_small", False)
    runner.cores.close()
    runner.cores = Cores(3, sharing=Sharing())
    runner.cores._team = Team(3, piece=1)
    assert run() == alone
    assert runner.cores._team.account.pieces > 100
    runner.cores.close()


def test_long_steps_adapters_and_other_backends_go_the_long_way(checkpoint: Checkpoint) -> None:
    model = load(checkpoint("qwen3"))
    fused: Any = model.fused
    step = Forwards(model).context([1])
    assert fused.serves(1, step, ())
    assert fused.serves(MOST_TOKENS, step, ())
    assert not fused.serves(MOST_TOKENS + 1, step, ())

    class Elsewhere:
        """Adapters whose factors are not where the kernels find them."""

        def records(self, paths: tuple[str, ...]) -> None:
            return None

    adapted: Any = Elsewhere()
    assert not fused.serves(1, Forwards(model).context([1], adapters=adapted), ())
    assert not fused.serves(1, Forwards(model, backend="torch").context([1]), ())

"""Decoding in two calls per layer: who gets it, that nothing else changes, and when a step goes the long way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from asyncengine.models.fused_model import FusedForward
from asyncengine.models.short_steps import MOST_TOKENS, ShortSteps
from support.checkpoints import Checkpoint, MakeRunner
from support.drive import Driver, prompts
from support.panels import use_panels
from support.tiny_models import FAMILIES, VOCAB

from asyncengine.config import EngineConfig
from asyncengine.device.cores import Cores, Sharing
from asyncengine.models import short_steps
from asyncengine.models.loading import load_model

pytest.importorskip("numba")
COMMON = {"llama3.1-rope", "qwen2", "qwen3", "granite", "smollm3"}
"""Tiny models with norms before both branches, a gated MLP, ordinary heads, and widths that panels take."""


@pytest.fixture(autouse=True)
def in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_panels(True, monkeypatch)


def load(path: Any, **options: Any) -> Any:
    return load_model(str(path), EngineConfig(**options))


def steps_of(module: Any) -> ShortSteps:
    assert isinstance(module.forward, FusedForward)
    assert module.forward._short is not None
    return module.forward._short


@pytest.mark.parametrize("name", list(FAMILIES))
def test_who_gets_it(name: str, checkpoint: Checkpoint) -> None:
    assert ("span x 3" in load(checkpoint(name)).fused) == (name in COMMON)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("qwen2", None), ("qwen3", None), ("granite", None), ("smollm3", None), ("llama", "int8"), ("granite", "int4")],
)
def test_the_same_tokens_and_logprobs(
    name: str, quantization: str | None, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and together, next to prompts and without: to the bit, whichever way a step goes."""
    runner = make_runner(name, quantization=quantization)
    inputs = prompts([5, 33, 18], VOCAB)
    taken: list[int] = []
    own = ShortSteps.__call__

    def counted(self: ShortSteps, h: torch.Tensor, contexts: Any) -> torch.Tensor:
        taken.append(h.shape[1])
        return own(self, h, contexts)

    monkeypatch.setattr(ShortSteps, "__call__", counted)
    driver = Driver(runner)

    def run(**options: Any) -> list[Any]:
        jobs = [driver.job(prompt, 12) for prompt in inputs]
        return [driver.run(jobs, 16), [job.logprobs for job in jobs]]

    short = run()
    assert taken
    monkeypatch.setattr(ShortSteps, "serve", lambda self, tokens: False)
    taken.clear()
    assert run() == short
    assert not taken


@pytest.mark.parametrize(("name", "quantization"), [("qwen3", None), ("smollm3", None), ("llama", "int8")])
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


def test_long_steps_and_hooks_go_the_long_way(checkpoint: Checkpoint, make_runner: MakeRunner) -> None:
    runner = make_runner("qwen3")
    steps = steps_of(runner._module)
    assert steps.serve(1)
    assert steps.serve(MOST_TOKENS)
    assert not steps.serve(MOST_TOKENS + 1)
    layer = steps._layers[1]
    for part in (layer.attention.qkv, layer.attention.out, layer.mlp, layer.mlp.gate_up, layer.mlp.down_proj):
        hook = part.register_forward_hook(lambda *_: None)
        assert not steps.serve(1), "an adapter would be passed by"
        hook.remove()
        assert steps.serve(1)


def test_without_a_merged_entry_it_is_not_taken(checkpoint: Checkpoint) -> None:
    """No backend is attached yet: the layers' own forms answer."""
    assert not steps_of(load(checkpoint("qwen3")).module).serve(1)


def test_what_differs_is_not_taken(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncengine.kernels.cpu.fused_layer import FusedLayerKernel

    own = FusedLayerKernel.__call__
    monkeypatch.setattr(FusedLayerKernel, "__call__", lambda *given: own(*given) * 1.01)
    assert not any(entry.startswith("span") for entry in load(checkpoint("qwen3")).fused)


def test_what_fails_is_not_taken(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncengine.kernels.cpu import fused_layer

    def fail(*_: Any) -> None:
        raise RuntimeError("unknown CPU")

    monkeypatch.setattr(fused_layer, "run_fused_layer", fail)
    model = load(checkpoint("qwen3"))
    assert "layer x 3" in model.fused
    assert not any(entry.startswith("span") for entry in model.fused)


def test_a_linear_that_stays_as_it_is_keeps_the_long_way(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short_steps, "_product", lambda linear: None)
    assert not any(entry.startswith("span") for entry in load(checkpoint("qwen3")).fused)


def test_norms_are_where_the_model_s_are(checkpoint: Checkpoint) -> None:
    """Weights are taken out of their files before anything remembers where they are."""
    model = load(checkpoint("qwen3"))
    known = {part.data_ptr() for part in model.module.parameters()}
    for span in steps_of(model.module)._spans:
        assert {int(address) for address in span._record[-2:]} <= known

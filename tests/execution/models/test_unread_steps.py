"""Steps whose logits nobody wants, as of the first chunks of a long prompt: no kernel is called for no rows.

A kernel of a GPU is launched with as many blocks as there are rows, and CUDA refuses to launch none.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.checkpoints import Checkpoint
from support.fake_flashinfer import FakeFlashInfer, FakeMemory
from support.forwards import Forwards, relative_error
from support.long import LONG
from support.tiny_models import FAMILIES
from torch.utils._python_dispatch import TorchDispatchMode

from asyncengine.config import EngineConfig
from asyncengine.execution.layers.kernels import CudaKernels
from asyncengine.execution.models import loading
from asyncengine.execution.models.decoder import Decoder, PooledDecoder

IDS = [3, 17, 40, 9, 3, 3, 88, 51, 20, 7, 7, 133]
COMPUTING = ("mm", "addmm", "bmm", "linear", "native_layer_norm", "_softmax", "silu", "gelu", "relu", "topk", "sort")


class RefusesEmpty(TorchDispatchMode):
    """torch's own operators take tensors without rows; where they are called for none, so would other kernels be."""

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        empty = any(isinstance(each, torch.Tensor) and not each.numel() for each in arguments)
        if empty and operator.overloadpacket.__name__.rstrip("_") in COMPUTING:
            raise RuntimeError(f"{operator} was called for no rows")
        return operator(*arguments, **(options or {}))


@pytest.fixture(params=["compiled", "flashinfer"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels that models are loaded with from now on."""
    if request.param == "flashinfer":
        fake = FakeFlashInfer(FakeMemory())
        monkeypatch.setattr(loading, "layer_kernels", lambda *_: CudaKernels(fake, torch.device("cpu")))
    return str(request.param)


def load(checkpoint: Checkpoint, name: str, **fields: Any) -> Any:
    config = EngineConfig(device="cpu", show_progress=False, **fields)
    return loading.load_model(str(checkpoint(name)), config).model


COMPILED = ("llama", "gemma4", "opt", "gpt-oss", "glm4moe", "qwen3.5", "mamba2", "nemotron-3", "lfm2moe")
"""A family of each kind of layer."""
SOME = (
    *COMPILED, "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "cohere2", "stablelm", "apertus", "llama4", "mixtral",
    "qwen2moe", "phimoe", "qwen3next", "kimi-linear", "falcon-h1", "bamba", "granite4", "hunyuanmoe",
)  # fmt: skip
"""Families of each kind of rotation, norm, branch, activation; the last through transformers. The long form has all."""


@pytest.mark.parametrize(
    ("name", "kernels"),
    [*((name, "flashinfer") for name in (FAMILIES if LONG else SOME)), *((name, "compiled") for name in COMPILED)],
    indirect=["kernels"],
)
def test_what_such_a_step_leaves_is_what_the_next_one_needs(name: str, kernels: str, checkpoint: Checkpoint) -> None:
    model = load(checkpoint, name)
    backend = "torch" if kernels == "flashinfer" else "auto"
    expected = Forwards(model, backend=backend).step(IDS)[7:]
    chunks = Forwards(model, backend=backend)
    # transformers' modules are torch's alone
    with RefusesEmpty() if isinstance(model, Decoder) else nullcontext():
        for first, end in ((0, 4), (4, 5), (5, 7)):
            assert chunks.step(IDS[first:end], rows=[]).shape == (0, model.vocab_size)
    assert relative_error(expected, chunks.step(IDS[7:])) < 1e-4


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_through_transformers_modules(name: str, checkpoint: Checkpoint) -> None:
    model = load(checkpoint, name, fuse=False)
    chunks = Forwards(model)
    assert chunks.step(IDS[:7], rows=[]).shape == (0, model.vocab_size)
    assert relative_error(Forwards(model).step(IDS)[7:], chunks.step(IDS[7:])) < 1e-5


@pytest.mark.parametrize("tokens", [(), (5,), (5, 9)])
def test_of_requests_for_vectors(tokens: tuple[int, ...], kernels: str, checkpoint: Checkpoint) -> None:
    model = PooledDecoder(load(checkpoint, "qwen3"), tokens)
    with RefusesEmpty():
        assert Forwards(model).step(IDS, rows=[]).shape == (0, model.width)

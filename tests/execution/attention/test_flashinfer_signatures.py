"""Every call to FlashInfer binds to the installed package's signatures. It imports without a GPU; nothing runs.

The oldest and the newest release that `asyncengine[cuda]` allows are to be tried with this file before the range in
pyproject.toml moves.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.attention_pair import Pair, make_flashinfer, prepare
from support.fake_flashinfer import FakeFlashInfer, FakeMemory

from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.layers.kernels import ACTIVATIONS, CudaKernels

LAYERS = [
    LayerSpec(index=0, num_heads=4, num_kv_heads=2, key_dim=64, value_dim=64, scale=0.3, window=6, softcap=2.0),
    LayerSpec(index=1, num_heads=4, num_kv_heads=1, key_dim=64, value_dim=64, scale=0.3),
]
OBJECTS = {
    "BatchPrefillWithPagedKVCacheWrapper": ("plan", "run"),
    "BatchDecodeWithPagedKVCacheWrapper": ("plan", "run", "reset_workspace_buffer"),
}
FUNCTIONS = (
    "append_paged_kv_cache", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "fast_decode_plan",
)  # fmt: skip


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path_factory.mktemp("flashinfer")))
        yield pytest.importorskip("flashinfer")


class Watched:
    """The fake, with every call bound to the real signature first."""

    def __init__(self, fake: Any, real: Any, seen: dict[str, inspect.BoundArguments]) -> None:
        self._fake, self._real, self._seen = fake, real, seen

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._fake, name)
        if name in FUNCTIONS:
            return self._watch(name, getattr(self._real, name), inner)
        if name not in OBJECTS:
            return inner
        kind = getattr(self._real, name)

        def build(*args: Any, **kwargs: Any) -> Any:
            made = self._watch(name, kind.__init__, inner, method=True)(*args, **kwargs)
            for method in OBJECTS[name]:
                if hasattr(made, method):
                    target = getattr(kind, method)
                    setattr(made, method, self._watch(f"{name}.{method}", target, getattr(made, method), method=True))
            return made

        return build

    def _watch(self, name: str, real: Any, inner: Callable[..., Any], method: bool = False) -> Callable[..., Any]:
        signature = signature_of(real)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*(("self",) if method else ()), *args, **kwargs)
            for kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
                loose = [key for key, value in signature.parameters.items() if value.kind is kind]
                assert not any(bound.arguments.get(key) for key in loose), f"{name}: {kwargs} only bind loosely"
            self._seen[name] = bound
            return inner(*args, **kwargs)

        return call


def signature_of(function: Any) -> inspect.Signature:
    """The signature of the function that does the work: a `plan` that takes anything hands it on to `_plan_impl`."""
    signature = inspect.signature(function)
    loose = any(value.kind is inspect.Parameter.VAR_KEYWORD for value in signature.parameters.values())
    owner = getattr(inspect.getmodule(function), function.__qualname__.split(".")[0], None)
    if loose and function.__name__ == "plan" and hasattr(owner, "_plan_impl"):
        return inspect.signature(owner._plan_impl)  # type: ignore[union-attr]
    return signature


def test_every_call_binds(real: Any) -> None:
    fake, seen = FakeFlashInfer(FakeMemory()), {}
    backend = make_flashinfer(LAYERS, Watched(fake, real, seen))
    pair = Pair(backend, LAYERS, rows=2)
    assert pair.step([(0, 9), (1, 3)]) < 1e-5
    assert pair.step([(0, 1), (1, 1)]) < 1e-5
    pair.fixed = prepare(backend, 4)
    for _ in range(5):
        assert pair.step([(0, 1), (1, 1)], padded=4) < 1e-5
    kernels = CudaKernels(Watched(fake, real, seen), torch.device("cpu"))
    x = torch.randn(3, 64)
    for name in ACTIVATIONS:
        gated = kernels.gated(name)
        if gated is not None:
            gated(x)
    expected = {*FUNCTIONS, *OBJECTS}
    expected |= {f"{kind}.{method}" for kind, methods in OBJECTS.items() for method in methods}
    assert set(seen) == expected
    assert seen["BatchPrefillWithPagedKVCacheWrapper.plan"].arguments["causal"] is True
    assert seen["BatchDecodeWithPagedKVCacheWrapper.plan"].arguments["sm_scale"] == 0.3
    assert seen["append_paged_kv_cache"].arguments["kv_layout"] == "NHD"


def test_the_check_can_fail(real: Any) -> None:
    for name, arrays in (("BatchPrefillWithPagedKVCacheWrapper", 8), ("BatchDecodeWithPagedKVCacheWrapper", 7)):
        signature = signature_of(getattr(real, name).plan)
        signature.bind("self", *range(arrays), window_left=3)
        with pytest.raises(TypeError, match="window_lefft"):
            signature.bind("self", *range(arrays), window_lefft=3)


def test_release_is_in_the_range_we_ask_for(real: Any) -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    (wanted,) = (Requirement(text) for text in project["project"]["optional-dependencies"]["cuda"])
    assert real.__version__ in wanted.specifier


def test_without_a_gpu_the_real_wrappers_refuse_instead_of_computing_elsewhere(real: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    from asyncengine.execution.attention.flashinfer import FlashInferBackend

    options = {"max_rows": 2, "max_pages_per_row": 4, "flashinfer": real, "memory": FakeMemory()}
    with pytest.raises((RuntimeError, AssertionError)):
        FlashInferBackend([LAYERS[0]], 9, 4, torch.float16, torch.device("cpu"), **options)

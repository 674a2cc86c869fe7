"""Grouped experts in Triton, by its interpreter: near a float64 reference, each row by itself, nothing for no rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.bfloat16_dots import with_bfloat16_dots
from support.forwards import relative_error
from support.grouped_experts import ERROR, make_mixture
from support.layer_options import options
from torch.utils._python_dispatch import TorchDispatchMode

from asyncengine.execution.layers import experts as layers
from asyncengine.execution.layers import routing
from asyncengine.execution.layers.experts import Experts, ExpertsConfig
from asyncengine.execution.layers.mlp import MLPConfig, MoEConfig, SparseMLP
from asyncengine.execution.layers.routing import RouterConfig
from asyncengine.kernels.cuda import grouped_experts as kernels

FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    with_bfloat16_dots(monkeypatch)


@pytest.mark.parametrize(("rows", "count", "experts", "width", "inner", "dtype", "bounded"), [
    (1, 1, 2, 16, 8, FLOAT, False), (1, 4, 9, 40, 24, BRAIN, True), (5, 3, 7, 64, 33, HALF, False),
    (70, 2, 5, 136, 72, FLOAT, True), (70, 2, 5, 40, 24, BRAIN, False), (300, 2, 3, 32, 48, HALF, True),
])  # fmt: skip
def test_near_the_exact_sum(
    rows: int, count: int, experts: int, width: int, inner: int, dtype: torch.dtype, bounded: bool
) -> None:
    """Widths that fill no block, blocks of 16, 64 and 128 rows, an expert that nobody chose."""
    mixture = make_mixture(rows, count, experts, width, inner, dtype, "cpu", bounded=bounded)
    found = mixture.by_kernels()
    assert found.dtype == dtype
    assert relative_error(mixture.exactly(), found) < ERROR[dtype]


@pytest.mark.parametrize(("rows", "count", "experts"), [(1, 1, 1), (1, 8, 40), (37, 3, 5), (700, 2, 20)])
def test_pairs_are_in_order_of_their_experts(rows: int, count: int, experts: int) -> None:
    chosen = torch.rand(rows, experts, generator=torch.Generator().manual_seed(rows)).argsort(1)[:, :count]
    order, spans = kernels.sort_pairs(chosen, experts)
    flat = chosen.flatten()
    assert torch.equal(order.long(), flat.argsort(stable=True))
    begins, ends = spans[:, :experts].long()
    assert torch.equal(ends - begins, flat.bincount(minlength=experts))
    assert torch.equal(begins[1:], ends[:-1])


def test_a_row_is_spoilt_by_itself_alone() -> None:
    """Weights of experts that nobody chose may be anything."""
    mixture = make_mixture(12, 3, 8, 64, 32, torch.float32, "cpu", bounded=False)
    expected = mixture.by_kernels()
    mixture.up[-1] = mixture.down[-1] = torch.nan
    mixture.x[7] = torch.nan
    found = mixture.by_kernels()
    assert found[7].isnan().all()
    others = [row for row in range(12) if row != 7]
    assert torch.equal(found[others], expected[others])


class NothingRead(TorchDispatchMode):
    """Raises where the host would wait for a value, or for the size of a result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name in ("_local_scalar_dense", "nonzero", "bincount", "masked_select"):
            assert name not in str(func), f"{name}: the host reads"
        return func(*args, **(kwargs or {}))


ROUTERS = {
    "softmax": RouterConfig(8, 2), "own weights": RouterConfig(8, 2, normalised=False, by_expert="scales"),
    "groups": RouterConfig(8, 2, "sigmoid", correction="bias", groups=4, groups_kept=2, scale=2.5),
    "sparsemixer": RouterConfig(8, 2, "sparsemixer", spread=0.01), "one": RouterConfig(8, 1, "sigmoid"),
}  # fmt: skip
EXPERTS = {
    "silu": ExpertsConfig(8, 24), "gelu": ExpertsConfig(8, 24, "gelu_tanh"),
    "ungated": ExpertsConfig(8, 24, "relu2", ("mlp.experts.{}.up.weight",), gated=False),
    "clamped": ExpertsConfig(8, 24, "clamped", bias=("up.bias", "down.bias"), only_stacked=True),
}  # fmt: skip


MIXTURES = [
    ("softmax", "silu", False), ("own weights", "gelu", False), ("groups", "ungated", False),
    ("sparsemixer", "clamped", False), ("one", "silu", True),
]  # fmt: skip
"""Every router and every kind of expert; the last as Llama 4 has it: weights multiply what experts read."""


@pytest.mark.parametrize(("router", "activation", "scales_inputs"), MIXTURES)
def test_layers_by_kernels_are_those_by_torch(
    router: str, activation: str, scales_inputs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtures as families have them; and the host reads nothing, so that a graph can hold them."""
    shared = MLPConfig(24, "silu")
    config = MoEConfig(ROUTERS[router], EXPERTS[activation], shared, "shared.weight", scales_inputs=scales_inputs)
    own = options(torch.float16, plain=True)
    plain = SparseMLP(own, config, "", 32)
    for module in (layers, routing):
        monkeypatch.setattr(module, "triton_missing", lambda device: None)
    grouped = SparseMLP(own, config, "", 32)
    generator = torch.Generator().manual_seed(1)
    for (_, slot), (_, other) in zip(plain.slots(), grouped.slots(), strict=True):
        tensor = torch.randn(slot.shape, generator=generator) * 0.3
        slot.load(tensor)
        other.load(tensor)
    x = torch.randn(9, 32, generator=generator).half()
    expected = plain(x, None)
    monkeypatch.setattr(Experts, "by_torch", None)
    with NothingRead():
        found = grouped(x, None)
    assert relative_error(expected.double(), found.double()) < 4e-3

"""Products of matrices as they are stored, on a real GPU: every kernel against torch in float32."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from support.forwards import relative_error
from support.stored_matrices import FORMS, RandomMatrix

from asyncengine.layers.packed_weight import PackedWeight
from asyncengine.layers.stored import StoredForm

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("triton") is None, reason="needs an NVIDIA GPU and Triton"
)

LIMITS = {torch.float16: 2e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", ["awq", "Q4_K", "Q6_K", "w8a8", "mxfp4"])
def test_products_on_the_device(name: str, dtype: torch.dtype) -> None:
    """Rows that take each of the kernels, in a graph too; rows that are looked up."""
    device = torch.device("cuda", torch.cuda.current_device())
    matrix = RandomMatrix(name, 1040, 1024, ordered=name == "awq")
    weight = PackedWeight(1040, 1024, StoredForm(name, FORMS[name], name == "awq"), dtype, device)
    weight.load(0, matrix)
    dense = matrix.dense().to(device)
    ids = torch.tensor([3, 1039, 3, 0], device=device)
    found = torch.empty((4, 1024), dtype=dtype, device=device)
    weight.read_rows(ids, found)
    assert relative_error(dense[ids], found.float()) < LIMITS[dtype]
    for rows in (1, 3, 4, 16, 33, 64, 200):
        x, bias = torch.randn(rows, 1024, device=device, dtype=dtype), torch.randn(1040, device=device)
        expected = torch.nn.functional.linear(x.float(), dense, bias)
        assert relative_error(expected, weight.multiply(x, bias).float()) < LIMITS[dtype], rows
    x = torch.zeros(16, 1024, device=device, dtype=dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = weight.multiply(x, None)
    x.normal_()
    graph.replay()
    assert relative_error(x.float() @ dense.T, out.float()) < LIMITS[dtype]

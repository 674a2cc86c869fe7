"""Pooling in numpy: a vector has the same bits in any chunks, and what cannot be pooled is an error of one text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from asyncengine.activations import activate, shortened
from asyncengine.errors import ModelNotFound
from asyncengine.execution.pooling.pool import NON_FINITE, Pooler, Span, Sums
from asyncengine.pooling_spec import ACTIVATIONS, MODES, DenseSpec, PoolingSpec
from asyncengine.request_spec import Pooled, RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Row, StepResult

WIDTH = 40


@pytest.mark.parametrize("skip", [0, 3, 20])
def test_chunks_change_no_bit(skip: int) -> None:
    states = np.random.default_rng(0).standard_normal((37, WIDTH)).astype(np.float32)
    whole = Sums(MODES)
    whole.add(states, 0, skip)
    for size in (1, 2, 7, 36):
        parts = Sums(MODES)
        for start in range(0, len(states), size):
            parts.add(states[start : start + size], start, skip)
        assert (parts.vector() == whole.vector()).all(), size
    right = states[skip:].astype(np.float64)
    weights = np.arange(skip + 1, 38)[:, None]
    expected = [
        right[0], right.max(axis=0), right.mean(axis=0), right.sum(axis=0) / len(right) ** 0.5,
        (right * weights).sum(axis=0) / weights.sum(), right[-1],
    ]  # fmt: skip
    assert np.abs(whole.vector() - np.concatenate(expected)).max() < 1e-5


def test_a_text_whose_numbers_are_not_finite_is_alone_with_it() -> None:
    pooler = Pooler(PoolingSpec("embed", ("mean",), whole=True), WIDTH)
    states = torch.ones(5, WIDTH)
    states[1, 3] = float("nan")
    pooled = Pooled(whole=True, every=True)
    rows = []
    for slot, count in enumerate((2, 3)):
        spec = RequestSpec(slot, (1,) * count, SamplingParams(), count, pooled=pooled)
        rows.append(Row(spec, slot, 0, count, [1] * count, False, [], True))
    result = StepResult(1, [-1, -1])
    pooler.read(rows, [Span(0, 0, 2), Span(1, 2, 5)], states, result)
    assert result.errors == {0: NON_FINITE}
    assert list(result.vectors) == [1]
    assert not pooler._sums  # nothing is kept of texts that are done


def test_activations_are_torch_s() -> None:
    x = np.random.default_rng(1).standard_normal((4, 9)).astype(np.float32) * 20
    modules = {
        "identity": torch.nn.Identity(), "sigmoid": torch.nn.Sigmoid(), "tanh": torch.nn.Tanh(),
        "softmax": torch.nn.Softmax(dim=1), "relu": torch.nn.ReLU(), "gelu": torch.nn.GELU(), "silu": torch.nn.SiLU(),
    }  # fmt: skip
    assert set(modules) == set(ACTIVATIONS)
    for name, module in modules.items():
        assert np.abs(activate(name, x) - module(torch.from_numpy(x)).numpy()).max() < 1e-5, name


def test_fewer_dimensions_are_of_length_one_again() -> None:
    x = np.random.default_rng(2).standard_normal((5, 12)).astype(np.float32)
    x[3] = 0.0
    cut = shortened(x, 4, True)
    assert cut.shape == (5, 4)
    assert np.abs(np.linalg.norm(cut, axis=1) - [1, 1, 1, 0, 1]).max() < 1e-6
    for rows in (1, 2, 5):
        assert (shortened(x[:rows], 4, True) == cut[:rows]).all()
    assert (shortened(x, 12, False) == x).all()


def test_dense_weights_that_do_not_fit(tmp_path: Path) -> None:
    spec = DenseSpec(tmp_path, WIDTH, 8)
    with pytest.raises(ModelNotFound, match=r"has no model.safetensors"):
        Pooler(PoolingSpec("embed", ("mean",), dense=(spec,)), WIDTH)
    from safetensors.torch import save_file

    save_file({"linear.weight": torch.zeros(8, WIDTH)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelNotFound, match=r"lacks the tensor linear.bias"):
        Pooler(PoolingSpec("embed", ("mean",), dense=(spec,)), WIDTH)
    save_file({"linear.weight": torch.zeros(9, WIDTH)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelNotFound, match=r"a wrong shape for the tensor linear.weight"):
        Pooler(PoolingSpec("embed", ("mean",), dense=(spec,)), WIDTH)
    save_file({"linear.weight": torch.zeros(9, WIDTH + 1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelNotFound, match=f"takes {WIDTH + 1} numbers, and is given {WIDTH}"):
        Pooler(PoolingSpec("embed", ("mean",), dense=(DenseSpec(tmp_path, WIDTH + 1, 9, bias=False),)), WIDTH)

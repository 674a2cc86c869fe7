"""Kernels are listed by running a computation without them: none is compiled or run, and none is missing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.forwards import Forwards
from support.layer_options import options
from support.tiny_configs import FAMILIES

from asyncengine.kernels.cpu import compiler_missing

if compiler_missing(torch.float32, torch.device("cpu")) is not None:
    pytest.skip("no compiler", allow_module_level=True)

from asyncengine.execution.layers.sharded import ShardedWeight
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.families import decoder_config_of
from asyncengine.execution.models.first_kernels import kernels_of
from asyncengine.kernels.cpu import activation, scaling
from asyncengine.kernels.cpu.compiling import Kernel, noting
from asyncengine.kernels.recording import KernelList

CPU = "asyncengine.kernels.cpu."


def test_kernels_are_noted_and_neither_compiled_nor_run() -> None:
    known, x = set(scaling.scale_columns.overloads), torch.ones(2, 4)
    both = torch.ones(2, 8, dtype=torch.bfloat16)
    with KernelList() as found:
        scaling.scale_each(x, torch.full((3,), 7.0))
        scaling.scale_each(x, torch.full((2,), 7.0))
        activation.gelu_and_mul(both)
    assert set(scaling.scale_columns.overloads) == known
    assert x.eq(1).all()
    # what is called by its address takes long
    assert found.names[0] == f"{CPU}activation:gate_by_gelu:void({'int64, ' * 5}uint16)"
    assert set(found.names[1:]) == {
        f"{CPU}activation:gate:({'int64, ' * 5}uint16, int64)",
        f"{CPU}scaling:scale_columns:({'int64, ' * 5}float32, int64)",
    }
    scaling.scale_each(x, torch.full((3,), 7.0))
    assert x[0].tolist() == [7.0, 7.0, 7.0, 1.0]


def test_products_of_torch_are_not_computed_and_whole_numbers_are_in_range() -> None:
    x = torch.full((3, 8), torch.nan)
    with KernelList(), torch.inference_mode():
        products = [x @ x.T, torch.addmm(torch.zeros(3), x, x.T), torch.bmm(x[None], x.T[None])]
        assert [tuple(each.shape) for each in products] == [(3, 3), (3, 3), (1, 3, 3)]
        assert torch.zeros(1).index_select(0, torch.empty(1000, dtype=torch.int64)).eq(0).all()


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "olmo2", "lfm2", "nemotron-h", "falcon-h1", "qwen3.5"])
def test_what_a_model_calls_is_listed(family: str) -> None:
    decoder = Decoder(decoder_config_of(FAMILIES[family](), 64), options(torch.bfloat16, bits=8), 64)
    listed = kernels_of(decoder, 4, torch.bfloat16, {}).needed
    for slot in decoder.slots().values():
        slot.load(torch.full(slot.shape, 0.01))
    decoder.recorded = None  # a record's replay calls no kernel from Python
    called: dict[str, None] = {}

    def note(kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
        called[kernel.name_for(arguments)] = None
        return kernel.run(arguments)

    forwards, token = Forwards(decoder), noting.set(note)
    try:
        forwards.step([1, 2, 3])
        forwards.step([3])
    finally:
        noting.reset(token)
    assert len(called) > 6
    assert [name for name in called if name not in listed and "team_loops" not in name] == []


def test_no_other_process_is_waited_for() -> None:
    """The kernels of a model in several processes are those of the whole one."""
    described, alone = decoder_config_of(FAMILIES["qwen3"](), 64), options(torch.bfloat16, bits=8)
    ranks: Any = SimpleNamespace(rank=0, size=2, exact=True)  # without anything that exchanges results
    decoder = Decoder(described, replace(alone, ranks=ranks), 64)
    assert any(isinstance(linear.weight, ShardedWeight) for linear in decoder.layers[0].linears())
    assert kernels_of(decoder, 4, torch.bfloat16, {}) == kernels_of(
        Decoder(described, alone, 64), 4, torch.bfloat16, {}
    )

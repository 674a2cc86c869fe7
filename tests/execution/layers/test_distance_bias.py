"""The bias by distance is transformers' of MPNet, near and far."""

from __future__ import annotations

import torch
import transformers
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from asyncengine.execution.layers.distance_bias import DistanceBias
from asyncengine.execution.layers.kernels import LayerKernels
from asyncengine.execution.layers.options import LayerOptions


def test_of_all_distances() -> None:
    theirs = MPNetEncoder(transformers.MPNetConfig(num_hidden_layers=0, num_attention_heads=3, hidden_size=12))
    bias = DistanceBias(LayerOptions(torch.float32, torch.device("cpu"), LayerKernels()), "bias", 32, 3)
    [(name, slot)] = bias.slots()
    weight = torch.randn(slot.shape, generator=torch.Generator().manual_seed(0))
    theirs.relative_attention_bias.weight.data.copy_(weight)
    slot.load(weight)
    assert name == "bias.weight"
    for count in (1, 2, 17, 300):
        assert torch.equal(bias(count), theirs.compute_position_bias(torch.empty(1, count, 12))[0])

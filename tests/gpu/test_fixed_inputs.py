"""Memory that CUDA graphs read, filled from the host of a real GPU."""

from __future__ import annotations

import pytest
import torch

from asyncengine.execution.device.transfer import CudaMemory, FixedInputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def test_what_is_sent_arrives_though_the_device_is_far_behind() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    inputs = FixedInputs(CudaMemory(device), 1000, kept=8)
    busy = torch.randn(4096, 4096, device=device)
    seen = []
    for turn in range(12):
        for _ in range(4):
            busy = (busy @ busy).clamp_(-1, 1)
        host = inputs.take()
        host.fill_(turn)
        inputs.send(900)
        seen.append(inputs.device.clone())
    for turn, values in enumerate(seen):
        assert not bool(values[:8].any())
        assert bool((values[8:908] == turn).all())

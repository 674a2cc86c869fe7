"""Linears in panels and without them, whatever the CPU that runs the tests is best at."""

from __future__ import annotations

import pytest
import torch

from asyncengine.kernels.cpu import compiler_missing
from asyncengine.models import fusions, output_layer


def use_panels(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models loaded from now on keep weights in panels wherever they fit, or nowhere."""

    def serve(*weights: torch.Tensor) -> bool:
        first = weights[0]
        if not wanted or compiler_missing(first.dtype, first.device) is not None:
            return False
        from asyncengine.kernels.cpu.packed import packing_fits

        return packing_fits(first.dtype, sum(weight.shape[0] for weight in weights), first.shape[1])

    for module in (fusions, output_layer):
        monkeypatch.setattr(module, "panels_serve", serve)


@pytest.fixture(params=[True, False], ids=["panels", "no panels"])
def panels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both, one after the other: are weights in panels?"""
    wanted = bool(request.param)
    if wanted:
        pytest.importorskip("numba")
    use_panels(wanted, monkeypatch)
    return wanted

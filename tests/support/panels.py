"""Linears in panels and without them, whatever the CPU that runs the tests is best at."""

from __future__ import annotations

import pytest
import torch

from asyncengine.kernels.cpu import compiler_missing


def use_panels(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models loaded from now on keep weights in panels wherever they fit, or nowhere."""
    if compiler_missing(torch.float32, torch.device("cpu")) is None:
        from asyncengine.kernels.cpu import packed

        monkeypatch.setattr(packed, "packing_pays", lambda dtype: wanted)


@pytest.fixture(params=[True, False], ids=["panels", "no panels"])
def panels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a test with weights in panels, and without."""
    wanted = bool(request.param)
    if wanted:
        pytest.importorskip("numba")
    use_panels(wanted, monkeypatch)
    return wanted

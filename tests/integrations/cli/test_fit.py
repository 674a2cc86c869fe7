"""`asyncengine fit`: what a model takes and whether it fits here, without loading it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from asyncengine.execution.device import memory
from asyncengine.integrations.cli.main import main

MIB = 2**20


def on(monkeypatch: pytest.MonkeyPatch, free: int, *gpus: int) -> None:
    """Makes this machine seem to have `free` bytes free, and a GPU with so many for each of `gpus`."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: bool(gpus))
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(gpus))
    monkeypatch.setattr(memory, "free_bytes", lambda device: free if device.type == "cpu" else gpus[device.index])
    # not what the process of these tests, in which others have run before, has come to hold
    resident = SimpleNamespace(rss=400 * MIB)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda process: resident)


def report(capsys: pytest.CaptureFixture[str], code: int, *flags: str) -> dict[str, Any]:
    assert main(["fit", "demo", "--json", *flags]) == code
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_the_demo_model_fits_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "demo"]) == 0
    shown = capsys.readouterr().out
    assert "demo (bfloat16)" in shown
    assert "4096 tokens of 3.00 KiB" in shown
    assert "It fits on c" in shown


def test_figures_add_up_and_flags_change_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, 6000 * MIB)
    plain = report(capsys, 0)
    assert plain["on"] == "cpu"
    assert (
        plain["total_bytes"]
        == plain["claim"]["cpu_bytes"]
        == plain["process_bytes"]
        + (plain["weight_bytes"] + plain["kv_tokens"] * plain["kv_bytes_per_token"] + plain["step_bytes"])
    )
    assert report(capsys, 0, "--kv-cache-memory", "30MiB")["kv_tokens"] == 30 * MIB // 3072
    assert report(capsys, 0, "--max-model-len", "1000")["kv_tokens"] == 1000
    assert report(capsys, 0, "--dtype", "float32")["weight_bytes"] == 2 * plain["weight_bytes"]
    assert report(capsys, 0, "--device", "cpu")["claim"]["device_bytes"] is None
    assert report(capsys, 0, "--pipeline-parallel", "2")["claim"]["device_bytes"] is None
    assert report(capsys, 0, "--tensor-parallel", "2", "--device", "cpu")["claim"]["copied_bytes"] == 0
    three = report(capsys, 0, "--pipeline-parallel", "3", "--stage-hosts", "10.0.0.2:7070,10.0.0.3:7070")
    assert three["machines"] == 3
    divided, each = plain["weight_bytes"] + plain["kv_tokens"] * plain["kv_bytes_per_token"], plain["step_bytes"]
    assert three["claim"]["cpu_bytes"] == -(-divided // 3) + each + three["process_bytes"]
    assert three["total_bytes"] == divided + each + 3 * three["process_bytes"]
    ranks = report(capsys, 0, "--tensor-parallel", "2")["claim"]
    model = plain["total_bytes"] - plain["process_bytes"]
    assert ranks["device_bytes"] == model, "what a step takes is counted once, and copied"
    assert ranks["copied_bytes"] == plain["step_bytes"]
    assert ranks["cpu_bytes"] - ranks["host_bytes"] == model + plain["step_bytes"]
    assert ranks["host_bytes"] == pytest.approx(2 * plain["process_bytes"], rel=0.05)


def test_what_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 6000 * MIB)
    found = report(capsys, 1, "--kv-tokens", "3000000")
    assert found["fits"] is False
    assert (
        "1 with too little free host memory; a claim of 5.86 GiB of host memory would have fitted" in found["why_not"]
    )
    assert main(["fit", "demo", "--kv-tokens", "3000000"]) == 1
    assert "It does not fit here: demo fits on none of 1 nodes" in capsys.readouterr().out


def test_a_device_is_taken_before_the_processors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, 2**34, 10 * MIB, 0, 2**33)
    assert report(capsys, 0)["on"] == "cuda:2"
    assert report(capsys, 0, "--tensor-parallel", "2")["on"] == "cpu", "each rank takes a device"
    on(monkeypatch, 2**34, 2**33, 0, 2**33)
    assert report(capsys, 0, "--tensor-parallel", "2")["on"] == "cuda:0 and cuda:2"
    on(monkeypatch, 2**34, 10 * MIB)
    assert main(["fit", "demo"]) == 0
    assert 'It fits on cpu: pass device="cpu".' in capsys.readouterr().out

"""Loading takes little more memory than the model then has."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from execution.models.test_weights import taken_by
from safetensors.torch import save_file
from support.quantized_checkpoints import KINDS
from support.tiny_models import FAMILIES

from asyncengine.config import EngineConfig
from asyncengine.execution.models.loading import load_model


def resident_bytes(file: Path) -> int:
    """Bytes of a mapped file that are resident in this process."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(f" {file}")
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads and resets what a process has used at most")
@pytest.mark.parametrize("kind", ["awq", "w8a8"])
def test_no_matrix_is_held_twice_while_loading(kind: str, tmp_path: Path) -> None:
    """The most memory in use is that of the weights as they are kept, a tenth, and what is being unpacked. Of the file,
    which is found through a link as in a hub's cache, nearly nothing stays."""
    pytest.importorskip("numba")
    config = FAMILIES["qwen3"]()
    config.update({"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 4096})
    config.save_pretrained(tmp_path)
    quiet = EngineConfig(show_progress=False, dtype="bfloat16")
    made: Any = load_model(str(tmp_path), quiet.replace(load_format="dummy")).model
    tensors = {}
    for name, slot in made.slots().items():
        if name.endswith("_proj.weight"):
            parts = KINDS[kind].write(torch.randn(slot.shape) * 0.02).tensors
            tensors.update({f"{name.removesuffix('weight')}{part}": each for part, each in parts.items()})
        else:
            tensors[name] = torch.randn(slot.shape).bfloat16()
    save_file(tensors, str(tmp_path / "blob"), {"format": "pt"})
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": dict(KINDS[kind].config)}))
    del tensors, made
    kept = load_model(str(tmp_path), quiet)  # kernels are compiled, and libraries have allocated
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back: it would be taken again unseen
    model, taken = taken_by(lambda: load_model(str(tmp_path), quiet))
    assert kept.weights_bytes == model.weights_bytes
    assert taken < 1.1 * model.weights_bytes / 1024 + 24 * 1024, (
        f"{taken} KiB for {model.weights_bytes // 1024} KiB of weights"
    )
    blob = tmp_path / "blob"  # its pages are the system's alone again: any number of processes read the same
    assert resident_bytes(blob) < blob.stat().st_size / 20

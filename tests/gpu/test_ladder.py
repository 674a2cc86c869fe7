"""The ladder of speed: it runs from end to end, and the sums behind its figures are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu.ladder.__main__ import NO_GPU, main
from gpu.ladder.rungs import ENGINES, Ladder
from gpu.ladder.session import Session
from gpu.ladder.shapes import SHAPES, TINY, Shape
from support.fake_gpu import fake_gpu
from support.long import LONG

from asyncengine.execution.models.fallback.model import count_elements

ALIKE = (
    "prompts", "chats", "documents", "linears", "large", "large_prompts", "large_kernels", "four_bits",
    "hybrid_prompts",
)  # fmt: skip
SMALL, LARGE = SHAPES["small"], SHAPES["large"]
FEW = Shape("few", "Qwen3Config", {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True,
})  # fmt: skip


def test_it_runs_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU's stand-ins run it, with tiny shapes and short loads; sections that do what another one does with a larger
    shape are left to the long form."""
    skipped = ("ranks",) if LONG else ("ranks", *ALIKE)
    calls = fake_gpu(monkeypatch)
    monkeypatch.setattr(Session, "left", 600.0)  # of a busy machine, too
    monkeypatch.setattr(Ladder, "_tokens", lambda self, count: max(2, count // 1024))
    file = tmp_path / "ladder.json"
    code = main(["--quick", "--seed", "4", "--skip", *skipped, "--out", str(file)], on_cpu=True)
    said = capsys.readouterr().out
    assert code == 0, said
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["complete"]
    sections = [
        section.name for section in Ladder(Session(tmp_path, "cpu", "torch")).sections() if section.name not in skipped
    ]
    assert list(report["facts"]["section_seconds"]) == sections
    absent = [figure["name"] for figure in report["figures"] if figure["value"] is None]
    assert all("kernels a step" in name for name in absent), "nothing launches a kernel here"
    assert {figure["section"] for figure in report["figures"]} == set(sections)
    assert all(f"{figure['name']}: " in said for figure in report["figures"])
    assert any("long step: " in line for line in report["lines"])
    loaded = [figure["note"] for figure in report["figures"] if figure["name"].endswith("loading")]
    assert len(loaded) >= (len(ENGINES) if LONG else 8)
    assert all("attention: flashinfer" in note for note in loaded)
    assert calls["graphs"] > 20


def test_without_a_gpu_it_says_so_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == NO_GPU
    assert capsys.readouterr().out.count("\n") == 1
    # the command as the pages have it, without what pytest puts in front of the path
    command = [sys.executable, "-m", "tests.gpu.ladder", "--list"]
    listed = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True)
    assert {"hybrid", "hybrid_prompts", "constrained", "gpt_oss", "host"} <= {*listed.stdout.split()}
    assert main(["--only", "nothing"], on_cpu=True) == NO_GPU


@pytest.mark.parametrize("shape", [FEW, SMALL, LARGE, TINY["small"]])
def test_weights_of_a_shape(shape: Shape) -> None:
    elements = count_elements(shape.config, torch.bfloat16)
    unread = 0 if shape.fields["tie_word_embeddings"] else shape.fields["vocab_size"] * shape.fields["hidden_size"]
    assert shape.weights_read == 2 * (elements - unread)


def test_bytes_read() -> None:
    assert (SMALL.kv_bytes, LARGE.kv_bytes) == (112 * 1024, 144 * 1024)
    by_hand = sum(prompt + made for prompt, output in [(7, 4), (1, 1)] for made in range(1, output))
    assert FEW.bytes_read(9, [(7, 4), (1, 1)]) == 9 * FEW.weights_read + by_hand * FEW.kv_bytes

"""`asyncengine perplexity` against transformers, and what it refuses."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.data import cases_of

from asyncengine.demo import MODEL_PATH
from asyncengine.integrations.cli.main import main
from asyncengine.integrations.cli.perplexity import chunked

ROWS: dict[str, Any] = cases_of(__file__)

SMALL = ("--num-threads", "1", "--kv-cache-memory", "8MiB", "--dtype", "float32")
TEXT = "The capital of Norway is Oslo. Count from 3 to 9: 3, 4, 5, 6, 7, 8, 9. Ida Lund lives in Velmora. " * 3


@pytest.mark.parametrize("front", [[], [7]])
@pytest.mark.parametrize(("context", "stride"), [(8, 8), (8, 3), (8, 1), (2, 1), (50, 20)])
def test_every_token_is_scored_once_with_what_is_before_it(front: list[int], context: int, stride: int) -> None:
    """Only a chunk's first token has nothing before it; where chunks overlap, one before has scored it."""
    stride = min(stride, context - len(front))
    ids = list(range(100, 121))
    scored: list[int] = []
    for prompt, start in chunked(ids, context, stride, front):
        assert prompt[: len(front)] == front
        assert 0 < start < len(prompt) <= context
        scored += prompt[start:]
    disjoint = set() if front else {*ids[::context]} if stride == context else {ids[0]}
    assert scored == [each for each in ids if each not in disjoint]


def test_the_figure_is_that_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file := tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    sizes = "--context", "24", "--stride", "10"
    assert main(["perplexity", "demo", "--text", str(file), "--json", *sizes, *SMALL]) == 0
    printed, progress = capsys.readouterr()
    found = json.loads(printed)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL_PATH)
    front, ids = tokenizer.encode(""), tokenizer.encode(TEXT, add_special_tokens=False)
    losses: list[float] = []
    for prompt, start in chunked(ids, 24, 10, front):
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        losses += [-logprobs[at - 1, prompt[at]].item() for at in range(start, len(prompt))]
    assert found["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert (found["tokens"], found["context"], found["stride"]) == (len(losses), 24, 10)
    spread = torch.tensor(losses, dtype=torch.float64).std().item()
    assert found["standard_error"] == pytest.approx(found["perplexity"] * spread / len(losses) ** 0.5, rel=1e-3)
    assert f"chunk {found['chunks']} of {found['chunks']}: {found['perplexity']:.4f}" in progress


@pytest.mark.parametrize(("text", "flags", "message"), ROWS["bad_input_is_named"])
def test_bad_input_is_named(
    text: str | None, flags: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    source = str(tmp_path / "absent.txt") if text is None else "-"
    assert main(["perplexity", "demo", "--text", source, *flags, *SMALL]) == 2
    assert message in capsys.readouterr().err

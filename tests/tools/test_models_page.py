"""docs/models.md says what the code does: `python -m tools.models_page` writes it anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from support.drive import greedy_reference, prompts

from asyncengine import Engine, SamplingParams
from asyncengine.execution.models.families import MULTIMODAL, NATIVE
from tools import models_page
from tools.models_page import OWN, TRANSFORMERS, families, own_row, page, read_page, read_release

SAMPLE = ("gemma3_text", "granitemoehybrid", "llama4", "qwen2_5_vl")
"""Types that are asked again here; the page's own command asks all."""


def test_it_has_every_family_and_is_as_written() -> None:
    rows, text = read_page(), models_page.PAGE.read_text(encoding="utf-8")
    if transformers.__version__ != read_release():
        pytest.skip(f"the page is of another release than {transformers.__version__}, which has families of its own")
    assert list(rows) == families()
    assert text == page(list(rows.values()), transformers.__version__)


def test_files_are_those_of_the_registry() -> None:
    rows = read_page()
    for family, row in rows.items():
        known = family in NATIVE or family in MULTIMODAL
        assert known or row.served != OWN, family
        if row.served == OWN:
            assert family in MULTIMODAL or row.note == f"`families/{NATIVE[family]}`"
            assert row.note.startswith("its text") == (family in MULTIMODAL)
        assert bool(row.note) == (row.served != TRANSFORMERS)
    missing = [family for family in (*NATIVE, *MULTIMODAL) if rows[family].served == TRANSFORMERS]
    assert not missing, f"{missing} have a file now: python -m tools.models_page --own"


@pytest.mark.parametrize("family", SAMPLE)
def test_a_file_serves_what_the_page_says(family: str) -> None:
    assert own_row(family) == read_page()[family]


@pytest.mark.parametrize("family", ["longcat_flash"])
def test_a_tiny_model_answers_as_transformers_does(family: str, tmp_path: Path) -> None:
    """Token for token, in chunks, together and preempted: what the page says of those that were tried."""
    assert any(models_page.save_tiny(family, tmp_path, change) for change in models_page.CHANGES)
    module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    texts = prompts([5, 17, 30, 9], 160)
    rights = [greedy_reference(module, text, 12) for text in texts]
    settings = {"max_num_batched_tokens": 7, "preempt_every": 5, "page_size": 4, "kv_cache_memory": "8MiB"}
    with Engine.from_pretrained(tmp_path, dtype="float32", show_progress=False, **settings) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        for _ in range(2):  # the second time from cached pages
            assert [[*each.token_ids] for each in engine.generate_many(texts, params)] == rights
        assert engine.stats().preemptions

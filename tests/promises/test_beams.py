"""Beam search finds transformers' own beams, in company too, and leaves nothing in the cache that others would miss."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.tiny_models import VOCAB, make_checkpoint

from asyncengine import AsyncEngine, InvalidParameter, SamplingParams, beam_search

ENDS = [2, *range(3, VOCAB, 9)]
"""So many tokens end an output that some beams do."""
CASES = [(3, 1.0), (4, 0.0), (5, 2.0), (2, -1.0)]
NEW = 8


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3.5"])
async def test_beams_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    make_checkpoint(family, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ended = 0
    async with await AsyncEngine.from_pretrained(
        tmp_path, dtype="float32", num_threads=1, show_progress=False, max_num_seqs=8, max_top_logprobs=100
    ) as engine:
        for seed in range(3):
            prompt = torch.randint(3, VOCAB, (1, 20), generator=torch.Generator().manual_seed(seed))
            calls = [
                beam_search(engine, prompt[0].tolist(), width=width, max_tokens=NEW, length_penalty=power)
                for width, power in CASES
            ]
            for (width, power), found in zip(CASES, await asyncio.gather(*calls), strict=True):
                wanted = theirs.generate(
                    prompt, num_beams=width, num_return_sequences=width, max_new_tokens=NEW, length_penalty=power,
                    early_stopping="never", do_sample=False, return_dict_in_generate=True, output_scores=True,
                    pad_token_id=0,
                )  # fmt: skip
                for beam, tokens in zip(found, wanted.sequences[:, 20:].tolist(), strict=True):
                    assert list(beam.token_ids) == tokens[: len(beam.token_ids)]
                scores = [beam.score for beam in found]
                assert scores == pytest.approx(wanted.sequences_scores.tolist(), abs=2e-4, rel=1e-5)
                ended += sum(beam.ended for beam in found)
        await engine.generate([5], SamplingParams(max_tokens=1))  # after the sessions end; leaves no page
        tree = engine.core.loop.scheduler.kv.tree
        assert tree.num_passed == tree.num_pages >= 3
    assert ended > 10


async def test_beams_have_texts_and_limits() -> None:
    async with await AsyncEngine.from_pretrained("demo", show_progress=False) as engine:
        beams = await beam_search(engine, "The capital of Norway is", width=2, max_tokens=4)
        assert all(beam.text for beam in beams)
        assert beams[0].score >= beams[1].score
        for field, wrong in (("width", 26), ("max_tokens", 0), ("length_penalty", "long")):
            with pytest.raises(InvalidParameter, match=rf"^{field}: "):
                await beam_search(engine, "Once", **{field: wrong})  # type: ignore[arg-type]

"""Steps that may be computed on the event loop's thread: short ones of a small model, which wait for nobody."""

from __future__ import annotations

import threading

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.demo import MODEL_PATH
from asyncengine.grammar import Grammar
from asyncengine.kernels.cpu import compiler_missing
from asyncengine.step import Batch


async def test_where_steps_of_the_bundled_model_are_computed():
    import torch

    compiled = compiler_missing(torch.float32, torch.device("cpu")) is None
    settings = {"hosted": True, "max_num_batched_tokens": 256, "speculation": "off"}
    async with await AsyncEngine.from_pretrained(MODEL_PATH, **settings) as engine:
        executor = engine.core.loop.runner.executor  # type: ignore[attr-defined]
        launch = executor.launch
        where: dict[str, list[Batch]] = {}

        def noted(batch: Batch):
            where.setdefault(threading.current_thread().name, []).append(batch)
            return launch(batch)

        executor.launch = noted
        await engine.generate("word " * 200, SamplingParams(max_tokens=4, ignore_eos=True))
        await engine.generate("Yes or no?", SamplingParams(max_tokens=4, grammar=Grammar.choice(["yes", "no"])))
    own, device = where.pop("asyncengine-loop", []), where.pop("asyncengine-device")
    assert not where
    assert len(own) == (3 if compiled else 0), "what decodes the first answer"
    assert all(batch.num_tokens == 1 and batch.rows[0].grammar is None for batch in own)
    assert max(batch.num_tokens for batch in device) > 64
    assert any(row.grammar is not None for batch in device for row in batch.rows), "masks are another thread's"

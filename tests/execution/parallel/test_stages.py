"""Families whose layers are in several stages, which are threads here: the logits of one process, to the bit.

`ASYNCENGINE_LONG=2` tries every family.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.drive import prompts
from support.forwards import Forwards
from support.long import LONG
from support.panels import use_panels
from support.rank_threads import gathers, gathers_apart, in_ranks
from support.tiny_models import FAMILIES, VOCAB

pytest.importorskip("numba")

from asyncengine.config import EngineConfig
from asyncengine.execution.device import shared_gather
from asyncengine.execution.device.shared_gather import SharedGather
from asyncengine.execution.layers.options import cut_layers
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.models.progress import LoadProgress
from asyncengine.execution.runner.stages import StageRelay

pytestmark = pytest.mark.skipif(shared_gather.missing() is not None, reason=str(shared_gather.missing()))
SOME = [
    ("qwen3", "bfloat16", "int8"), ("gemma4", "float32", None), ("nemotron-h", "float32", None),
    ("opt-350m", "float32", None), ("qwen3.5moe", "bfloat16", "int4"), ("gpt2", "bfloat16", None),
    ("deepseek-v3", "bfloat16", None),
]  # fmt: skip
EVERY = [(family, "bfloat16", None) for family in FAMILIES if family != "hunyuanmoe"]  # transformers' modules
(TOKENS,) = prompts([24], VOCAB)
CHUNKS = [TOKENS[:9], TOKENS[9:20], *([token] for token in TOKENS[20:])]
MOST = 32


def wanted(chunk: list[int]) -> torch.Tensor:
    """Rows whose logits are wanted: none of the first chunk, which is not the prompt's last; the last of others."""
    return torch.tensor([] if chunk is CHUNKS[0] else [len(chunk) - 1], dtype=torch.int64)


def through_stages(loaded: Any, gather: SharedGather) -> list[torch.Tensor]:
    """The logits of each chunk in the first stage. As many passes as stages are on their way at a time."""
    decoder, logits, ends = loaded.model, list[torch.Tensor](), list[Any]()
    memory = gather.pools(2**22)
    relay = StageRelay(gather, memory, MOST, *decoder.carried, loaded.dtype)
    forwards = Forwards(decoder, shared=memory)

    def end(rows: torch.Tensor, context: Any) -> None:
        hidden = decoder.projected(relay.collect(len(rows), decoder.config.width), context, rows)
        logits.append(decoder.logits(hidden, context).clone())

    for chunk in CHUNKS:
        context, ids, rows = forwards.context([len(chunk)]), torch.tensor(chunk), wanted(chunk)
        own = None if len(rows) == len(ids) else rows
        h, beside = decoder.embedded(ids, context) if gather.stage == 0 else relay.take(len(ids))
        relay.hand_on(decoder.run_layers(h, beside, context, own), beside if gather.stage == 0 else None)
        ends.append((rows, context))
        if gather.stage == 0 and len(ends) == gather.stages:
            end(*ends.pop(0))
    while gather.stage == 0 and ends:
        end(*ends.pop(0))
    return logits


APART = [("nemotron-h", "float32", None), ("opt-350m", "float32", None)]
"""Recurrent states; a stream and its norm."""


@pytest.mark.parametrize(
    ("family", "dtype", "quantization", "ranks", "apart"),
    [(*each, ranks, False) for each in (EVERY if LONG else SOME) for ranks in (1, 2)]
    + [(*each, ranks, True) for each, ranks in zip(APART, (1, 2), strict=True)],
)
def test_logits_are_those_of_one_process(
    family: str, dtype: str, quantization: Any, ranks: int, apart: bool, checkpoint: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A prompt in two chunks, then tokens one by one. Each stage has so many ranks, and a machine where they are
    apart."""
    use_panels(True, monkeypatch)
    settings = {"num_threads": 1, "show_progress": False, "dtype": dtype, "quantization": quantization}
    path, alone = str(checkpoint(family)), EngineConfig(**settings)
    one = load_model(path, alone, LoadProgress(False))
    stages = min(4 - ranks, len(one.model.layers))
    size = stages * ranks
    config = EngineConfig(pipeline_parallel=stages, tensor_parallel=ranks, **settings)
    shares = gathers_apart(ranks, stages) if apart else gathers(size, stages)
    parts = [load_model(path, config, LoadProgress(False), ranks=own) for own in shares]
    made = in_ranks(size, lambda own: through_stages(parts[own.stage * ranks + own.rank], own), shares)
    found = made[0]
    forwards = Forwards(one.model)
    expected = [forwards.step(chunk, rows=wanted(chunk).tolist()) for chunk in CHUNKS]
    if ranks == 1:
        assert one.weights_bytes <= sum(part.weights_bytes for part in parts) < 1.05 * one.weights_bytes
    assert parts[0].unsteady == one.unsteady
    if one.model.config.norm.kind == "rms" and ranks == 1:  # else layers are not recorded
        assert parts[0].fused == one.fused
    for logits, own in zip(found, expected, strict=True):
        assert torch.equal(logits, own)


@pytest.mark.parametrize(
    ("sizes", "outside", "size", "cuts"),
    [
        ([1] * 8, 0, 2, (0, 4, 8)),
        ([1] * 8, 2, 2, (0, 3, 8)),
        ([1] * 4, 100, 3, (0, 1, 2, 4)),
        ([9, 1, 1, 1], 0, 2, (0, 1, 4)),
        ([1, 1, 1, 9], 0, 3, (0, 2, 3, 4)),
        ([1, 1], 0, 3, None),
    ],
)
def test_cuts_are_even_and_leave_a_layer_for_each(sizes: list[int], outside: int, size: int, cuts: Any) -> None:
    assert cut_layers(sizes, outside, size) == cuts


def test_vectors_beside_the_rows_reach_each_machine() -> None:
    """Three stages on a machine each: as many passes are on their way, and what a pass has comes in its order."""
    count, passes, shape = 5, 7, (2, 3)

    def work(gather: SharedGather) -> list[torch.Tensor]:
        relay = StageRelay(gather, gather.pools(2**16), 8, 4, shape, torch.bfloat16)
        made: list[torch.Tensor] = []
        for number in range(passes):
            if gather.stage:
                rows, vectors = relay.take(count)
                assert vectors is not None
                assert torch.equal(vectors, torch.full((count, *shape), float(number), dtype=torch.bfloat16))
                relay.hand_on(rows * 2)
            else:
                vectors = torch.full((count, *shape), float(number), dtype=torch.bfloat16)
                relay.hand_on(torch.full((count, 4), number + 1.0, dtype=torch.bfloat16), vectors)
            if gather.stage == 0 and number >= 2:
                made.append(relay.collect(count, 4).clone())
        return made

    made, *_ = in_ranks(3, work, gathers_apart(1, 3))
    assert [rows.unique().tolist() for rows in made] == [[4.0 * (number + 1)] for number in range(passes - 2)]

"""Families over several ranks, which are threads here: the logits of one process, to the bit, in any form of weights.

`ASYNCENGINE_LONG=2` tries every family in every form (minutes).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.data import cases_of
from support.drive import prompts
from support.forwards import Forwards
from support.long import LONG
from support.panels import use_panels
from support.rank_threads import gathers, in_ranks
from support.tiny_models import FAMILIES, VOCAB

pytest.importorskip("numba")

from asyncengine.config import EngineConfig
from asyncengine.execution.device import shared_gather
from asyncengine.execution.layers.sharded import LocalWeight, ShardedWeight
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.models.progress import LoadProgress

CASES = cases_of(__file__)

pytestmark = pytest.mark.skipif(shared_gather.missing() is not None, reason=str(shared_gather.missing()))
FORMS: dict[str, dict[str, Any]] = CASES["forms"]
SOME = CASES["some"]
WHOLE = {"hunyuanmoe": FORMS}
"""Forms in which a family cannot be split: it runs through transformers' modules."""
EVERY = [(family, form, 2) for family in FAMILIES for form in FORMS if form not in WHOLE.get(family, ())]
(TOKENS,) = prompts([24], VOCAB)


@pytest.mark.parametrize(("family", "form", "size"), EVERY if LONG else SOME)
def test_logits_are_those_of_one_process(
    family: str, form: str, size: int, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in two chunks, then tokens one by one."""
    use_panels(True, monkeypatch)
    path, config = str(checkpoint(family)), EngineConfig(num_threads=1, show_progress=False, **FORMS[form])

    def load(ranks: Any = None) -> Any:
        return load_model(path, config, LoadProgress(False), ranks=ranks)

    def logits(loaded: Any) -> torch.Tensor:
        forwards = Forwards(loaded.model)
        chunks = [TOKENS[:9], TOKENS[9:20], *([token] for token in TOKENS[20:])]
        return torch.cat([forwards.step(chunk) for chunk in chunks])

    alone, shares = load(), gathers(size)
    parts = [load(ranks) for ranks in shares]
    found = in_ranks(size, lambda ranks: logits(parts[ranks.rank]), shares)
    weights = [linear.weight for layer in parts[0].model.layers for linear in layer.linears()]
    assert any(isinstance(weight, (LocalWeight, ShardedWeight)) for weight in weights)
    assert [each.divided for each in parts[0].layers] == [each.num_kv_heads % size == 0 for each in alone.layers]
    assert [each.divided for each in parts[0].states] == [each.units % size == 0 for each in alone.states]
    for own, whole in zip(parts[0].states, alone.states, strict=True):
        assert own.nbytes(alone.dtype) * (size if own.divided else 1) == whole.nbytes(alone.dtype)
    assert max(part.weights_bytes for part in parts) < alone.weights_bytes
    if alone.unsteady is None:  # else the bits follow the shapes of torch's products
        assert torch.equal(found[0], logits(alone))
    else:
        assert torch.allclose(found[0], logits(alone), atol=1e-3, rtol=1e-3)

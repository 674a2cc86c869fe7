"""Forwards of a model on its own: no runner, no sampling, a fresh attention backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from asyncengine.config import EngineConfig
from asyncengine.execution.attention.base import StepView
from asyncengine.execution.attention.factory import make_backend
from asyncengine.execution.device.shared_gather import SharedPools
from asyncengine.execution.layers.states import StatePools, StateSegments, StateStep
from asyncengine.execution.layers.step import CausalLM, StepContext

PAGE = 4


class Forwards:
    """Rows of at most `most` tokens, each with pages of its own."""

    def __init__(
        self, model: CausalLM, rows: int = 1, most: int = 100, backend: str = "auto", shared: SharedPools | None = None
    ) -> None:
        """`shared`: memory of pages and states that other processes have as well."""
        self.model = model
        self.each = -(-most // PAGE)
        config = EngineConfig(page_size=PAGE, attention_backend=backend)
        pages = 1 + rows * self.each
        self.backend = make_backend(config, model.specs, pages, model.dtype, model.device, most, shared=shared)
        self.lengths = np.zeros(rows, dtype=np.int64)
        kept = model.states, 1 + rows, model.dtype, model.device
        self.pools = StatePools(*kept, shared=shared) if model.states else None

    def context(self, counts: Sequence[int], shift: int = 0, **fields: Any) -> StepContext:
        """The next counts[r] tokens of row r; `shift` is added to positions, but not to where attention finds them."""
        rows = len(counts)
        starts, own = self.lengths[:rows].copy(), np.array(counts, dtype=np.int64)
        tables = 1 + np.arange(rows * self.each, dtype=np.int32).reshape(rows, self.each)
        places = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, own, strict=True)])
        row_of = np.repeat(np.arange(rows), own)
        slots = tables[row_of, places // PAGE].astype(np.int64) * PAGE + places % PAGE
        ends = np.concatenate(([0], np.cumsum(own))).astype(np.int64)
        self.backend.plan(StepView(starts, own, ends, tables, torch.from_numpy(slots)))
        self.lengths[:rows] += own
        if self.pools is not None:  # row r's state lies in slot r + 1
            slots = np.arange(1, rows + 1, dtype=np.int64)
            sources = np.where(starts == 0, 0, slots)
            segments = StateSegments(np.arange(rows + 1, dtype=np.int64), ends[:-1], ends[1:], sources, slots)
            fields["states"] = StateStep(self.pools, segments)
        return StepContext(torch.from_numpy(places + shift), self.backend, **fields)

    def step(
        self, ids: Sequence[int], counts: Sequence[int] | None = None, rows: Sequence[int] | None = None, **fields: Any
    ) -> torch.Tensor:
        """Logits [N, vocab] of `rows` (None: all) of the tokens `ids`."""
        context = self.context(counts or [len(ids)], **fields)
        wanted = range(len(ids)) if rows is None else rows
        with torch.inference_mode():
            return self.model.forward(
                torch.tensor(list(ids)), context, torch.tensor(list(wanted), dtype=torch.int64)
            ).clone()


def logits_of(model: CausalLM, ids: Sequence[int], **fields: Any) -> torch.Tensor:
    """Logits of one sequence from its beginning."""
    return Forwards(model, most=max(len(ids), 1)).step(ids, **fields)


def relative_error(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Root mean square of the difference over that of what is expected."""
    return float((expected.double() - found.double()).norm() / expected.double().norm())


class Recording:
    """A model whose logits are kept, float32."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.logits: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, ids: torch.Tensor, step: StepContext, rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.forward(ids, step, rows)
        self.logits.append(logits.float().clone())
        return logits


@torch.inference_mode()
def transformers_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """The logits of transformers' own model for one sequence, float32 [tokens, vocabulary]."""
    model.set_attn_implementation("eager")
    found: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
    return found

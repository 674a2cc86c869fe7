"""Short steps through all layers in one call: the kernels that the layers called, recorded once and replayed.

Calling kernels one by one from Python is a tenth of a decoding step of one token. The layers are written once
(`models.decoder`); the first step of a number of tokens runs them under a `kernels.recording.Recorder`, and further
ones replay what that noted: the same kernels on the same kind of memory, so the same bits. A model in whose layers
torch computes between kernels goes on layer by layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, ref

import torch

from asyncengine.execution.layers.rotary import Angles
from asyncengine.execution.layers.step import NO_IMAGES, AdapterRecords, StepContext, Traces
from asyncengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from asyncengine.kernels.api import recording

logger = logging.getLogger("asyncengine")

MOST_TOKENS = 64
"""Tokens of a step up to which the time of calls shows."""
_ARENA = 2**22
"""Bytes of the first arena: results of short steps of small models."""
_SEGMENTS, _ADAPTERS = 6, 3

Run = Callable[..., torch.Tensor]
"""(embedded tokens [T, width], step, angles of each rotary embedding, vectors of `LayerInputs` if there are any) ->
what the output layer reads [T, width]."""


class RecordedLayers:
    """The layers of one model. Used by one thread at a time."""

    def __init__(self, run: Run, keeps_states: bool, paths: tuple[str, ...], ends: bool = True) -> None:
        """`run`: all layers. `paths`: of their products, as adapters name them. `ends`: the model's last layer is among
        them, of whose results not all rows may be wanted."""
        # Weakly: a model that refers to itself would keep its weights after `close`, until garbage is collected.
        self._method = WeakMethod(run)
        self._keeps_states, self._paths, self._ends = keeps_states, paths, ends
        self._arena: recording.Arena | None = None
        self.records: dict[tuple[Any, ...], tuple[recording.Record, torch.Tensor]] = {}
        """Records and their results, by the number of tokens, whether rows have adapters, and which angles scale
        queries."""
        self._owners: tuple[Callable[[], Any], ...] = ()
        """References to what the records' addresses belong to."""
        self.obstacle: str | None = None
        """An operation that computes between kernels, for which nothing is recorded; None: none is known."""

    def __call__(
        self, h: torch.Tensor, step: StepContext, angles: Sequence[Angles], vectors: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Run the layers of embedded tokens h [T, width]: what the output layer reads; None: no record can."""
        tokens = h.shape[0]
        if self.obstacle is not None or not 0 < tokens <= MOST_TOKENS or not getattr(step.backend, "steady", False):
            return None
        if self._keeps_states and step.states is None:
            return None
        if step.routes is not None or step.traces is not None:  # what they take is of this step alone
            return None
        adapters = None if step.adapters is None else step.adapters.records(self._paths)
        if step.adapters is not None and adapters is None:
            return None
        owners = (step.backend, None if step.states is None else step.states.pools)
        if not self._owners or any(known() is not own for known, own in zip(self._owners, owners, strict=True)):
            self.records.clear()  # they are of other memory
            self._owners = tuple((lambda: None) if own is None else ref(own) for own in owners)
        inputs = [h, *(table for rotary in angles for table in (rotary.cos, rotary.sin))]
        inputs += [each for each in (vectors, *(rotary.query_scale for rotary in angles)) if each is not None]
        values = _values(inputs, step, adapters)
        key = tokens, adapters is not None, tuple(own.query_scale is not None for own in angles)
        known = self.records.get(key)
        if known is None:
            with self._recorder(inputs) as recorder:
                more = () if vectors is None else (vectors,)
                out = self._run(h, self._with_symbols(step, values, adapters), angles, *more)
            return self._keep(key, recorder, out)
        record, out = known
        record.replay(values)
        return out.clone()

    @property
    def _run(self) -> Run:
        """All layers, of a model that is there while it is called."""
        run = self._method()
        assert run is not None
        return run

    def run(
        self, h: torch.Tensor, step: StepContext, angles: Sequence[Angles], vectors: torch.Tensor | None,
        rows: torch.Tensor | None, kept: list[torch.Tensor] | Traces | None,
    ) -> torch.Tensor:  # fmt: skip
        """Run a decoder's layers (`Decoder.run_layers`) by a record, or one by one where no record gives the same."""
        x = None
        # with adapters, the last feed-forward part has its rows' own
        if kept is None and not (step.images or NO_IMAGES).deep and (rows is None or step.adapters is None):
            x = self(h, step, angles, vectors)
        if x is None:
            return self._run(h, step, angles, vectors, rows, kept)
        return x.index_select(0, rows) if rows is not None and self._ends else x

    def _recorder(self, inputs: Sequence[torch.Tensor]) -> recording.Recorder:
        from asyncengine.kernels.api import recording

        if self._arena is None:
            self._arena = recording.Arena(_ARENA)
        return recording.Recorder(self._arena, list(enumerate(inputs, 1)))

    def _keep(self, key: tuple[Any, ...], recorder: recording.Recorder, out: torch.Tensor) -> torch.Tensor:
        """Keep what was recorded, if a replay would compute all of it, and give the result outside of the arena."""
        from asyncengine.kernels.api import recording

        assert self._arena is not None
        if recorder.obstacle is not None:
            self.obstacle = recorder.obstacle
            logger.info("layers are called one by one, as %s is computed between their kernels", self.obstacle)
        elif recorder.full:
            self._arena = recording.Arena(4 * self._arena.size)
            self.records.clear()
        else:
            self.records[key] = recorder.record(), self._arena.alias(out)
        return out.clone()

    def _with_symbols(self, step: StepContext, values: list[int], adapters: AdapterRecords | None) -> StepContext:
        """The step with symbols for what its states and adapters are."""
        from asyncengine.kernels.api import SegmentAddresses, recording

        symbols = [recording.Symbol.at(index, value) for index, value in enumerate(values)]
        if step.states is not None:
            made: Any = SegmentAddresses(*symbols[-_SEGMENTS - _ADAPTERS : -_ADAPTERS])
            step = replace(step, states=replace(step.states, segments=made))
        if adapters is None:
            return step
        return replace(step, adapters=_RecordedAdapters(self._paths, AdapterRecords(*symbols[-_ADAPTERS:])))


class _RecordedAdapters:
    """`RowAdapters` whose factors are found in a table when a step is replayed."""

    def __init__(self, paths: tuple[str, ...], records: AdapterRecords) -> None:
        self._indices = {path: index for index, path in enumerate(paths)}
        self._records = records

    def changes(self, path: str) -> bool:
        return True

    def add(self, path: str, x: torch.Tensor, y: torch.Tensor) -> None:
        from asyncengine.kernels.api import lora

        lora.add_table_deltas(x, y, self._indices[path], self._records)

    def records(self, paths: tuple[str, ...]) -> AdapterRecords | None:
        return None


def _values(inputs: Sequence[torch.Tensor], step: StepContext, adapters: AdapterRecords | None) -> list[int]:
    """The step's values in order: the team, addresses of its inputs, segments, adapters."""
    from asyncengine.kernels.api import SegmentAddresses, team

    values = [team.use_team(), *(own.data_ptr() for own in inputs)]
    values += [0] * _SEGMENTS if step.states is None else SegmentAddresses.of(step.states.segments)
    return [*values, *(adapters or (0,) * _ADAPTERS)]


# The steps that a runner runs before anybody asks it, so that no request's step waits for a compiler.

GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0)
"""Sampling parameters of the first steps, where they sample."""
_NARROW, _LONG = 2**26, 513
"""Bytes of a model that may be narrow, and the tokens of a text that is long for the narrowest."""


def first_lengths(model_bytes: int, most: int) -> list[int]:
    """Tokens of such steps, at most `most`: one, a short text and a long one."""
    # embeddings of many numbers are looked up by a kernel of their own: of a narrow model that is a longer text
    long = MOST_TOKENS + 1 if model_bytes > _NARROW else _LONG
    return sorted({1, min(2, most), min(long, most)})

"""Memory of a model between two steps: its weights are written anew, its pages are read and filled, or the system has
it meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter, ModelNotFound, UnsupportedModel
from asyncengine.execution.attention.base import PagePool
from asyncengine.execution.device.arena import give_back
from asyncengine.execution.device.cores import Cores
from asyncengine.execution.device.memory import release_cached
from asyncengine.execution.device.shared_gather import SharedPools
from asyncengine.execution.device.transfer import on_device
from asyncengine.execution.layers.states import StatePools
from asyncengine.execution.models.checkpoint import CheckpointOptions, open_checkpoint
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.description import read_config
from asyncengine.execution.models.eagle import headed
from asyncengine.execution.models.families import MULTIMODAL
from asyncengine.execution.models.formats import CheckpointSource, StoredTensor
from asyncengine.execution.models.loading import LoadedModel
from asyncengine.execution.models.multimodal import text_part
from asyncengine.execution.models.progress import LoadProgress
from asyncengine.execution.models.weights import assign, fill_randomly, load_weights, settle_tie, slots_of
from asyncengine.execution.runner.draft_model import DraftModel
from asyncengine.execution.runner.ranks import Ranks
from asyncengine.lora.layers.slots import LoraLayers
from asyncengine.options import WeightSource
from asyncengine.step import RecordType

# Other weights for a live decoder: a checkpoint, or tensors by name, of the model that it is.

_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_GIVEN = Path("the update")


class GivenTensors(CheckpointSource):
    """Tensors of this process. They stay the caller's: nothing of them is kept."""

    files = (_GIVEN,)
    folder = _GIVEN

    def __init__(
        self, given: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], device: torch.device
    ) -> None:
        """They are read onto `device`. Raises `InvalidParameter` for what is no floating-point tensor with a name."""
        self.config, self.metadata = {}, {}
        self.tensors: dict[str, StoredTensor] = {}
        self._given: dict[str, torch.Tensor] = {}
        self._device = device
        for name, tensor in _pairs(given):
            if name in self._given:
                raise InvalidParameter("weights", f"have two tensors of the name {name}")
            whole = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
            if tensor.dtype not in _KINDS or tensor.is_meta or not whole:
                kind = type(tensor).__name__
                raise InvalidParameter("weights", f"must be whole float tensors; {name} is a {kind}", tensor.dtype)
            self._given[name] = tensor
            self.tensors[name] = StoredTensor(_KINDS[tensor.dtype], tuple(tensor.shape), _GIVEN)

    def read(self, name: str) -> torch.Tensor:
        return self._given[name].detach().to(self._device).contiguous()

    def release(self, tensor: object) -> None:
        """Nothing of it is a file's."""


def _pairs(given: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Checked one by one, as the caller's generator makes them."""
    try:
        pairs = iter(given.items() if isinstance(given, Mapping) else given)
    except TypeError:
        raise InvalidParameter("weights", "must be a path, or tensors by name", given) from None
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise InvalidParameter("weights", "must be a path, or pairs of a name and a tensor", pair)
        name, tensor = pair
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InvalidParameter("weights", f"must be tensors by name, also that of {name!r}", type(tensor).__name__)
        yield name, tensor


def prepare_update(
    decoder: Decoder, weights: WeightSource | None, config: EngineConfig, *, partial: bool = False,
    has_other_parts: bool = False, head: CheckpointSource | None = None,
) -> Callable[[], None]:  # fmt: skip
    """A function that writes `weights` into `decoder`, made after all that can be refused has been: names,
    shapes, stored forms, and of a checkpoint its configuration. Nobody may run the decoder while it writes.

    `partial`: tensors that are not given stay. `has_other_parts`: the decoder is a part of a model that reads images or
    sounds as well. `head`: the files of its head, where that is not the checkpoint's own. `weights` None: those that
    `load_format="dummy"` makes up. Raises `ModelNotFound` naming what is missing, unknown, misshapen, or otherwise than
    the model has it; `InvalidParameter` naming one that is not finite.
    """
    if weights is None:
        if config.load_format != "dummy":
            raise InvalidParameter("weights", "must be a path, or tensors by name", weights)
        return lambda: fill_randomly(decoder.slots(), decoder.dtype, decoder.device)
    checkpoint: CheckpointSource
    if isinstance(weights, (str, os.PathLike)):
        # of a model whose weights were made up, these are not
        checkpoint = open_checkpoint(os.fspath(weights), CheckpointOptions.of(config)._replace(dummy=False))
        hf_config, described, _ = read_config(
            os.fspath(weights), checkpoint, config.max_model_len, fuse=config.fuse,
            trust_remote_code=config.trust_remote_code,
        )  # fmt: skip
        if described is None:
            raise ModelNotFound(f"{checkpoint.folder} is of another model: its family {hf_config.model_type!r}")
        if hf_config.model_type in MULTIMODAL:
            checkpoint = text_part(checkpoint, described)
        checkpoint = headed(checkpoint, head)
    else:
        checkpoint, described = GivenTensors(weights, decoder.device), decoder.config
        if has_other_parts:
            checkpoint = text_part(checkpoint, described)
    if partial:
        described = replace(described, tied=decoder.config.tied)  # which may have been told by a tensor that stays
    described = settle_tie(replace(described, mtp=decoder.config.mtp), checkpoint)
    difference = _difference(replace(described, ignored=()), replace(decoder.config, ignored=()))
    if difference is not None:
        where, new, old = difference
        raise ModelNotFound(f"{checkpoint.folder} is of another model: its {where} is {new}, not {old}; load a new one")
    slots = slots_of(decoder, checkpoint)
    own = set() if decoder.mtp is None else decoder.mtp.names()
    if own.isdisjoint(f"{before}{name}" for name in checkpoint.tensors for before in ("", "model.")):
        slots = {name: slot for name, slot in slots.items() if name not in own}  # trainers leave the head out
    names = assign(checkpoint, slots, described.ignored, partial=partial)
    for name in names:  # all answers would be of them
        tensor = checkpoint.read(name)
        if isinstance(tensor, torch.Tensor) and not bool(torch.isfinite(tensor).all()):
            raise InvalidParameter("weights", f"must be finite; {name} holds NaN or infinity")
        checkpoint.release(tensor)
    return lambda: load_weights(checkpoint, slots, names, LoadProgress(False))


def _difference(new: Any, old: Any, where: str = "configuration") -> tuple[str, Any, Any] | None:
    """The first field in which two declarations differ: its path, and what it is in each; None: there is none."""
    if is_dataclass(new) and type(new) is type(old):
        parts = [(field.name, getattr(new, field.name), getattr(old, field.name)) for field in fields(new)]
    elif isinstance(new, tuple) and isinstance(old, tuple) and len(new) == len(old):
        parts = [(str(place), *pair) for place, pair in enumerate(zip(new, old, strict=True))]
    else:
        return None if new == old else (where, _shown(new), _shown(old))
    found = (_difference(one, other, f"{where}.{name}") for name, one, other in parts)
    return next((each for each in found if each is not None), None)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} entries"
    return type(value).__name__ if is_dataclass(value) else repr(value)


# Pages and states of a model on a CPU as bytes: the memory itself, so that a disk reads into it and writes from it.


class _Pool(NamedTuple):
    """Memory of one pool in each of the processes that have it, by rank."""

    views: Sequence[memoryview]
    stride: int
    """Bytes from one page to the next."""
    pieces: Sequence[tuple[int, int, int]]
    """(rank, first byte, bytes) of each piece of page 0, in the order of one process's bytes."""
    divided: bool
    """Each process has some pieces; else each has a copy of those of rank 0."""

    @property
    def nbytes(self) -> int:
        """Bytes of a page, of all processes if it is divided among them."""
        return sum(size for *_, size in self.pieces)

    def page(self, index: int, copy: int = 0) -> list[memoryview]:
        """All of the page `index`; of what is not divided, this rank's copy."""
        begin = index * self.stride
        return [self.views[rank + copy][begin + first :][:size] for rank, first, size in self.pieces]


class CpuPageMemory:
    """`PageMemory` of pools on a CPU. It keeps them alive."""

    def __init__(
        self, pools: Sequence[PagePool], states: StatePools | None, layout: str, shared: SharedPools | None = None
    ) -> None:
        """`layout`: the backend and the size of its pages, in words. `shared`: where they lie if several processes have
        pages. Those of a layer whose heads are divided are a page together; of all others each has a copy."""
        self._shared = shared
        parts = 1 if shared is None else shared.size
        slots = [] if states is None else _state_pools(states, parts)
        self._whole = [*(pool.memory for pool in pools), *(each.memory for each in slots)]
        sizes = [(pool.page_bytes, pool.pieces * (parts if pool.divided else 1), pool.of_windows) for pool in pools]
        self.layout = f"{layout} {sizes} {[each.shape for each in slots]}"
        self._pools: dict[RecordType, list[_Pool]] = {part: [] for part in RecordType}
        for pool in pools:
            part = RecordType.WINDOW if pool.of_windows else RecordType.PAGE
            firsts = [number * pool.stride for number in range(pool.pieces)]
            ranks = range(parts if pool.divided else 1)
            pieces = [(rank, first, pool.page_bytes) for rank in ranks for first in firsts]
            self._pools[part].append(_Pool(self._views(pool.memory), pool.page_bytes, pieces, pool.divided))
        for each in slots:
            ends, ranks = [*accumulate(each.sizes, initial=0)], range(parts if each.divided else 1)
            pieces = [(rank, first, end - first) for first, end in pairwise(ends) for rank in ranks]
            self._pools[RecordType.STATE].append(_Pool(self._views(each.memory), ends[-1], pieces, each.divided))

    def _views(self, memory: torch.Tensor) -> list[memoryview]:
        own = [memory] if self._shared is None else self._shared.of_all(memory)
        return [each.detach().reshape(-1).view(torch.uint8).numpy().data for each in own]

    def nbytes(self, part: RecordType) -> int:
        return sum(pool.nbytes for pool in self._pools[part])

    def buffers(self, part: RecordType, index: int) -> Sequence[memoryview]:
        return [piece for pool in self._pools[part] for piece in pool.page(index)]

    def filled(self, part: RecordType, index: int, buffers: Sequence[memoryview]) -> None:
        """The memory itself was filled; copies of other processes follow."""
        for pool in self._pools[part]:
            for rank in range(1, 1 if pool.divided else len(pool.views)):
                for piece, copy in zip(pool.page(index), pool.page(index, rank), strict=True):
                    copy[:] = piece

    def copy(self, copies: Sequence[tuple[RecordType, int, int]]) -> None:
        """Make the copies of pages that a step begins with."""
        for part, source, page in copies:
            for pool in self._pools[part]:
                for piece, copied in zip(pool.page(source), pool.page(page), strict=True):
                    copied[:] = piece

    def give_back(self) -> None:
        """Let the system have the memory of all pages and states of this process, of which nothing is read any more."""
        if self._shared is not None:
            self._shared.give_back()
            return
        for memory in self._whole:
            give_back(memory.data_ptr(), memory.nbytes)


class _States(NamedTuple):
    """Memory of one layer's recurrent states, or windows."""

    memory: torch.Tensor
    sizes: Sequence[int]
    """Bytes of what stands side by side in one of them, each of which processes divide by itself."""
    shape: tuple[int, ...]
    """Shape of all processes' together."""
    divided: bool


def _state_pools(states: StatePools, parts: int) -> list[_States]:
    """`parts`: processes that may divide states."""
    heads, windows = [], []
    for spec, recurrent, window in zip(states.specs, states.recurrent, states.windows, strict=True):
        size = parts if spec.divided else 1
        if recurrent is not None:
            first, *rest = spec.recurrent
            heads.append(_States(recurrent, [recurrent[0].nbytes], (first * size, *rest), spec.divided))
        if window is not None:
            rows, channels = spec.window
            sizes = [window[0].nbytes]  # one piece is read and written faster than many
            if spec.divided:
                sizes = [kind * window.itemsize for kind in spec.kinds or (channels,)] * rows
            windows.append(_States(window, sizes, (rows, channels * size), spec.divided))
    return heads + windows


class ModelMemory:
    """Weights and caches of one runner's model. Whatever it returns is called while no step runs."""

    def __init__(
        self, model: LoadedModel, pages: Callable[[], CpuPageMemory], cores: Cores, reads_images: bool,
        lora: LoraLayers | None, ranks: Ranks | None, draft: DraftModel | None,
    ) -> None:  # fmt: skip
        """`pages`: memory of its caches, where that is the host's. `lora`: its adapters. `ranks`: other processes, and
        `draft`: another model, that do the same."""
        self._lora, self._path, self._ranks, self._draft = lora, model.path, ranks, draft
        self._model, self._device, self._pages, self._cores = model.model, model.device, pages, cores
        self._reads_images, self._has_other_parts, self._head = reads_images, bool(model.left_out), model.head
        self._without_weights = False

    def _decoder(self) -> Decoder:
        if not isinstance(self._model, Decoder):
            raise UnsupportedModel("a model that runs through transformers' modules cannot be given other weights")
        if self._reads_images:
            raise UnsupportedModel('a vision tower cannot be given other weights: load the model with images="off"')
        return self._model

    def prepare_update(self, weights: WeightSource | None, config: EngineConfig, partial: bool) -> Callable[[], None]:
        """Check new weights, and return the call that writes them. May be called from any thread. `weights`: None for
        those that the model was loaded with, read again from its files or made up by `load_format="dummy"`.

        Raises as the function `prepare_update`, and `UnsupportedModel` for one that runs through transformers.
        """

        model = self._decoder()
        weights = self._path if weights is None and config.load_format != "dummy" else weights
        if self._ranks is not None and weights is not None and not isinstance(weights, (str, os.PathLike)):
            weights = list(_pairs(weights))  # to be read more than once
        write = prepare_update(
            model, weights, config, partial=partial, has_other_parts=self._has_other_parts, head=self._head
        )

        def run() -> None:
            with on_device(self._device), self._cores.loading():
                write()
                if self._lora is not None:
                    with torch.inference_mode():  # as whatever steps have written
                        self._lora.write_again()
            if self._without_weights and self._draft is not None:
                self._draft.prepare_update(None, config, False)()  # which takes the same cores for itself
            self._without_weights = False

        return run if self._ranks is None else self._ranks.along(run, "update", weights, partial)

    def prepare_release(self, weights: bool, cache: bool) -> Callable[[], None]:
        """Return the call that gives the memory of weights, of caches, or of both back to the system. Weights must be
        written before the next step; of a cache nothing may be read any more.

        Raises `UnsupportedModel` where it cannot be: on a GPU, whose graphs hold it, and for weights that no update
        could write.
        """
        if self._device.type != "cpu":
            raise UnsupportedModel(
                "memory of a GPU cannot be given back while the engine lives: keep both, or close it"
            )
        decoder = self._decoder() if weights else None

        def run() -> None:
            if decoder is not None:
                decoder.options.memory.give_back()
                self._without_weights = True
            if cache:
                self._pages().give_back()
            if self._draft is not None:
                self._draft.prepare_release(weights, cache)()
            release_cached(self._device)

        return run if self._ranks is None else self._ranks.along(run, "release", weights, cache)

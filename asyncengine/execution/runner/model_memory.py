"""Operations on a model's memory between two steps: weights are updated, pages and states are read and written as
bytes, or memory is released to the system while the model sleeps."""

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
from asyncengine.execution.models.multimodal import text_source
from asyncengine.execution.models.progress import LoadProgress
from asyncengine.execution.models.weights import assign, fill_randomly, load_weights, settle_tie, slots_of
from asyncengine.execution.runner.draft_model import DraftModel
from asyncengine.execution.runner.ranks import Ranks
from asyncengine.lora.layers.slots import LoraLayers
from asyncengine.options import WeightSource
from asyncengine.step import RecordType

# Weight updates of a live decoder, from a checkpoint or from tensors by name; its configuration must not change.

_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_GIVEN = Path("the update")


class GivenTensors(CheckpointSource):
    """Tensors of this process as a checkpoint. They stay the caller's: no reference is kept after an update."""

    files = (_GIVEN,)
    folder = _GIVEN

    def __init__(
        self, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], device: torch.device
    ) -> None:
        """`device`: where `read` copies them. Raises `InvalidParameter` for names or tensors that are none, for tensors
        that are not dense floats, and for a name that comes twice."""
        self.config, self.metadata = {}, {}
        self.tensors: dict[str, StoredTensor] = {}
        self._given: dict[str, torch.Tensor] = {}
        self._device = device
        for name, tensor in _pairs(tensors):
            if name in self._given:
                raise InvalidParameter("weights", f"have two tensors of the name {name}")
            whole = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
            if tensor.dtype not in _KINDS or tensor.is_meta or not whole:
                type_name = type(tensor).__name__
                raise InvalidParameter("weights", f"must be whole float tensors; {name} is a {type_name}", tensor.dtype)
            self._given[name] = tensor
            self.tensors[name] = StoredTensor(_KINDS[tensor.dtype], tuple(tensor.shape), _GIVEN)

    def read(self, name: str) -> torch.Tensor:
        return self._given[name].detach().to(self._device).contiguous()

    def release(self, tensor: object) -> None:
        """Do nothing: the memory is no file's."""


def _pairs(tensors: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs, checked one by one as the caller's generator makes them. Raises `InvalidParameter`."""
    try:
        pairs = iter(tensors.items() if isinstance(tensors, Mapping) else tensors)
    except TypeError:
        raise InvalidParameter("weights", "must be a path, or tensors by name", tensors) from None
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise InvalidParameter("weights", "must be a path, or pairs of a name and a tensor", pair)
        name, tensor = pair
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InvalidParameter("weights", f"must be tensors by name, also that of {name!r}", type(tensor).__name__)
        yield name, tensor


def prepare_update(
    decoder: Decoder, weights: WeightSource | None, config: EngineConfig, *, partial: bool = False,
    multimodal: bool = False, head: CheckpointSource | None = None,
) -> Callable[[], None]:  # fmt: skip
    """Check `weights`, and return a function that writes them into `decoder`. All checks are done first, so that a
    refused update changes nothing: names, shapes, stored forms, values, and a checkpoint's configuration. No step may
    run while the function writes.

    `partial`: tensors that are not given keep their values. `multimodal`: the decoder belongs to a model that reads
    images or audio as well. `head`: the files of its MTP or EAGLE head, if not the checkpoint's. `weights` None: random
    ones, with `load_format="dummy"`. Raises `ModelNotFound` naming a tensor that is missing, unknown, misshapen or in
    another stored form, or a field of the configuration that differs; `InvalidParameter` naming a tensor that is not
    finite.
    """
    if weights is None:
        if config.load_format != "dummy":
            raise InvalidParameter("weights", "must be a path, or tensors by name", weights)
        return lambda: fill_randomly(decoder.slots(), decoder.dtype, decoder.device)
    checkpoint: CheckpointSource
    if isinstance(weights, (str, os.PathLike)):
        # the model may have been loaded with random weights, but a path always means the file's own
        checkpoint = open_checkpoint(os.fspath(weights), CheckpointOptions.of(config)._replace(dummy=False))
        hf_config, described, _ = read_config(
            os.fspath(weights), checkpoint, config.max_model_len, fuse=config.fuse,
            trust_remote_code=config.trust_remote_code,
        )  # fmt: skip
        if described is None:
            raise ModelNotFound(f"{checkpoint.folder} is of another model: its family {hf_config.model_type!r}")
        if hf_config.model_type in MULTIMODAL:
            checkpoint = text_source(checkpoint, described)
        checkpoint = headed(checkpoint, head)
    else:
        checkpoint, described = GivenTensors(weights, decoder.device), decoder.config
        if multimodal:
            checkpoint = text_source(checkpoint, described)
    if partial:
        described = replace(described, tied=decoder.config.tied)  # `settle_tie` needs tensors that are not given here
    described = settle_tie(replace(described, mtp=decoder.config.mtp), checkpoint)
    difference = _difference(replace(described, ignored=()), replace(decoder.config, ignored=()))
    if difference is not None:
        where, new, old = difference
        raise ModelNotFound(f"{checkpoint.folder} is of another model: its {where} is {new}, not {old}; load a new one")
    slots = slots_of(decoder, checkpoint)
    head_names = set() if decoder.mtp is None else decoder.mtp.names()
    if head_names.isdisjoint(f"{before}{name}" for name in checkpoint.tensors for before in ("", "model.")):
        slots = {name: slot for name, slot in slots.items() if name not in head_names}  # trainers leave the head out
    names = assign(checkpoint, slots, described.ignored, partial=partial)
    for name in names:  # one NaN in a weight spoils every later answer
        tensor = checkpoint.read(name)
        if isinstance(tensor, torch.Tensor) and not bool(torch.isfinite(tensor).all()):
            raise InvalidParameter("weights", f"must be finite; {name} holds NaN or infinity")
        checkpoint.release(tensor)
    return lambda: load_weights(checkpoint, slots, names, LoadProgress(False))


def _difference(new: Any, old: Any, where: str = "configuration") -> tuple[str, Any, Any] | None:
    """The first field in which two configurations differ: (path, new value, old value); None: they agree."""
    if is_dataclass(new) and type(new) is type(old):
        entries = [(field.name, getattr(new, field.name), getattr(old, field.name)) for field in fields(new)]
    elif isinstance(new, tuple) and isinstance(old, tuple) and len(new) == len(old):
        entries = [(str(index), *pair) for index, pair in enumerate(zip(new, old, strict=True))]
    else:
        return None if new == old else (where, _shown(new), _shown(old))
    differences = (_difference(new_value, old_value, f"{where}.{name}") for name, new_value, old_value in entries)
    return next((each for each in differences if each is not None), None)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} entries"
    return type(value).__name__ if is_dataclass(value) else repr(value)


# Pages and states of a model on a CPU as bytes: views of the memory itself, so that disk reads and writes need no copy.


class _Pool(NamedTuple):
    """One pool of pages, or of states, in the memory of each rank."""

    views: Sequence[memoryview]
    stride: int
    """Bytes from one page to the next."""
    pieces: Sequence[tuple[int, int, int]]
    """(rank, first byte, bytes) of each piece of page 0, in the order in which one process alone would have them."""
    divided: bool
    """True: each rank has some of the pieces. False: each rank has a copy of all of them."""

    @property
    def nbytes(self) -> int:
        """Bytes of a page, over all ranks if it is divided among them."""
        return sum(size for *_, size in self.pieces)

    def page(self, index: int, copy: int = 0) -> list[memoryview]:
        """All pieces of page `index`; of a pool that is not divided, those of rank `copy`."""
        begin = index * self.stride
        return [self.views[rank + copy][begin + first :][:size] for rank, first, size in self.pieces]


class CpuPageMemory:
    """`PageMemory` of pools on a CPU, whose memory it keeps alive."""

    def __init__(
        self, pools: Sequence[PagePool], states: StatePools | None, layout: str, shared: SharedPools | None = None
    ) -> None:
        """`layout`: name of the backend and its page size, for fingerprints of stored pages. `shared`: the memory of
        all ranks, if there are several. If a layer's heads are divided among ranks, their pieces make up one page;
        otherwise each rank has a copy of the page."""
        self._shared = shared
        processes = 1 if shared is None else shared.size
        slots = [] if states is None else _state_pools(states, processes)
        self._whole = [*(pool.memory for pool in pools), *(state_pool.memory for state_pool in slots)]
        sizes = [(pool.page_bytes, pool.pieces * (processes if pool.divided else 1), pool.of_windows) for pool in pools]
        self.layout = f"{layout} {sizes} {[state_pool.shape for state_pool in slots]}"
        self._pools: dict[RecordType, list[_Pool]] = {record_type: [] for record_type in RecordType}
        for pool in pools:
            record_type = RecordType.WINDOW if pool.of_windows else RecordType.PAGE
            firsts = [number * pool.stride for number in range(pool.pieces)]
            ranks = range(processes if pool.divided else 1)
            pieces = [(rank, first, pool.page_bytes) for rank in ranks for first in firsts]
            self._pools[record_type].append(_Pool(self._views(pool.memory), pool.page_bytes, pieces, pool.divided))
        for state_pool in slots:
            ends, ranks = [*accumulate(state_pool.sizes, initial=0)], range(processes if state_pool.divided else 1)
            pieces = [(rank, first, end - first) for first, end in pairwise(ends) for rank in ranks]
            views = self._views(state_pool.memory)
            self._pools[RecordType.STATE].append(_Pool(views, ends[-1], pieces, state_pool.divided))

    def _views(self, memory: torch.Tensor) -> list[memoryview]:
        by_rank = [memory] if self._shared is None else self._shared.of_all(memory)
        return [tensor.detach().reshape(-1).view(torch.uint8).numpy().data for tensor in by_rank]

    def nbytes(self, record_type: RecordType) -> int:
        return sum(pool.nbytes for pool in self._pools[record_type])

    def buffers(self, record_type: RecordType, index: int) -> Sequence[memoryview]:
        return [piece for pool in self._pools[record_type] for piece in pool.page(index)]

    def filled(self, record_type: RecordType, index: int, buffers: Sequence[memoryview]) -> None:
        """Copy a page that was written in rank 0's memory to the ranks that have a copy of it."""
        for pool in self._pools[record_type]:
            for rank in range(1, 1 if pool.divided else len(pool.views)):
                for piece, copy in zip(pool.page(index), pool.page(index, rank), strict=True):
                    copy[:] = piece

    def copy(self, copies: Sequence[tuple[RecordType, int, int]]) -> None:
        """Copy pages: (type, source, target) of each copy that a step begins with."""
        for record_type, source, page in copies:
            for pool in self._pools[record_type]:
                for piece, copied in zip(pool.page(source), pool.page(page), strict=True):
                    copied[:] = piece

    def give_back(self) -> None:
        """Give the memory of this process's pages and states back to the system. Their content is lost."""
        if self._shared is not None:
            self._shared.give_back()
            return
        for memory in self._whole:
            give_back(memory.data_ptr(), memory.nbytes)


class _States(NamedTuple):
    """Memory of one layer's recurrent states, or of its convolution windows."""

    memory: torch.Tensor
    sizes: Sequence[int]
    """Bytes of the segments of one state, side by side; ranks divide each segment by itself."""
    shape: tuple[int, ...]
    """Shape of one state over all ranks."""
    divided: bool


def _state_pools(states: StatePools, processes: int) -> list[_States]:
    """Recurrent states, then windows, of all state layers. `processes`: ranks that may divide them."""
    heads, windows = [], []
    for spec, recurrent, window in zip(states.specs, states.recurrent, states.windows, strict=True):
        size = processes if spec.divided else 1
        if recurrent is not None:
            first, *rest = spec.recurrent
            heads.append(_States(recurrent, [recurrent[0].nbytes], (first * size, *rest), spec.divided))
        if window is not None:
            rows, channels = spec.window
            sizes = [window[0].nbytes]  # undivided: one segment is read and written faster than many
            if spec.divided:
                sizes = [
                    channels_of_group * window.itemsize for channels_of_group in spec.channel_groups or (channels,)
                ] * rows
            windows.append(_States(window, sizes, (rows, channels * size), spec.divided))
    return heads + windows


class ModelMemory:
    """Weights and caches of one runner's model. The functions that it returns are called while no step runs."""

    def __init__(
        self, model: LoadedModel, pages: Callable[[], CpuPageMemory], cores: Cores, reads_images: bool,
        lora: LoraLayers | None, ranks: Ranks | None, draft: DraftModel | None,
    ) -> None:  # fmt: skip
        """`pages`: memory of its caches, on a CPU. `reads_images`: it has a vision tower. `lora`: its adapters.
        `ranks`, `draft`: other processes and a draft model, which do the same."""
        self._lora, self._path, self._ranks, self._draft = lora, model.path, ranks, draft
        self._model, self._device, self._pages, self._cores = model.model, model.device, pages, cores
        self._reads_images, self._multimodal, self._head = reads_images, bool(model.left_out), model.head
        self._without_weights = False

    def _decoder(self) -> Decoder:
        if not isinstance(self._model, Decoder):
            raise UnsupportedModel("a model that runs through transformers' modules cannot be given other weights")
        if self._reads_images:
            raise UnsupportedModel('a vision tower cannot be given other weights: load the model with images="off"')
        return self._model

    def prepare_update(self, weights: WeightSource | None, config: EngineConfig, partial: bool) -> Callable[[], None]:
        """Check new weights, and return the function that writes them. May be called from any thread. `weights`: None
        for those that the model was loaded with, read again from its files or random (`load_format="dummy"`).

        Raises as the function `prepare_update`, and `UnsupportedModel` for one that runs through transformers.
        """

        model = self._decoder()
        weights = self._path if weights is None and config.load_format != "dummy" else weights
        if self._ranks is not None and weights is not None and not isinstance(weights, (str, os.PathLike)):
            weights = list(_pairs(weights))  # a generator would be used up here, and the ranks need it as well
        write = prepare_update(model, weights, config, partial=partial, multimodal=self._multimodal, head=self._head)

        def run() -> None:
            with on_device(self._device), self._cores.loading():
                write()
                if self._lora is not None:
                    with torch.inference_mode():  # adapters' memory was made in this mode, and may only change in it
                        self._lora.write_again()
            if self._without_weights and self._draft is not None:
                self._draft.prepare_update(None, config, False)()  # outside of `loading`: it takes the cores itself
            self._without_weights = False

        return run if self._ranks is None else self._ranks.along(run, "update", weights, partial)

    def prepare_release(self, weights: bool, cache: bool) -> Callable[[], None]:
        """Return the function that gives the memory of weights, of caches, or of both back to the system. Weights must
        be written again before the next step; the content of a cache is lost.

        Raises `UnsupportedModel` on a GPU, whose graphs hold addresses, and for weights that no update could write."""
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

"""Memory of a model that changes between two steps: its weights are written anew, or the system has it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.device.cores import Cores
from asyncengine.execution.device.memory import release_cached
from asyncengine.execution.device.transfer import on_device
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.loading import LoadedModel
from asyncengine.execution.runner.page_memory import CpuPageMemory
from asyncengine.execution.runner.ranks import Ranks

if TYPE_CHECKING:
    from asyncengine.config import EngineConfig
    from asyncengine.options import WeightSource


class ModelMemory:
    """Weights and caches of one runner's model. Whatever it returns is called while no step runs."""

    def __init__(
        self, model: LoadedModel, pages: Callable[[], CpuPageMemory], cores: Cores, *, reads_images: bool
    ) -> None:
        """`pages`: memory of its caches, where that is the host's."""
        self.ranks: Ranks | None = None
        """Other processes that do the same."""
        self._model, self._device, self._pages, self._cores = model.model, model.device, pages, cores
        self._reads_images, self._has_other_parts = reads_images, bool(model.left_out)
        self.draft: ModelMemory | None = None
        """Memory of the draft model, if there is one."""
        self.write_again: Callable[[], None] | None = None
        """Reads a draft model's weights again."""
        self.forget: Callable[[], None] | None = None
        """Is called when a draft model's cache is gone."""
        self._without_weights = False

    def _decoder(self) -> Decoder:
        if not isinstance(self._model, Decoder):
            raise UnsupportedModel("a model that runs through transformers' modules cannot be given other weights")
        if self._reads_images:
            raise UnsupportedModel('a vision tower cannot be given other weights: load the model with images="off"')
        return self._model

    def prepare_update(self, weights: WeightSource | None, config: EngineConfig, partial: bool) -> Callable[[], None]:
        """Check other weights, and return the call that writes them. May be called from any thread. None: those that
        `load_format="dummy"` makes up.

        Raises as `models.updates.prepare_update`, and `UnsupportedModel` for one that runs through transformers.
        """
        from asyncengine.execution.models.updates import as_given, prepare_update

        model = self._decoder()
        weights = weights if self.ranks is None else as_given(weights)
        write = prepare_update(model, weights, config, partial=partial, has_other_parts=self._has_other_parts)

        def run() -> None:
            with on_device(self._device), self._cores.loading():
                write()
            if self._without_weights and self.draft is not None and self.draft.write_again is not None:
                self.draft.write_again()  # which takes the same cores for itself
            self._without_weights = False

        return run if self.ranks is None else self.ranks.along(run, "update", weights, partial)

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
            if self.draft is not None:
                self.draft.prepare_release(weights, cache)()
            if cache and self.forget is not None:
                self.forget()
            release_cached(self._device)

        return run if self.ranks is None else self.ranks.along(run, "release", weights, cache)

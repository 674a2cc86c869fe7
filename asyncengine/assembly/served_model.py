"""The facts of a loaded model by which requests are checked and written, in any process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from asyncengine.assembly.grammars import make_grammars, make_planner
from asyncengine.config import EngineConfig
from asyncengine.engine.frontend import Frontend
from asyncengine.engine.image_prompts import ImagePrompts
from asyncengine.engine.serving_loop import ServingLoop
from asyncengine.engine.validation import RequestValidator
from asyncengine.engine.vectors.service import VectorModel
from asyncengine.info import ModelInfo
from asyncengine.seams import AdapterStore, GrammarCompiler
from asyncengine.text.tokenizer import TextTokenizer

F = TypeVar("F", bound=Frontend)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """All that a front end needs to know of a model: where it stands there need be no files of it. Can be pickled."""

    info: ModelInfo
    tokenizer: TextTokenizer | None
    vectors: VectorModel | None = None
    """None for a model that writes text."""
    images: ImagePrompts | None = None
    """None for a model that reads no pictures."""

    @classmethod
    def of(cls, frontend: Frontend) -> Self:
        """The model that an engine's front end serves."""
        return cls(frontend.info, frontend.tokenizer, frontend.vector_model, frontend.image_prompts)

    def open(
        self, frontend: type[F], make_loop: Callable[[GrammarCompiler | None], ServingLoop], config: EngineConfig,
        adapters: AdapterStore,
    ) -> F:  # fmt: skip
        """A `frontend` for a loop without an engine in this process; `make_loop` is given the compiler of grammars,
        which the loop closes."""
        elsewhere = "requests go to other processes, and a function stays in this one"
        info = replace(self.info, no_logits_processors=elsewhere)
        grammars = make_grammars(self.tokenizer, info.eos_token_ids, info.vocab_size, config)
        planner = make_planner(self.tokenizer, grammars, config)
        loop: Any = make_loop(grammars)  # it has all that requests need of an engine's loop
        registry: Any = adapters
        validator = RequestValidator(config, info, loop.clock, self.tokenizer, grammars, adapters)
        return frontend(
            loop, validator, self.tokenizer, info, planner, registry, vector_model=self.vectors, images=self.images
        )

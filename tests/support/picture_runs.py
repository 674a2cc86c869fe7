"""Requests with pictures through the scheduler and a runner as they are, step by step, without an event loop."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from asyncengine.assembly.wiring import load_texts, read_images
from asyncengine.config import EngineConfig
from asyncengine.engine.image_prompts import ImagePrompts
from asyncengine.execution.api import ModelBuilder, open_model
from asyncengine.images import with_identity
from asyncengine.kernels.api import CompileAhead
from asyncengine.kvcache import KVCache
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.scheduler import Scheduler
from asyncengine.step import Batch

GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0, ignore_eos=True, logprobs=True)
PAGE = 4


class Loaded:
    """A model that reads pictures, and all that makes prompts for it."""

    def __init__(self, folder: Path, dtype: str = "float32", **settings: Any) -> None:
        self.config = EngineConfig(
            page_size=PAGE, kv_cache_memory="16MiB", dtype=dtype, show_progress=False, num_threads=1,
            speculation="off", **settings,
        )  # fmt: skip
        model = ModelBuilder(open_model(str(folder), self.config), CompileAhead(0), ExitStack(), lambda: None)
        self.tokenizer, _ = load_texts(model)
        prompts, reason = read_images(model, self.tokenizer)
        assert prompts is not None, reason
        self.prompts: ImagePrompts = prompts
        self.runner: Any = model.build(None).runner
        self.tower: Any = self.runner.image_store.tower
        self._tickets = itertools.count(1)

    def spec(self, messages: Any, want: int, params: SamplingParams = GREEDY, **fields: Any) -> RequestSpec:
        parts = self.prompts.parts()
        assert self.tokenizer is not None
        text = self.tokenizer.render_chat(messages, images=parts)
        ids, spans = self.prompts.encode(text, parts.parts)
        prompt = with_identity(ids, spans)
        return RequestSpec(next(self._tickets), prompt, params, len(prompt) + want, images=spans, **fields)


class Run:
    """Requests that are served by one scheduler over `loaded`'s runner, from an empty cache."""

    def __init__(self, loaded: Loaded, pages: int | None = None, **settings: Any) -> None:
        """`pages`: of the KV cache, page 0 included; None: all that the runner has."""
        runner, config = loaded.runner, loaded.config.replace(**settings)
        self.kv = KVCache(
            pages or runner.num_pages, PAGE, prefix_caching=config.prefix_caching, num_states=runner.num_states,
            windows=runner.windows, num_window_pages=runner.num_window_pages, most_ahead=config.most_ahead,
        )  # fmt: skip
        self.scheduler = Scheduler(config, self.kv)
        self.runner = runner
        self.batches: list[Batch] = []
        self.logprobs: dict[int, list[float]] = {}
        self.errors: dict[int, str] = {}
        self.cached: dict[int, int] = {}

    def serve(self, specs: Sequence[RequestSpec]) -> list[list[int]]:
        """The tokens of each."""
        tokens: dict[int, list[int]] = {spec.ticket: [] for spec in specs}
        for spec in specs:
            self.scheduler.apply(spec)
        for _ in range(20_000):
            batch = self.scheduler.schedule(0.0)
            self.scheduler.check()
            if batch is None:
                break
            self.batches.append(batch)
            self.scheduler.commit(self.runner.launch(batch).wait(), 0.0)
            for output in self.scheduler.take_outputs():
                tokens[output.ticket] += [output.token] if output.token >= 0 else []
                scored = [] if output.logprob is None else [output.logprob.logprob]
                self.logprobs.setdefault(output.ticket, []).extend(scored)
                if output.error is not None:
                    self.errors[output.ticket] = str(output.error)
                if output.cached_tokens:
                    self.cached[output.ticket] = output.cached_tokens
        assert not self.scheduler.requests
        return [tokens[spec.ticket] for spec in specs]

    @property
    def encoded(self) -> int:
        """Pictures that were encoded."""
        return sum(batch.encode is not None for batch in self.batches)

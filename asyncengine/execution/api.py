"""The door of execution: what assembly asks on the way from a model's files to the runner of its steps.

`open_model` finds the files, `ModelBuilder` reads weights, and its `build` makes the runner. In between other units
have their say, on tokenizers, grammars and adapters, for which the builder says what is known by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncengine.config import EngineConfig
from asyncengine.demo import bundled_name, resolve_draft
from asyncengine.errors import InvalidParameter, ModelNotFound, OutOfMemory, UnsupportedModel
from asyncengine.execution.device.cores import Cores, threads_for
from asyncengine.execution.device.memory import in_words
from asyncengine.execution.device.transfer import on_device
from asyncengine.execution.models.checkpoint import CheckpointOptions, open_checkpoint, open_configured
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import Decoder, PooledDecoder
from asyncengine.execution.models.description import is_headless, pooling_of, resolve_device
from asyncengine.execution.models.families import MULTIMODAL
from asyncengine.execution.models.formats import CheckpointSource, first_line
from asyncengine.execution.models.identity import identity_of
from asyncengine.execution.models.loading import LoadedEncoder, LoadedModel, load_encoder, load_model, why_untold
from asyncengine.execution.models.progress import LoadProgress
from asyncengine.execution.models.vision.tower import ImageProcessor, read_tower
from asyncengine.execution.pooling.pool import Pooler
from asyncengine.execution.runner.building import BuiltRunner, build_runner, prompt_step
from asyncengine.execution.runner.encoder_runner import EncoderRunner, build_encoder_runner
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.execution.runner.ranks import Order, start_ranks
from asyncengine.execution.runner.step_inputs import ImageStore
from asyncengine.execution.sampling.logit_processors import known_on
from asyncengine.info import ModelInfo
from asyncengine.kernels.api import CompileAhead, read_kept
from asyncengine.lora.layers.slots import LoraLayers
from asyncengine.pooling_spec import PoolingSpec
from asyncengine.progress import OnProgress

logger = logging.getLogger("asyncengine")

_PROMPT_TOKENS = 256
"""Tokens of a prompt by which it is measured how fast prompts are computed."""
_UNUSED = "draft_model=%r is not used, and answers are the same without: %s"
_SMALLER = 'Take a smaller model, dtype="bfloat16", or a device with more memory.'


class ModelFiles(NamedTuple):
    """A model's files, whose headers were read; nothing large is loaded."""

    path: str
    config: EngineConfig
    device: torch.device
    checkpoint: CheckpointSource
    draft: CheckpointSource | None
    """The files of a draft model, or of a head that guesses."""

    def on_device(self) -> AbstractContextManager[None]:
        """Within, the model's device is the current one of the calling thread."""
        return on_device(self.device)


def open_model(path: str, config: EngineConfig) -> ModelFiles:
    """Find a model's files, and download them if need be.

    Raises `ModelNotFound`, `UnsupportedModel`, `InvalidParameter` for a device that is not there.
    """
    device = resolve_device(config.device)
    return ModelFiles(path, config, device, open_configured(path, config), open_draft(config, device))


def open_draft(config: EngineConfig, device: torch.device) -> CheckpointSource | None:
    """Find the draft model's files, before anything large is loaded. None: none is asked for.

    Raises `InvalidParameter` where none is to run, `ModelNotFound`. Where just this machine has no use for one, that is
    logged: guesses change no answer, and a program that asks for them has to start anywhere.
    """
    if config.draft_model is None:
        return None
    if device.type != "cpu" and config.device == "auto":
        logger.warning(_UNUSED, config.draft_model, "it runs on a CPU only")
        return None
    if device.type != "cpu":
        raise InvalidParameter("draft_model", f"runs on a CPU only, not on {device}", config.draft_model)
    if config.attention_backend == "torch":
        raise InvalidParameter(
            "draft_model", 'nothing can be guessed with attention_backend="torch"', config.draft_model
        )
    try:
        path = resolve_draft(config.draft_model)
        return open_checkpoint(path, CheckpointOptions.of(config), drafts=True)
    except (ModelNotFound, UnsupportedModel) as error:
        raise type(error)(f"draft_model: {error}") from error


class ModelBuilder:
    """A model whose weights are in memory, and all that its runner will need. Used by one thread."""

    def __init__(
        self, files: ModelFiles, ahead: CompileAhead, undo: ExitStack, check: Callable[[], None],
        on_progress: OnProgress | None = None,
    ) -> None:  # fmt: skip
        """Read the weights. `ahead`: compiles kernels meanwhile. `undo`: ends processes and threads that were started,
        unless a runner has taken them over. `check`: raises where the load is given up.

        Raises `ModelNotFound`, `UnsupportedModel`, `OutOfMemory`, `InvalidParameter`.
        """
        config, device = files.config, files.device
        self.files, self._ahead = files, ahead
        self._progress = LoadProgress(config.show_progress, check, on_progress)
        self.pooling = pooling = pooling_of(files.checkpoint, config.task, config.pooling)
        self.is_encoder = pooling is not None and pooling.whole
        if pooling is not None:
            if files.draft is not None:
                raise InvalidParameter("draft_model", "guesses text, and this one writes nothing", config.draft_model)
            config = config.replace(speculation="off", grammar_backend="none", cuda_graphs=False)
        ahead.limit(threads_for(config.num_threads, device))
        self._ranks, config = start_ranks(config, device, pooling, undo)
        self._cores = undo.enter_context(closing(Cores(config.num_threads, device)))
        self.config = _with_overlap(config, device)
        self.loaded = in_words(self._load, device, "the model", _SMALLER)
        self._pooler: Pooler | None = None
        self._draft: LoadedModel | None = None
        self._images: ImageStore | None = None

    def _load(self) -> LoadedModel | LoadedEncoder:
        files, threads = self.files, self._cores.loading
        arguments = files.path, self.config, self._progress, files.checkpoint, self._ahead
        if self.is_encoder:
            return load_encoder(*arguments, threads)
        headless = is_headless(self.pooling)
        if self._ranks is None:
            return load_model(*arguments, headless, threads, draft=files.draft)
        loading = partial(self._ranks.loading, Order(files.path, self.config, headless), threads)
        return load_model(*arguments, headless, loading, draft=files.draft, ranks=self._ranks.gather)

    @property
    def own_config(self) -> ModelConfig | None:
        """The content of config.json, where no class of transformers' has read it."""
        read = self.loaded.hf_config
        return read if isinstance(read, ModelConfig) else None

    def pool(self, yes_and_no: Callable[[], tuple[int, int]]) -> tuple[PoolingSpec, int]:
        """Have the model give vectors or scores: (what `pooling` becomes, numbers for each text). `yes_and_no`: gives
        the tokens whose logits a score is made of.

        Raises `UnsupportedModel`, `ModelNotFound`.
        """
        loaded, spec, head = self.loaded, self.pooling, None
        assert spec is not None
        if isinstance(loaded, LoadedEncoder):
            if spec.scores_tokens:
                raise UnsupportedModel(f"{loaded.name} is an encoder without a classification head: it gives no scores")
            if spec.modes:
                self._pooler = Pooler(spec, loaded.model.hidden_size)
                return spec, self._pooler.dimensions
            labels = loaded.model.num_labels
            if labels != len(spec.labels):
                raise UnsupportedModel(f"{loaded.name} has a head of {labels} labels, and names {len(spec.labels)}")
            self._pooler = Pooler(replace(spec, modes=("lasttoken",)), labels)
            return spec, labels
        if not isinstance(loaded.model, Decoder):
            raise UnsupportedModel(f"{loaded.name} runs through transformers' modules here, which give no vectors")
        if spec.scores_tokens:
            spec = replace(spec, tokens=spec.tokens or yes_and_no())
        elif not spec.modes:
            spec, head = replace(spec, modes=("lasttoken",)), _head(self.files.checkpoint, len(spec.labels))
        model = PooledDecoder(loaded.model, spec.tokens)
        self.loaded = replace(loaded, model=model)
        self._pooler = Pooler(spec, model.width, head)
        return spec, self._pooler.dimensions

    def read_draft(self, check_words: Callable[[str, Path], None]) -> None:
        """Load the draft model, if there is one, in the type of the model and on its device. `check_words`: given its
        path and its folder, raises where a token means something else to it.

        Raises `InvalidParameter` if it has another vocabulary or cannot guess, `OutOfMemory`, `ModelNotFound`,
        `UnsupportedModel`. One of no use is left out: a head, which was read with the model, and one beside a model
        whose numbers depend on what is computed together.
        """
        checkpoint, config, target = self.files.draft, self.config, self.loaded
        if checkpoint is None or config.draft_model is None:
            return
        assert isinstance(target, LoadedModel)
        if target.head is not None:
            if (reason := target.no_mtp or target.unsteady) is not None:
                logger.warning(_UNUSED, config.draft_model, reason)
            return
        path = resolve_draft(config.draft_model)
        config = config.replace(dtype=str(target.dtype).removeprefix("torch."), max_model_len=None)
        try:
            with self._cores.loading():
                draft = load_model(path, config, self._progress, checkpoint)
            if not checkpoint.metadata:
                check_words(path, checkpoint.folder)
        except (ModelNotFound, OutOfMemory, UnsupportedModel) as error:
            raise type(error)(f"draft_model: {error}") from error
        if (draft.vocab_size, draft.input_vocab_size) != (target.vocab_size, target.input_vocab_size):
            limit = f"has {draft.vocab_size} tokens where the model has {target.vocab_size}"
            raise InvalidParameter("draft_model", limit, config.draft_model)
        if draft.states:
            reason = "keeps recurrent states, which cannot be taken back when a guess is wrong"
            raise InvalidParameter("draft_model", reason, config.draft_model)
        if target.unsteady is not None:
            logger.warning(_UNUSED, config.draft_model, target.unsteady)
        else:
            self._draft = draft

    def read_images(self, vocabulary: Callable[[], Mapping[str, int]] | None) -> ImageProcessor | str:
        """Load what reads pictures: the processor of the model's files, or why there is none. `vocabulary`: tokens of
        texts; None: no chat template says where a picture goes.

        What is in the way of pictures is not in the way of text: it is logged. Raises `ModelNotFound` for a tower whose
        tensors are missing.
        """
        checkpoint, loaded, config = self.files.checkpoint, self.loaded, self.config
        if self.pooling is not None:
            return "the model writes no text"
        if getattr(loaded.hf_config, "model_type", "") not in MULTIMODAL:
            of_two_files = ": a GGUF file has pictures in another one (mmproj)" if checkpoint.metadata else ""
            return f"the model reads text alone{of_two_files}"
        if config.images == "off":
            return 'images="off"'
        assert isinstance(loaded, LoadedModel)
        try:
            with self._cores.loading():
                tower, processor, axes = read_tower(
                    checkpoint, loaded, vocabulary, self._progress, dummy=config.load_format == "dummy",
                    attention_backend=config.attention_backend, max_num_batched_tokens=config.max_num_batched_tokens,
                )  # fmt: skip
        except (UnsupportedModel, ImportError, OSError, ValueError, KeyError) as error:
            reason = first_line(error)
            logger.warning("%s reads text alone: %s", loaded.name, reason)
            return reason
        self.loaded = replace(loaded, weights_bytes=loaded.weights_bytes + tower.nbytes, left_out=())
        self._images = ImageStore(tower, axes, loaded.device, near=processor.family.near)
        return processor

    @cached_property
    def lora(self) -> LoraLayers:
        """The places of adapters on the device: asked for once all is read, and before `build`."""
        assert isinstance(self.loaded, LoadedModel)
        return LoraLayers(self.loaded.model, self.config.max_loras, self.config.max_lora_rank)

    def allocate_adapters(self, paths: Iterable[str], rank: int) -> None:
        """Take memory for adapters of these modules, before the KV cache has its share. Raises `OutOfMemory`."""
        take, helps = partial(self.lora.allocate, paths, rank), "Lower max_loras, or leave out those of high rank."
        in_words(take, self.loaded.device, "the memory for adapters", helps)

    def build(self, digests: Path | None) -> BuiltModel:
        """Make the runner, once all is read. `digests`: the folder that knows digests of weight files.

        Raises `OutOfMemory`, `InvalidParameter`.
        """
        self._await_kernels()
        loaded, config, ahead = self.loaded, self.config, self._ahead
        if isinstance(loaded, LoadedEncoder):
            assert self._pooler is not None
            scores = self.pooling is not None and not self.pooling.modes
            built = build_encoder_runner(loaded, self._pooler, self._cores, self._progress, scores=scores)
        else:
            built = build_runner(
                loaded, config, lora=self.lora, cores=self._cores, progress=self._progress, pooler=self._pooler,
                draft=self._draft, two_pools=True, cached=ahead.kept, uncached=ahead.left, images=self._images,
                ranks=self._ranks,
            )  # fmt: skip
        self._progress.say_compiled()
        adapted = config.speculation_with_adapters
        runner = built.runner
        config = config.replace(
            speculation_costs=built.step_costs,
            draft_costs=built.draft_costs,
            speculation_with_adapters=loaded.dtype == torch.float32 if adapted is None else adapted,
            draft_model=config.draft_model if runner.mtp is None else None,  # a part of the model never falls behind
        )
        identify = None
        copied = loaded.device.type == "cpu" and (self._ranks is None or self._ranks.gather.shares_pages)
        if copied and isinstance(loaded, LoadedModel):
            identify = identity_of(config, self.files.checkpoint, loaded, runner.page_memory().layout, digests)
        return BuiltModel(runner, self._info(built), config, identify)

    def _await_kernels(self) -> None:
        """Wait until other processes have compiled the kernels that a first answer needs, and read each as it comes."""

        def report(kernel: str, most: int) -> None:
            self._progress.compiled(kernel, most)
            read_kept([kernel])

        with self._progress:
            self._progress.stage("compiling kernels")
            self._ahead.finish(report)

    def _info(self, built: BuiltRunner) -> ModelInfo:
        """Description of the model, but for its texts."""
        loaded, config, runner = self.loaded, self.config, built.runner
        model: Any = loaded.model if isinstance(loaded, LoadedModel) else None
        untold, no_mtp = why_untold(model, False), loaded.no_mtp if isinstance(loaded, LoadedModel) else None
        return ModelInfo(
            name=bundled_name(self.files.path) or loaded.name, vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len, eos_token_ids=tuple(loaded.eos_token_ids),
            dtype=str(loaded.dtype).removeprefix("torch."), device=str(loaded.device), num_pages=runner.num_pages,
            page_size=runner.page_size,
            task="generate" if getattr(loaded.hf_config, "decision_head", None) is None else "decide",
            generation_defaults=loaded.generation_defaults, weight_bytes=built.weights_bytes,
            kv_cache_bytes=built.kv_bytes, state_bytes=built.state_bytes, num_states=max(0, runner.num_states - 1),
            num_window_pages=runner.num_window_pages, one_pool=built.one_pool, stored=runner.stored,
            fused=tuple(built.fused), attention=runner.attention_backend, no_speculation=built.no_speculation,
            no_mtp=None if runner.mtp else no_mtp or built.no_speculation, batch_variance=built.batch_variance,
            left_out=loaded.left_out, placeholders=loaded.placeholders, no_routed_experts=why_untold(model, True),
            num_layers=len(getattr(model, "layers", ())), no_hidden_states=untold,
            hidden_size=0 if model is None or untold is not None else model.config.width,
            no_logits_processors=None if loaded.device.type == "cpu" else "steps on a GPU do not wait for them",
            sampling_parameters=known_on(loaded.device), tensor_parallel=config.tensor_parallel,
            pipeline_parallel=config.pipeline_parallel,
        )  # fmt: skip


class BuiltModel(NamedTuple):
    """A runner ready to compute steps, with the `ModelInfo` and the configuration that it runs with."""

    runner: ModelRunner | EncoderRunner
    info: ModelInfo
    """All but what a tokenizer says."""
    config: EngineConfig
    """The settings as they are served, with what steps cost."""
    identify: Callable[[], Mapping[str, str]] | None = None
    """See `identity_of`; None: pages cannot be copied, since they are a GPU's, or each rank's own."""

    def prompt_rate(self) -> float:
        """Tokens of a prompt that are computed in a second, by the better of two steps now."""
        runner, config = self.runner, self.config
        assert isinstance(runner, ModelRunner)
        held = (runner.num_pages - 1) * config.page_size
        count = max(1, min(_PROMPT_TOKENS, config.max_num_batched_tokens, self.info.max_model_len - 1, held))
        seconds = min(runner.profile_run(prompt_step(runner, count)).seconds for _ in range(2))
        runner.cores.forget()
        return count / max(seconds, 1e-6)


def _with_overlap(config: EngineConfig, device: torch.device) -> EngineConfig:
    """The settings with as many steps in flight as the device has a use for."""
    # other ranks are told of tokens, for which the host waits: a second step would only be told of late
    ahead = device.type == "cuda" and config.tensor_parallel == 1
    depth = config.max_steps_in_flight or (2 if ahead else config.pipeline_parallel)
    jump = (depth == 1 or config.pipeline_parallel > 1) if config.jump_forward is None else config.jump_forward
    return config.replace(max_steps_in_flight=depth, jump_forward=jump)


def _head(checkpoint: CheckpointSource, labels: int) -> torch.Tensor:
    """The head [labels, width] of a classifier made of a text generator, on the last position's hidden state."""
    name = next((name for name in ("score.weight", "model.score.weight") if name in checkpoint.tensors), None)
    head = None if name is None else checkpoint.read(name)
    if not isinstance(head, torch.Tensor) or head.shape[0] != labels:
        raise UnsupportedModel(f"{checkpoint.folder} has no head for {labels} labels (score.weight)")
    return head

"""The only wiring: from a model's name and a configuration to a running engine's parts."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncengine.assembly.drafts import load_draft, open_draft
from asyncengine.assembly.grammars import make_grammars, make_planner
from asyncengine.assembly.images import NO_IMAGES, LoadedImages, load_images
from asyncengine.assembly.info import info_of
from asyncengine.assembly.ranks import spread, start_ranks
from asyncengine.assembly.stores import folder_of, open_prefix_store
from asyncengine.assembly.vectors import described, encoder_pooler, pooled_decoder, settings_of
from asyncengine.config import AdapterSettings, EngineConfig
from asyncengine.demo import bundled_name, resolve_adapter, resolve_draft, resolve_model
from asyncengine.engine.clock import Clock, MonotonicClock
from asyncengine.engine.device_thread import DeviceThread
from asyncengine.engine.frontend import Frontend
from asyncengine.engine.image_prompts import ImagePrompts
from asyncengine.engine.loop import EngineLoop, Recorder
from asyncengine.engine.prefix_files import Prefixes
from asyncengine.engine.prefix_sources import Source
from asyncengine.engine.process import PROCESS, LoadAttempt
from asyncengine.engine.threads import on_own_thread
from asyncengine.engine.turns import writing
from asyncengine.engine.validation import RequestValidator
from asyncengine.engine.vectors.service import VectorModel
from asyncengine.errors import AdapterError, InvalidParameter, OutOfMemory
from asyncengine.info import ModelInfo
from asyncengine.kvcache import KVCache
from asyncengine.kvcache.store.record import Identity
from asyncengine.lora.admission import AdapterSlots
from asyncengine.scheduler import Scheduler
from asyncengine.seams import Executor, GrammarCompiler
from asyncengine.stats import ThreadStats
from asyncengine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import torch

    from asyncengine.execution.device.cores import Cores
    from asyncengine.execution.models.formats import CheckpointSource
    from asyncengine.execution.models.loading import Loaded, LoadedModel
    from asyncengine.execution.models.progress import LoadProgress
    from asyncengine.execution.runner.encoder_runner import EncoderRunner
    from asyncengine.execution.runner.model_runner import ModelRunner
    from asyncengine.grammar.chat import ChatPlanner
    from asyncengine.kernels.api import CompileAhead
    from asyncengine.lora.layers.slots import LoraLayers
    from asyncengine.lora.registry import AdapterRegistry
    from asyncengine.pooling_spec import PoolingSpec

# The registry of a model's adapters, and the memory that they take on its device.


def make_adapters(
    lora: LoraLayers, dtype: torch.dtype, config: AdapterSettings, max_passes: int, device: torch.device
) -> AdapterRegistry:
    """Make the registry of a model's adapters, with those of the configuration already read, and with memory on the
    device for these, before the KV cache takes its share of what is free.

    Raises `AdapterError` for one that `config.adapters` names; one that was only found in `adapter_root` is left out.
    """
    from asyncengine.lora.checkpoint.files import discover
    from asyncengine.lora.checkpoint.peft_loader import PeftLoader
    from asyncengine.lora.registry import AdapterRegistry

    loader = PeftLoader(lora.modules, dtype=dtype, max_rank=config.max_lora_rank, root=config.adapter_root)
    registry = AdapterRegistry(
        loader, max_bytes=int(config.adapter_memory), workers=config.adapter_workers, max_passes=max_passes
    )
    try:
        paths = {name: resolve_adapter(path, config.adapter_root) for name, path in dict(config.adapters).items()}
        named = {name: registry.load(name, path) for name, path in paths.items()}
        try:
            seen = {} if loader.root is None else discover(loader.root)
        except OSError as error:
            reason = f"cannot be read ({type(error).__name__})"
            raise InvalidParameter("adapter_root", reason, config.adapter_root) from error
        found = {name: registry.load(name, path) for name, path in seen.items() if name not in named}
        for name, loading in named.items():
            try:
                loading.result()
            except AdapterError as error:
                raise type(error)(error.field, f"{error.limit} (adapter {name!r})", error.value) from error
        for name, loading in found.items():
            if (broken := loading.exception()) is not None:
                logger.warning("adapter %s in adapter_root is left out: %s", name, broken)
        allocate_adapters(lora, registry, device)
    except BaseException:
        registry.close()
        raise
    return registry


def allocate_adapters(lora: LoraLayers, adapters: AdapterRegistry, device: torch.device) -> None:
    """Take memory for the adapters that are there."""
    from asyncengine.execution.device.memory import in_words

    known = adapters.list()
    if known:
        # nothing is launched for what no adapter changes; a later one takes memory for its modules when it is written
        paths = dict.fromkeys(path for info in known for path in info.modules)
        take = partial(lora.allocate, paths, max(info.rank for info in known))
        in_words(take, device, "the memory for adapters", "Lower max_loras, or leave out those of high rank.")


logger = logging.getLogger("asyncengine")

_SMALLER = 'Take a smaller model, dtype="bfloat16", or a device with more memory.'


def divide_memory(
    budget: int, setups: Mapping[str, tuple[str | os.PathLike[str], EngineConfig]], *, in_turns: bool = False
) -> dict[str, tuple[EngineConfig, int]]:
    """Each name's configuration with its share of `budget` bytes (`kv_cache_memory` and `state_memory`, where those
    were not set), and what its engine takes with it.

    `in_turns`: models that are too large for the budget together get an equal part of it each, or their least where
    that is more, and will not all be loaded at once.

    Blocking: configurations and headers of files are read, no weights. Raises `InvalidParameter` for a budget that is
    too small, and what reading the files raises.
    """
    from asyncengine.execution.models.memory.needs import divide

    return divide(budget, {name: (resolve_model(model), config) for name, (model, config) in setups.items()}, in_turns)


def needed_memory(model: str | os.PathLike[str], config: EngineConfig, device: str) -> tuple[int, int]:
    """Bytes that an engine takes on a `device` ("cpu", "cuda") that need not be here, told of the model's files:
    weights, a KV cache of `kv_cache_memory` or of one long request, recurrent states, a step. They are those of all its
    ranks, and of so many, the second, each has as many of its own.

    Raises what loading would raise of the files: `ModelNotFound`, `UnsupportedModel`, `InvalidParameter`.
    """
    import torch

    from asyncengine.execution.models.memory.needs import read_needs

    needs = read_needs(resolve_model(model), config, device=torch.device(device))
    return needs.total(needs.kv_tokens(config)), needs.step_bytes // config.tensor_parallel


def load_frontend(model: str | os.PathLike[str], config: EngineConfig, attempt: LoadAttempt | None = None) -> Frontend:
    """Load model and tokenizer and wire an engine; nothing runs yet. Any number of threads may call it at once: models
    are downloaded side by side and loaded one after another. Where memory does not suffice, shared engines that are
    kept without a user are closed, and it is tried again.

    Blocking: seconds to minutes. Raises `ModelNotFound`, `UnsupportedModel`, `OutOfMemory`, `InvalidParameter`,
    `EngineClosed` once `attempt` is given up, `WrongProcess` in a fork of a process that has loaded an engine.
    """
    from asyncengine.kernels.api import CompileAhead

    PROCESS.check_may_load()
    path, trying = resolve_model(model), attempt or LoadAttempt()
    ahead = CompileAhead.for_engine(config.num_threads, config.device, config.attention_backend)
    try:
        return _load_on_own_thread(path, config, trying, ahead)
    except BaseException as error:  # a Ctrl-C here does not stop the other thread
        ahead.close()
        if not (isinstance(error, OutOfMemory) and PROCESS.make_room()):
            trying.give_up()
            raise
    gc.collect()  # only now: the error held what had been loaded
    return load_frontend(model, config, trying)


def _load_on_own_thread(path: str, config: EngineConfig, trying: LoadAttempt, ahead: CompileAhead) -> Frontend:
    from asyncengine.execution.device.transfer import on_device
    from asyncengine.execution.models.checkpoint import open_checkpoint
    from asyncengine.execution.models.description import resolve_device

    device = resolve_device(config.device)

    def load() -> Frontend:
        checkpoint = open_checkpoint(path, config, writes=config.task == "generate")
        drafting = open_draft(config, device)
        with PROCESS.turn(trying), on_device(device):  # each thread has a current one, and this thread is a new one
            frontend = _load_frontend(path, checkpoint, config, device, trying, drafting, ahead)
        if trying.given_up:
            frontend.discard()
            trying.check()
        return frontend

    # OpenMP gives each thread that computes a team. Where teams outnumber the CPUs, libgomp lets them sleep after every
    # loop rather than wait for the next: a team that was left behind by loading made decode steps a third longer.
    return on_own_thread(load, "asyncengine-load")


def _load_frontend(
    path: str, checkpoint: CheckpointSource, config: EngineConfig, device: torch.device, attempt: LoadAttempt,
    drafting: CheckpointSource | None, ahead: CompileAhead,
) -> Frontend:  # fmt: skip
    from asyncengine.execution.device.cores import Cores, threads_for
    from asyncengine.execution.device.memory import in_words
    from asyncengine.execution.models.description import is_headless, pooling_of
    from asyncengine.execution.models.loading import load_model
    from asyncengine.execution.models.progress import LoadProgress
    from asyncengine.execution.runner.building import build_runner
    from asyncengine.lora.layers.slots import LoraLayers

    progress = LoadProgress(config.show_progress, attempt.check, attempt.on_progress)
    pooling = pooling_of(checkpoint, config)
    if pooling is not None and drafting is not None:
        raise InvalidParameter("draft_model", "guesses text, and this one writes nothing", config.draft_model)
    config = settings_of(pooling, config)
    with ExitStack() as undo:
        undo.callback(ahead.close)
        ahead.limit(threads_for(config.num_threads, device))
        ranks, config = start_ranks(config, device, pooling, undo)
        cores = undo.enter_context(closing(Cores(config.num_threads, device)))
        if pooling is not None and pooling.whole:
            frontend = _load_encoder_frontend(path, checkpoint, config, device, pooling, progress, ahead, cores)
            undo.pop_all()
            return frontend
        how = is_headless(pooling), cores.loading
        load = partial(load_model, path, config, progress, checkpoint, ahead, *how, draft=drafting)
        loaded = in_words(spread(load, ranks), device, "the model", _SMALLER)
        attempt.check()
        config = _resolve_overlap(config, loaded.device.type)
        tokenizer = _load_tokenizer(path, checkpoint, loaded, config)
        if tokenizer is not None:
            tokenizer.warm_up()
            loaded.eos_token_ids = _with_named_ends(loaded, tokenizer, config.chat_template is not None)
        attempt.check()
        pooler, vectors = (None, None) if pooling is None else pooled_decoder(loaded, pooling, tokenizer, checkpoint)
        with cores.loading():
            draft = load_draft(drafting, config, loaded, tokenizer, progress)
            images = load_images(checkpoint, loaded, tokenizer, config, progress) if pooling is None else NO_IMAGES
        attempt.check()
        lora = LoraLayers(loaded.model, config.max_loras, config.max_lora_rank)
        adapters = undo.enter_context(closing(make_adapters(lora, loaded.dtype, config, config.max_passes, device)))
        grammars = make_grammars(tokenizer, loaded.eos_token_ids, loaded.vocab_size, config)  # beside compilers
        planner = make_planner(tokenizer, grammars, config)
        _await_kernels(ahead, progress)
        runner = build_runner(
            loaded, config, lora=lora, cores=cores, progress=progress, pooler=pooler, draft=draft, two_pools=True,
            kept=ahead.kept, left=ahead.left, images=images.store, ranks=ranks,
        )  # fmt: skip
        progress.say_compiled()
        identify = _identify(config, checkpoint, loaded, runner)
        frontend = _assemble(
            path, loaded, tokenizer, runner, config, adapters=adapters, grammars=grammars, planner=planner,
            vectors=vectors, images=images, identify=identify,
            tiers=[open_prefix_store(config, loaded, runner, identify, undo)],
        )  # fmt: skip
        undo.pop_all()
        return frontend


def _load_encoder_frontend(
    path: str, checkpoint: CheckpointSource, config: EngineConfig, device: torch.device, pooling: PoolingSpec,
    progress: LoadProgress, ahead: CompileAhead, cores: Cores,
) -> Frontend:  # fmt: skip
    """The same of a model that computes a text in one step."""
    from asyncengine.execution.device.memory import in_words
    from asyncengine.execution.models.loading import load_encoder
    from asyncengine.execution.runner.encoder_runner import build_encoder_runner

    load = partial(load_encoder, path, config, progress, checkpoint, ahead, cores.loading)
    loaded = in_words(load, device, "the model", _SMALLER)
    config = _resolve_overlap(config, loaded.device.type)
    tokenizer = _load_tokenizer(path, checkpoint, loaded, config)
    pooler, vectors = encoder_pooler(loaded, pooling, config)
    _await_kernels(ahead, progress)
    runner = build_encoder_runner(loaded, pooler, cores, progress, scores=not pooling.modes)
    progress.say_compiled()
    return _assemble(path, loaded, tokenizer, runner, config, vectors=vectors)


def _identify(
    config: EngineConfig, checkpoint: CheckpointSource, loaded: LoadedModel, runner: ModelRunner
) -> Callable[[], Identity] | None:
    """See `identity_of`; None: pages cannot be copied, since they are a GPU's, or each rank's own."""
    from asyncengine.execution.models.identity import identity_of

    if loaded.device.type != "cpu" or (runner.ranks is not None and not runner.ranks.gather.shares_pages):
        return None
    folder = None if config.kv_cache_dir is None else folder_of(config.kv_cache_dir)
    return identity_of(config, checkpoint, loaded, runner.page_memory().layout, folder)


def _await_kernels(ahead: CompileAhead, progress: LoadProgress) -> None:
    """Until those that a first answer needs are compiled by others, and read here one by one."""
    from asyncengine.kernels.api import read_kept

    def report(kernel: str, most: int) -> None:
        progress.compiled(kernel, most)
        read_kept([kernel])

    with progress:
        progress.stage("compiling kernels")
        ahead.finish(report)


def _load_tokenizer(
    path: str, checkpoint: CheckpointSource, loaded: Loaded, config: EngineConfig
) -> TextTokenizer | None:
    """The tokenizer of the folder, or of a GGUF file's header, that marks ends of an answer which no configuration
    names."""
    from asyncengine.execution.models.config import ModelConfig
    from asyncengine.text.plain_tokenizer import FAMILIES
    from asyncengine.text.tokenizer import load_tokenizer

    if not checkpoint.metadata:
        read = loaded.hf_config
        known = read if isinstance(read, ModelConfig) and read.model_type in FAMILIES else None
        known = None if getattr(read, "decision_head", None) else known  # the file's family is another one
        return load_tokenizer(
            path if checkpoint.root() == checkpoint.folder else str(checkpoint.folder), config,
            max_chat_chars=config.max_chat_chars, model_config=known, beside=loaded.folder,
        )  # fmt: skip
    from asyncengine.assembly.gguf_text import load_gguf_tokenizer

    given: Any = {"max_chat_chars": config.max_chat_chars, "chat_template": config.chat_template}
    tokenizer = load_gguf_tokenizer(checkpoint.metadata, folder=Path(path), **given)
    loaded.eos_token_ids = list(dict.fromkeys([*loaded.eos_token_ids, *tokenizer.end_token_ids]))
    return tokenizer


def _with_named_ends(loaded: LoadedModel, tokenizer: TextTokenizer, other_template: bool) -> list[int]:
    """The ends of an answer, and those special tokens that the model's own stop strings name (Ollama's do): what is no
    text is not found in a text. `other_template`: the chat template is not the model's, so that the mark by which it
    ends an answer becomes one of the stop strings."""
    if other_template and (end := tokenizer.turn_end):
        own = loaded.generation_defaults.get("stop_strings", ())
        loaded.generation_defaults["stop_strings"] = tuple(dict.fromkeys([*own, end]))
    wanted = {stop.encode() for stop in loaded.generation_defaults.get("stop_strings", ())}
    special = sorted(token for token in tokenizer.table.special_ids if token < loaded.vocab_size) if wanted else []
    named = [token for token in special if tokenizer.table.token_bytes(token) in wanted]
    return list(dict.fromkeys([*loaded.eos_token_ids, *named]))


def _resolve_overlap(config: EngineConfig, device_type: str) -> EngineConfig:
    # other ranks are told of tokens, for which the host waits: a second step would only be told of late
    ahead = device_type == "cuda" and config.tensor_parallel == 1
    depth = config.max_steps_in_flight or (2 if ahead else config.pipeline_parallel)
    jump = (depth == 1 or config.pipeline_parallel > 1) if config.jump_forward is None else config.jump_forward
    return config.replace(max_steps_in_flight=depth, jump_forward=jump)


def _assemble(
    path: str, loaded: Loaded, tokenizer: TextTokenizer | None, runner: ModelRunner | EncoderRunner,
    config: EngineConfig, *, images: LoadedImages = NO_IMAGES, vectors: VectorModel | None = None,
    identify: Callable[[], Identity] | None = None, **parts: Any,
) -> Frontend:  # fmt: skip
    info = info_of(bundled_name(path) or loaded.name, loaded, tokenizer, runner, images, config)
    if vectors is not None:
        info = described(info, vectors, tokenizer)
    logger.info("%s", info.in_words)
    costs = runner.step_costs if runner.no_speculation is None else None
    adapted = config.speculation_with_adapters
    adapted = info.dtype == "float32" if adapted is None else adapted
    config = config.replace(speculation_costs=costs, draft_costs=runner.draft_costs, speculation_with_adapters=adapted)
    if getattr(runner, "mtp", None) is not None:
        config = config.replace(draft_model=None)  # a head is a part of the model: it never falls behind
    frontend = wire(runner, info, config, tokenizer=tokenizer, vectors=vectors, images=images.prompts, **parts)
    if config.load_format != "dummy" and frontend.loop.write_again is not None:
        frontend.loop.write_again = writing(runner.prepare_update, path, config)  # type: ignore[union-attr]
    frontend.prefixes = Prefixes(frontend.loop, identify, getattr(runner, "page_memory", None))
    if (ranks := getattr(runner, "ranks", None)) is not None:
        ranks.tell(frontend.loop.fail)
    if config.draft_model is not None and (draft := runner.memory.draft) is not None:  # type: ignore[union-attr]
        draft.write_again = writing(draft.prepare_update, resolve_draft(config.draft_model), config)
    return frontend


def wire(
    executor: Executor, info: ModelInfo, config: EngineConfig, *, tokenizer: TextTokenizer | None = None,
    clock: Clock | None = None, grammars: GrammarCompiler | None = None, planner: ChatPlanner | None = None,
    adapters: AdapterRegistry | None = None, recorder: Recorder | None = None, vectors: VectorModel | None = None,
    images: ImagePrompts | None = None, tiers: Sequence[Source | None] = (),
) -> Frontend:  # fmt: skip
    """Put an engine together around any executor (tests use a fake one). `vectors`: of a model that gives them.
    `tiers`: places besides memory that have prefixes, in the order in which they are asked."""
    clock = clock or MonotonicClock()
    kv = KVCache(
        executor.num_pages, executor.page_size, prefix_caching=config.prefix_caching, eviction=config.eviction,
        num_states=executor.num_states, windows=executor.windows, num_window_pages=executor.num_window_pages,
        most_ahead=config.most_ahead,
    )  # fmt: skip
    whole = vectors is not None and vectors.spec.whole  # nothing is kept of a text
    capacity, asked = info.max_model_len if whole else kv.longest, config.max_model_len
    if asked is not None and asked > capacity:
        raise InvalidParameter("max_model_len", f"the KV cache holds {capacity} tokens; raise kv_cache_memory", asked)
    # no request may be longer than the model's context, the configured limit, or the whole KV cache
    longest = min(info.max_model_len, capacity, asked or capacity)
    info = replace(info, max_model_len=longest, window=None if kv.lookback is None else kv.lookback.span + 1)
    # `Batch.copies` are made by one process on a CPU, without a second model's pages
    alone = config.tensor_parallel == config.pipeline_parallel == 1 and config.draft_model is None
    copies = alone and not getattr(executor, "asynchronous", False)
    scheduler = Scheduler(
        config, kv, None if adapters is None else AdapterSlots(config.max_loras, adapters.get),
        copies=copies and getattr(executor, "draft_model", None) is None,
    )  # fmt: skip
    loop = EngineLoop(
        config, scheduler, DeviceThread(executor, config.switch_interval, config.max_steps_in_flight or 1), clock,
        grammars=grammars, adapters=adapters, table=None if tokenizer is None else tokenizer.table, recorder=recorder,
    )  # fmt: skip
    for source in filter(None, tiers):
        loop.sources.add(source)
    if planner is not None:
        form = planner.tool_format
        info = replace(info, tool_format=None if form is None else form.title, reasons=planner.reasoning is not None)
    validator = RequestValidator(config, info, clock, tokenizer, grammars, adapters)
    threads = getattr(executor, "threads", ThreadStats)  # executors without any of their own: fakes
    folder = partial(resolve_adapter, root=config.adapter_root)
    update = getattr(executor, "prepare_update", None)
    frontend = Frontend(loop, validator, tokenizer, info, planner, adapters, threads, folder, update, vectors, images)
    frontend.prepare_release = getattr(executor, "prepare_release", None)
    loop.write_again = None if update is None else writing(update, None, config)
    return frontend

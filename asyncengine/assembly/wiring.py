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

from asyncengine.assembly.grammars import make_grammars, make_planner
from asyncengine.assembly.served_model import ServedModel
from asyncengine.assembly.stores import folder_of, open_prefix_store
from asyncengine.assembly.vectors import described, vector_model
from asyncengine.config import EngineConfig
from asyncengine.demo import resolve_adapter, resolve_model
from asyncengine.engine.clock import Clock, MonotonicClock
from asyncengine.engine.device_thread import DeviceThread
from asyncengine.engine.frontend import Frontend
from asyncengine.engine.image_prompts import ImagePrompts
from asyncengine.engine.loop import EngineLoop, Recorder
from asyncengine.engine.prefix_sources import Source
from asyncengine.engine.process import PROCESS, LoadAttempt
from asyncengine.engine.threads import on_own_thread
from asyncengine.engine.validation import RequestValidator
from asyncengine.engine.vectors.service import VectorModel
from asyncengine.errors import AdapterError, InvalidParameter, OutOfMemory
from asyncengine.info import ModelInfo
from asyncengine.kvcache import KVCache
from asyncengine.kvcache.store.record import Identity
from asyncengine.lora.admission import AdapterSlots
from asyncengine.scheduler import Scheduler
from asyncengine.seams import Executor, GrammarCompiler
from asyncengine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from asyncengine.execution.api import ModelBuilder, ModelFiles
    from asyncengine.grammar.chat import ChatPlanner
    from asyncengine.kernels.api import CompileAhead
    from asyncengine.lora.registry import AdapterRegistry

logger = logging.getLogger("asyncengine")


def make_adapters(model: ModelBuilder) -> AdapterRegistry:
    """Make the registry of a model's adapters, with those of the configuration already read, and with memory on the
    device for these, before the KV cache takes its share of the free memory.

    Raises `AdapterError` for one that `config.adapters` names; one that was only found in `adapter_root` is left out.
    """
    from asyncengine.lora.checkpoint.files import discover
    from asyncengine.lora.checkpoint.peft_loader import PeftLoader
    from asyncengine.lora.registry import AdapterRegistry

    lora, config = model.lora, model.config
    loader = PeftLoader(lora.modules, dtype=model.loaded.dtype, max_rank=config.max_lora_rank, root=config.adapter_root)
    registry = AdapterRegistry(
        loader, max_bytes=int(config.adapter_memory), workers=config.adapter_workers, max_passes=config.max_passes
    )
    try:
        paths = {name: resolve_adapter(path, config.adapter_root) for name, path in dict(config.adapters).items()}
        named = {name: registry.load(name, path) for name, path in paths.items()}
        try:
            seen = {} if loader.root is None else discover(loader.root)
        except OSError as error:
            reason = f"cannot be read ({type(error).__name__})"
            raise InvalidParameter("adapter_root", reason, config.adapter_root) from error
        discovered = {name: registry.load(name, path) for name, path in seen.items() if name not in named}
        for name, loading in named.items():
            try:
                loading.result()
            except AdapterError as error:
                raise type(error)(error.field, f"{error.limit} (adapter {name!r})", error.value) from error
        for name, loading in discovered.items():
            if (broken := loading.exception()) is not None:
                logger.warning("adapter %s in adapter_root is left out: %s", name, broken)
        if loaded := registry.list():
            # nothing is launched for what no adapter changes; a later one takes memory when it is written
            changed = dict.fromkeys(path for info in loaded for path in info.modules)
            model.allocate_adapters(changed, max(info.rank for info in loaded))
    except BaseException:
        registry.close()
        raise
    return registry


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
    """(bytes of an engine on a `device` ("cpu", "cuda") that this machine need not have, those of them that each rank
    has of its own), told by the model's files: weights, a KV cache of `kv_cache_memory` or of one long request,
    recurrent states, a step. The first are those of all ranks together.

    Raises what loading would raise of the files: `ModelNotFound`, `UnsupportedModel`, `InvalidParameter`.
    """
    import torch

    from asyncengine.execution.models.memory.needs import read_needs

    needs = read_needs(resolve_model(model), config, device=torch.device(device))
    return needs.total(needs.kv_tokens(config.kv_cache_memory)), needs.step_bytes // config.tensor_parallel


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
    from asyncengine.execution.api import open_model

    def load() -> Frontend:
        files = open_model(path, config)
        with PROCESS.turn(trying), files.on_device():  # each thread has a current one, and this thread is a new one
            frontend = _load_frontend(files, trying, ahead)
        if trying.given_up:
            frontend.discard()
            trying.check()
        return frontend

    # OpenMP gives each thread that computes a team. Where teams outnumber the CPUs, libgomp lets them sleep after every
    # loop rather than wait for the next: a team that was left behind by loading made decode steps a third longer.
    return on_own_thread(load, "asyncengine-load")


def _load_frontend(files: ModelFiles, attempt: LoadAttempt, ahead: CompileAhead) -> Frontend:
    from asyncengine.execution.api import ModelBuilder

    with ExitStack() as undo:
        undo.callback(ahead.close)
        model = ModelBuilder(files, ahead, undo, attempt.check, attempt.on_progress)
        attempt.check()
        tokenizer, facts = load_texts(model)
        attempt.check()
        vectors = vector_model(model, tokenizer)
        model.read_draft(partial(_check_words, tokenizer, model.config))
        images, facts["no_images"] = read_images(model, tokenizer)
        attempt.check()
        parts: dict[str, Any] = {}
        if not model.is_encoder:
            parts["adapters"] = undo.enter_context(closing(make_adapters(model)))
            # made while others compile
            grammars = make_grammars(tokenizer, facts["eos_token_ids"], model.loaded.vocab_size, model.config)
            parts |= {"grammars": grammars, "planner": make_planner(tokenizer, grammars, model.config)}
        kept_in = model.config.kv_cache_dir
        built = model.build(None if kept_in is None else folder_of(kept_in))
        info = replace(built.info, **facts)
        info = info if vectors is None else described(info, vectors, tokenizer)
        logger.info("%s", info.in_words)
        tiers = [] if model.is_encoder else [open_prefix_store(built, undo)]
        served = ServedModel(info, tokenizer, vectors, images)
        frontend = assemble(built.runner, served, built.config, tiers=tiers, identify=built.identify, **parts)
        if built.runner.ranks is not None:
            built.runner.ranks.tell(frontend.loop.fail)
        undo.pop_all()
        return frontend


def load_texts(model: ModelBuilder) -> tuple[TextTokenizer | None, dict[str, Any]]:
    """The tokenizer of the folder, or of a GGUF file's header, and what `ModelInfo` says of texts.

    Ends of an answer are those that the model's configuration names, then its tokenizer's, and those special tokens
    that its own stop strings name (Ollama's do): special tokens leave no text in which a stop string could be found.
    """
    from asyncengine.text.plain_tokenizer import FAMILIES
    from asyncengine.text.tokenizer import load_tokenizer

    loaded, config, checkpoint = model.loaded, model.config, model.files.checkpoint
    ends, defaults = list(loaded.eos_token_ids), dict(loaded.generation_defaults)
    tokenizer: TextTokenizer | None
    if checkpoint.metadata:
        from asyncengine.assembly.gguf_text import load_gguf_tokenizer

        tokenizer = load_gguf_tokenizer(
            checkpoint.metadata, folder=Path(model.files.path), max_chat_chars=config.max_chat_chars,
            chat_template=config.chat_template,
        )  # fmt: skip
        ends += tokenizer.end_token_ids
    else:
        read = model.own_config
        plain = read if read is not None and read.model_type in FAMILIES else None
        plain = None if getattr(read, "decision_head", None) else plain  # the file's family is another one
        tokenizer = load_tokenizer(
            loaded.path if checkpoint.root() == checkpoint.folder else str(checkpoint.folder), config,
            max_chat_chars=config.max_chat_chars, model_config=plain, beside=loaded.folder,
        )  # fmt: skip
    if tokenizer is not None and not model.is_encoder:
        tokenizer.warm_up()
        stops = defaults.get("stop_strings", ())
        if config.chat_template is not None and (end := tokenizer.turn_end):
            # the template is not the model's, so that the mark by which it ends an answer becomes a stop string
            stops = defaults["stop_strings"] = tuple(dict.fromkeys([*stops, end]))
        wanted = {stop.encode() for stop in stops}
        special = sorted(token for token in tokenizer.table.special_ids if token < loaded.vocab_size) if wanted else []
        ends += [token for token in special if tokenizer.table.token_bytes(token) in wanted]
    facts = {"eos_token_ids": tuple(dict.fromkeys(ends)), "generation_defaults": defaults}
    if tokenizer is None:
        return None, {**facts, "has_tokenizer": False}
    about = {"has_chat_template": tokenizer.has_chat_template, "template_variables": tokenizer.template_variables()}
    return tokenizer, {**facts, **about}


def _check_words(tokenizer: TextTokenizer | None, config: EngineConfig, path: str, folder: Path) -> None:
    """Raise `InvalidParameter` unless a draft model has the model's vocabulary. Without a tokenizer it counts as
    equal."""
    from asyncengine.text.tokenizer import load_tokenizer

    draft_tokenizer = load_tokenizer(path, config, beside=folder)
    if draft_tokenizer is None or tokenizer is None:
        return
    table, draft_table = tokenizer.table, draft_tokenizer.table
    for token in range(min(table.size, draft_table.size)):
        ours, its = table.token_bytes(token), draft_table.token_bytes(token)
        if ours != its:
            limit = f"has another vocabulary: token {token} is {its!r}, not {ours!r}"
            raise InvalidParameter("draft_model", limit, config.draft_model)


def read_images(model: ModelBuilder, tokenizer: TextTokenizer | None) -> tuple[ImagePrompts | None, str | None]:
    """Prompts with pictures, or why there are none."""
    templated = tokenizer is not None and tokenizer.has_chat_template
    processor = model.read_images(tokenizer.get_vocab if tokenizer is not None and templated else None)
    if tokenizer is None or isinstance(processor, str):
        return None, str(processor)
    return ImagePrompts(processor, tokenizer, model.config), None


def wire(
    executor: Executor, info: ModelInfo, config: EngineConfig, *, tokenizer: TextTokenizer | None = None,
    vectors: VectorModel | None = None, images: ImagePrompts | None = None, **parts: Any,
) -> Frontend:  # fmt: skip
    """Put an engine together around any executor (tests use a fake one). `vectors`: of a model that gives them.
    `parts`: clock, grammars and others of `assemble`."""
    return assemble(executor, ServedModel(info, tokenizer, vectors, images), config, **parts)


def assemble(
    executor: Executor, model: ServedModel, config: EngineConfig, *, clock: Clock | None = None,
    grammars: GrammarCompiler | None = None, planner: ChatPlanner | None = None,
    adapters: AdapterRegistry | None = None, recorder: Recorder | None = None, tiers: Sequence[Source | None] = (),
    identify: Callable[[], Identity] | None = None,
) -> Frontend:  # fmt: skip
    """Put an engine together of its parts. `tiers`: places besides memory that have prefixes, in the order in which
    they are asked. `identify`: see `BuiltModel`."""
    clock, info, tokenizer, vectors = clock or MonotonicClock(), model.info, model.tokenizer, model.vectors
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
    copies = alone and not executor.asynchronous and executor.draft_model is None
    slots = None if adapters is None else AdapterSlots(config.max_loras, adapters.get)
    scheduler = Scheduler(config, kv, slots, copies=copies)
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
    folder = partial(resolve_adapter, root=config.adapter_root)
    return Frontend(loop, validator, tokenizer, info, planner, adapters, folder, vectors, model.images, identify)

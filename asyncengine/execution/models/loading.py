"""Loading a model: a decoder or an encoder of a family that is written down, transformers' modules for other decoders.

`reading` makes the plan of a model from its checkpoint; weights then stream from their files into layers, by name
(`weights`). Families without a file of their own run through `fallback`, or are refused with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from asyncengine.config import EngineConfig, ModelSettings, RequestSettings
from asyncengine.errors import InvalidParameter, ModelNotFound
from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.device.cores import threads_for
from asyncengine.execution.device.memory import bound_kernel_caches
from asyncengine.execution.layers.kernels import layer_kernels
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.sharded import LocalWeight, Ranks, ShardedWeight
from asyncengine.execution.layers.slots import TensorSlot
from asyncengine.execution.layers.stages import Stage, cut_layers
from asyncengine.execution.layers.states import StateSpec
from asyncengine.execution.layers.step import CausalLM
from asyncengine.execution.models.checking import check_module
from asyncengine.execution.models.checkpoint import open_checkpoint
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.encoder import Encoder
from asyncengine.execution.models.families.encoders import by_stored_name, spelling_of
from asyncengine.execution.models.first_kernels import encoder_kernels_of, kernels_of
from asyncengine.execution.models.formats import CheckpointSource
from asyncengine.execution.models.hub import short_name
from asyncengine.execution.models.kernel_builds import building, modules_of
from asyncengine.execution.models.mapped import MappedFiles, own_weights
from asyncengine.execution.models.memory.needs import Weights, check_memory, outline_decoder, outline_encoder
from asyncengine.execution.models.multimodal import TextPart, placeholders
from asyncengine.execution.models.packed_file import packed_file
from asyncengine.execution.models.progress import LoadProgress
from asyncengine.execution.models.reading import ModelPlan, read_encoder, read_model, typed
from asyncengine.execution.models.refusals import check_elements
from asyncengine.execution.models.weights import fill_randomly, load_weights, slots_of
from asyncengine.kernels.arena import find_memory
from asyncengine.kernels.compile_ahead import CompileAhead
from asyncengine.sampling_params import OPEN_PARAMETERS, SamplingParams


@dataclass(slots=True, kw_only=True)
class Loaded:
    """A model ready to run."""

    name: str
    folder: Path
    hf_config: Any
    """A `ModelConfig`, or transformers' config object."""
    vocab_size: int
    """Width of the logits; of an encoder, token ids are below it."""
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    weights_bytes: int
    mapped_bytes: int = 0
    """Weights that are pages of a file, which the system counts as free memory."""
    eos_token_ids: list[int] = field(default_factory=list)
    """None: it writes no text."""
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    """The settings of generation_config.json (temperature, top_p, top_k, ...)."""
    stored: dict[str, str] = field(default_factory=dict)
    """Storage types of quantized matrices, by name."""
    fused: list[str] = field(default_factory=list)
    """Forms in which it runs, e.g. "decoder x 1", "packed x 113"; empty: through transformers' modules as they are."""
    left_out: tuple[str, ...] = ()
    """Parts of the checkpoint that were not read, e.g. "vision_tower x 437"."""
    placeholders: dict[int, str] = field(default_factory=dict)
    """Tokens in whose place an image or a sound would go, and which of them."""


@dataclass(slots=True, kw_only=True)
class LoadedModel(Loaded):
    """A causal language model."""

    model: CausalLM
    input_vocab_size: int
    """Token ids of an input are below it."""
    layers: Sequence[LayerSpec]
    unsteady: str | None = None
    """Why a token's numbers may depend on the tokens that are computed beside it."""
    states: Sequence[StateSpec] = ()


@dataclass(slots=True, kw_only=True)
class LoadedEncoder(Loaded):
    """An encoder, which gives hidden states or scores."""

    model: Encoder


def load_model(
    path_or_id: str,
    config: EngineConfig,
    progress: LoadProgress | None = None,
    checkpoint: CheckpointSource | None = None,
    ahead: CompileAhead | None = None,
    headless: bool = False,
    threads: Callable[[], AbstractContextManager[object]] = nullcontext,
    ranks: Ranks | None = None,
) -> LoadedModel:
    """Load a folder or hub id, of which `checkpoint` was opened already (None: not yet). `ahead` begins to compile the
    kernels that the model needs (None: they are compiled when they are called). `headless`: no logits are wanted.
    `threads()`: weights are prepared within, once the names of kernels are known. `ranks`: processes that have a part
    of it each, of which this is one; then it raises `InvalidParameter` for a model that cannot be split.

    Raises `ModelNotFound` (no such model, or files missing or broken), `UnsupportedModel` (a family or option that
    cannot run here), `OutOfMemory` (weights larger than what is free), `InvalidParameter` (max_model_len, device).
    """
    with progress or LoadProgress(config.show_progress) as bar:
        bar.stage("looking for the model")
        plan = read_model(path_or_id, checkpoint or open_checkpoint(path_or_id, config), config, headless)
        checkpoint = plan.checkpoint
        defaults = _generation_defaults(checkpoint, config)
        if plan.device.type == "cpu":
            bound_kernel_caches()
        model: CausalLM
        if plan.described is not None:
            with typed(checkpoint.folder):
                model, fused, nbytes = _load_decoder(plan, config, bar, ahead, defaults, threads, ranks)
        else:
            check_split(config, ranks, "it runs through transformers' modules")
            with threads():
                model, fused, nbytes = _load_module(plan, config, bar)
    return LoadedModel(
        **_facts(path_or_id, plan, fused, nbytes),
        model=model,
        generation_defaults=defaults,
        eos_token_ids=_eos_ids(model.vocab_size, defaults, plan.hf_config, plan.hf_config.get_text_config()),
        vocab_size=model.vocab_size,
        input_vocab_size=model.input_vocab_size,
        layers=model.specs,
        unsteady=model.unsteady,
        mapped_bytes=model.options.memory.file_bytes if isinstance(model, Decoder) else 0,
        states=model.states,
        left_out=checkpoint.left_out if isinstance(checkpoint, TextPart) else (),
        placeholders=placeholders(plan.hf_config),
    )


def _facts(path_or_id: str, plan: ModelPlan, fused: list[str], nbytes: int) -> dict[str, Any]:
    """The fields of `Loaded` that every model has."""
    return {
        "name": short_name(path_or_id), "folder": plan.checkpoint.folder, "hf_config": plan.hf_config,
        "max_model_len": plan.max_model_len, "dtype": plan.dtype, "device": plan.device, "weights_bytes": nbytes,
        "stored": stored_kinds(plan.checkpoint), "fused": fused,
    }  # fmt: skip


def load_encoder(
    path_or_id: str,
    config: EngineConfig,
    progress: LoadProgress | None = None,
    checkpoint: CheckpointSource | None = None,
    ahead: CompileAhead | None = None,
    threads: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> LoadedEncoder:
    """Load an encoder. Parameters and errors are those of `load_model`."""
    with progress or LoadProgress(config.show_progress) as bar:
        bar.stage("looking for the model")
        checkpoint = checkpoint or open_checkpoint(path_or_id, config, writes=False)
        plan = read_encoder(checkpoint, config)
        if plan.device.type == "cpu":
            bound_kernel_caches()
        with typed(checkpoint.folder):
            model = _load_encoder(plan, config, bar, ahead, threads)
    facts = _facts(path_or_id, plan, model.describe(), model.nbytes)
    return LoadedEncoder(**facts, model=model, vocab_size=model.vocab_size)


def _load_decoder(
    plan: ModelPlan, config: EngineConfig, bar: LoadProgress, ahead: CompileAhead | None, defaults: Mapping[str, Any],
    threads: Callable[[], AbstractContextManager[object]], ranks: Ranks | None,
) -> tuple[Decoder, list[str], int]:  # fmt: skip
    """The decoder with its weights. Names, shapes and memory are looked at before any memory is taken."""
    outline, weights = outline_decoder(plan, config)
    options = _layer_options(plan, weights, config, ranks)
    if ranks is not None and not ranks.exact and (plan.bits is not None or weights.forms):
        check_split(config, ranks, "quantized matrices are divided on a CPU alone")
    if ranks is not None and config.pipeline_parallel > 1:
        options = replace(options, ranks=None, stage=_stage_of(outline, config, ranks))
    decoder = Decoder(outline.config, options, plan.max_model_len)
    if options.ranks is not None:
        weights_here = [linear.weight for layer in decoder.layers for linear in layer.linears()]
        split = any(isinstance(weight, (LocalWeight, ShardedWeight)) for weight in weights_here)
        check_split(config, ranks, None if split else decoder.unsteady or "all of its matrices have too few outputs")
    if ahead is not None and config.attention_backend != "torch":
        ahead.start(*kernels_of(decoder, config.page_size, defaults))
    on_gpu = plan.device.type == "cuda" and options.kernels.name != "torch"
    works = modules_of(decoder, config, plan.dtype) if on_gpu else []
    with threads(), building(works, bar):
        slots = decoder.slots() if config.load_format == "dummy" else slots_of(decoder, plan.checkpoint)
        _fill(slots, plan, weights, options, config, bar)
    return decoder, decoder.describe(), decoder.nbytes


def _load_encoder(
    plan: ModelPlan, config: EngineConfig, bar: LoadProgress, ahead: CompileAhead | None,
    threads: Callable[[], AbstractContextManager[object]],
) -> Encoder:  # fmt: skip
    """The encoder with its weights. Names, shapes and memory are looked at before any memory is taken."""
    outline, weights = outline_encoder(plan, config)
    options = _layer_options(plan, weights, config)
    model = Encoder(outline.config, options)
    if ahead is not None and config.attention_backend != "torch":
        ahead.start(encoder_kernels_of(model))
    with threads():
        slots = by_stored_name(model.slots(), plan.checkpoint.tensors, spelling_of(plan.hf_config.model_type))
        _fill(slots, plan, weights, options, config, bar)
    return model


def _stage_of(outline: Decoder, config: EngineConfig, ranks: Ranks) -> Stage:
    """This process's layers. Raises `InvalidParameter` where there are fewer of them than stages."""
    sizes = [sum(math.prod(slot.shape) for _, slot in layer.slots()) for layer in outline.layers]
    cuts = cut_layers(sizes, outline.vocab_size * outline.head.inputs, ranks.size)
    check_split(config, ranks, None if cuts else f"it has {len(sizes)} layers")
    return Stage(ranks.rank, ranks.size, cuts or ())


def check_split(config: ModelSettings, ranks: Ranks | None, reason: str | None) -> None:
    """Raises `InvalidParameter` for a model of several processes that has a reason to be computed by one."""
    if ranks is not None and reason is not None:
        raise InvalidParameter(config.parallel_field, f"this model cannot be split: {reason}", ranks.size)


def _layer_options(
    plan: ModelPlan, weights: Weights, config: ModelSettings, ranks: Ranks | None = None
) -> LayerOptions:
    """Options of the layers of a model whose weights fit. Raises `OutOfMemory` if they do not."""
    # the first looks before others have taken any of the memory that ranks of a CPU have in common
    parts = 1 if ranks is None or (ranks.exact and ranks.rank == 0) else ranks.size
    check_memory(sum(weights.elements.values()) // parts, plan, weights.kept_bytes // parts)
    kernels = layer_kernels(config.attention_backend, plan.dtype, plan.device)
    release, forms = plan.checkpoint.release, weights.forms
    exact = config.activations == "exact"
    return LayerOptions(plan.dtype, plan.device, kernels, plan.bits, exact, release, forms=forms, ranks=ranks)


def _fill(
    slots: Mapping[str, TensorSlot], plan: ModelPlan, weights: Weights, options: LayerOptions, config: ModelSettings,
    bar: LoadProgress,
) -> None:  # fmt: skip
    """Weights into `slots`: made up, or from the checkpoint's files."""
    made_up = config.load_format == "dummy"
    file, others = (None, {}) if made_up else packed_file(plan, slots, weights.names, options, config)
    mapped = file is not None and file.map()
    parts = options.memory.parts()
    if parts:
        # packing weights into memory that the system has to find meanwhile takes several times as long
        bar.stage("mapping weights" if mapped else "making room for weights", len(parts))
        find_memory(parts, threads_for(config.num_threads, options.device), bar.advance, of_file=mapped)
    if made_up:
        bar.stage("making up weights")
        fill_randomly(slots, plan.dtype, plan.device)
        return
    load_weights(plan.checkpoint, slots, others if mapped else weights.names, bar)
    if file is not None and not mapped:
        bar.stage("keeping packed weights")
        mapped = file.write()
    options.memory.file_bytes = sum(part.size for part in parts) if mapped else 0


def _load_module(plan: ModelPlan, config: EngineConfig, bar: LoadProgress) -> tuple[CausalLM, list[str], int]:
    """transformers' own module, tried on a few tokens."""
    from asyncengine.execution.models.fallback.model import TransformersModel, freeze_rotary
    from asyncengine.execution.models.fallback.probing import probe
    from asyncengine.execution.models.fallback.quantized import quantize_module, resident_bytes

    bar.stage("reading weights")
    with typed(plan.checkpoint.folder):
        module = _make_module(plan, config)
        check_module(plan.hf_config.model_type, module)
        bar.stage("checking attention")
        probed = probe(module, plan.device)
    done = [] if plan.bits is None else quantize_module(module, plan.bits, config.activations == "exact")
    own_weights(module, MappedFiles(plan.checkpoint.files))
    freeze_rotary(module, plan.max_model_len, plan.device)
    return TransformersModel(module, probed), ["transformers x 1", *done], resident_bytes(module)


def stored_kinds(checkpoint: CheckpointSource) -> dict[str, str]:
    """{matrix: its type} of those that are quantized in their files, layer by layer."""
    kinds = {name: stored.kind for name, stored in checkpoint.tensors.items() if stored.quantized}

    def in_order(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isascii() and part.isdigit() else (-1, part) for part in name.split(".")]

    return {name.removesuffix(".weight"): kinds[name] for name in sorted(kinds, key=in_order)}


def _make_module(plan: ModelPlan, config: EngineConfig) -> Any:
    """transformers' model on the plan's device: from the checkpoint's files, or made up."""
    from asyncengine.execution.models.fallback.model import count_elements, make_random

    plan = replace(plan, bits=None)  # it is quantized once it is there
    with quiet_transformers():
        described = count_elements(plan.hf_config, config, plan.dtype)
    if config.load_format == "dummy":
        with quiet_transformers():
            check_memory(described, plan)
            module = make_random(plan.hf_config, config, plan.dtype, plan.device)
    else:
        held = sum(stored.elements for stored in plan.checkpoint.tensors.values())
        check_elements(described, held)
        check_memory(held, plan)
        module = _from_pretrained(plan, config).to(plan.device)
    return module.eval().requires_grad_(False)


def _from_pretrained(plan: ModelPlan, config: ModelSettings) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        module, info = AutoModelForCausalLM.from_pretrained(
            str(plan.checkpoint.folder),
            config=plan.hf_config,
            dtype=plan.dtype,
            use_safetensors=True,
            local_files_only=True,
            attn_implementation="eager",
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told apart below, by name
        )
    for kind, what in (("missing_keys", "lacks"), ("mismatched_keys", "has a wrong shape for")):
        bad = sorted(str(key[0]) if isinstance(key, tuple) else str(key) for key in info.get(kind) or ())
        if bad:
            more = f" and {len(bad) - 1} more tensors" if len(bad) > 1 else ""
            raise ModelNotFound(f"{plan.checkpoint.folder} {what} the tensor {bad[0]}{more}")
    return module


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No warnings and bars from transformers within; its settings are put back."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _generation_defaults(checkpoint: CheckpointSource, config: RequestSettings) -> dict[str, Any]:
    """The settings of generation_config.json, and over them the engine's `sampling_defaults`. Raises `ModelNotFound`
    for a value that no request could use."""
    file, content = checkpoint.folder / "generation_config.json", checkpoint.generation_defaults()
    found = {key: value for key, value in content.items() if value is not None and not key.startswith("_")}
    try:
        checked = SamplingParams.from_dict({name: found[name] for name in OPEN_PARAMETERS if name in found})
        if "stop_strings" in found:
            stops = found["stop_strings"] = SamplingParams(stop=found["stop_strings"]).stop
            if len(stops) > config.max_stop_strings or max(map(len, stops), default=0) > config.max_stop_string_length:
                raise InvalidParameter("stop_strings", "are more, or longer, than the engine takes")
    except InvalidParameter as error:
        raise ModelNotFound(f"{file}: {error}") from None
    if not isinstance(found.get("do_sample", False), bool):
        raise ModelNotFound(f"{file}: do_sample must be true or false")
    own = {name: getattr(checked, name) if name in OPEN_PARAMETERS else value for name, value in found.items()}
    given: dict[str, Any] = dict(config.sampling_defaults or ())  # type: ignore[arg-type]
    return {**own, **({"do_sample": True} if "temperature" in given else {}), **given}


def _eos_ids(vocab_size: int, defaults: dict[str, Any], *configs: Any) -> list[int]:
    """Every end-of-sequence id that generation_config.json or config.json names, in that order, of those that the model
    can write."""
    found: dict[int, None] = {}
    for value in (defaults.get("eos_token_id"), *(getattr(item, "eos_token_id", None) for item in configs)):
        for token in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size:
                found[token] = None
    return list(found)

"""Loading of models: decoders and encoders of families with a table, and transformers' modules for other decoders.

`description` describes a model in one pass over its checkpoint; weights then stream from their files into layers, by
name (`weights`). Decoders of families without a table run through `fallback`, or are refused with a reason.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncengine.config import EngineConfig, ModelSettings
from asyncengine.errors import InvalidParameter, ModelNotFound
from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.attention.factory import check_kv_dtype, kv_dtype
from asyncengine.execution.attention.flashinfer import load_flashinfer
from asyncengine.execution.attention.flashinfer_plan import LayerGroup, why_not
from asyncengine.execution.device.arena import populate_memory
from asyncengine.execution.device.cores import threads_for
from asyncengine.execution.device.memory import bound_kernel_caches
from asyncengine.execution.device.transfer import is_hopper
from asyncengine.execution.layers.kernels import layer_kernels
from asyncengine.execution.layers.options import LayerOptions, Stage, cut_layers
from asyncengine.execution.layers.sharded import LocalWeight, Ranks, ShardedWeight
from asyncengine.execution.layers.states import StateSpec
from asyncengine.execution.layers.step import CausalLM
from asyncengine.execution.layers.stored import TensorSlot
from asyncengine.execution.models.checkpoint import CheckpointOptions, open_checkpoint
from asyncengine.execution.models.decoder import Decoder, DecoderConfig
from asyncengine.execution.models.description import ModelDescription, describe_encoder, describe_model, typed
from asyncengine.execution.models.eagle import HeadedCheckpoint, headed
from asyncengine.execution.models.encoder import Encoder
from asyncengine.execution.models.families.encoders import by_stored_name, spelling_of
from asyncengine.execution.models.first_kernels import encoder_kernels_of, kernels_of
from asyncengine.execution.models.formats import CheckpointSource
from asyncengine.execution.models.hub import short_name
from asyncengine.execution.models.mapped import MappedFiles, own_weights
from asyncengine.execution.models.memory.needs import Weights, check_memory, outline_decoder, outline_encoder
from asyncengine.execution.models.multimodal import TextSource, placeholders
from asyncengine.execution.models.packed_file import packed_file
from asyncengine.execution.models.progress import LoadProgress
from asyncengine.execution.models.weights import fill_randomly, load_weights, slots_of
from asyncengine.kernels.api import CompileAhead

# FlashInfer's modules, built by several threads while weights are read.

logger = logging.getLogger("asyncengine")

_CORES_EACH = 3
"""Cores per build: a build runs one compiler for each of its sources, and each compiler takes up to two GiB."""


def modules_of(decoder: Decoder, page_size: int, kv_dtype: torch.dtype) -> list[Callable[[], object]]:
    """Functions that each build and load one FlashInfer module that the model uses, the slowest first. `page_size`:
    tokens per page. `kv_dtype`: type of the KV cache."""
    flashinfer = load_flashinfer()
    gated = {getattr(layer.mlp, "activation", "") for layer in decoder.config.layers} & {"silu", "gelu", "gelu_tanh"}
    builds: list[Callable[[], object]] = []
    if why_not(decoder.specs, decoder.dtype, page_size) is None:
        hopper = is_hopper(decoder.device)
        builds = attention_modules(flashinfer, decoder.specs, decoder.dtype, kv_dtype, hopper=hopper)
    return [*builds, *(partial(flashinfer.activation.get_act_and_mul_module, name) for name in sorted(gated))]


def attention_modules(
    flashinfer: Any, layers: Sequence[LayerSpec], dtype: torch.dtype, kv_dtype: torch.dtype, *, hopper: bool
) -> list[Callable[[], object]]:
    """The functions of `modules_of` that build attention, if all `layers` run on FlashInfer. `hopper`: the device has
    compute capability 9."""
    builds: dict[tuple[Any, ...], Callable[[], object]] = {}
    for group in map(LayerGroup.of, layers):
        # types of queries, keys, results and indices, dimensions, pos_encoding_mode NONE, and which masks there are
        signature = (dtype, kv_dtype, dtype, torch.int32, group.head_dim, group.head_dim, 0,
                group.window is not None, bool(group.softcap))  # fmt: skip
        if hopper and group.hopper(dtype, kv_dtype):
            builds["long", *signature] = partial(flashinfer.prefill.get_batch_prefill_module, "fa3", *signature, False)
        builds["prefill", *signature] = partial(flashinfer.prefill.get_batch_prefill_module, "fa2", *signature, False)
        if not group.decodes_on_tensor_cores:
            builds["decode", *signature] = partial(flashinfer.decode.get_batch_decode_module, *signature)
    return [*builds.values(), *([flashinfer.page.get_page_module] if builds else [])]


@contextmanager
def building(works: Sequence[Callable[[], object]], bar: LoadProgress) -> Iterator[None]:
    """Run `works` in threads during the block, and wait for them at its end. A failed build is only logged: it fails
    again, with its reason, when its kernel is first called."""
    if not works:
        yield
        return
    pool = ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // _CORES_EACH), "asyncengine-build")
    try:
        futures = [pool.submit(work) for work in works]
        yield
        bar.stage("compiling attention kernels", len(futures))
        for future in as_completed(futures):
            if (error := future.exception()) is not None:
                logger.debug("a module of FlashInfer's was not built ahead: %s", error)
            bar.advance()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True, kw_only=True)
class Loaded:
    """A loaded model, and facts about it."""

    name: str
    path: str
    """Folder, file or hub id that the model was loaded from."""
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
    """Bytes of weights in mapped pages of a file, which the system counts as free memory."""
    eos_token_ids: list[int] = field(default_factory=list)
    """End-of-sequence tokens; empty for an encoder."""
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    """The settings of generation_config.json (temperature, top_p, top_k, ...)."""
    stored: dict[str, str] = field(default_factory=dict)
    """{module: storage type} of matrices that are quantized in the files."""
    fused: list[str] = field(default_factory=list)
    """Numbers of modules by the form in which they run, e.g. "decoder x 1", "packed x 113"."""
    left_out: tuple[str, ...] = ()
    """Modules of the checkpoint that were not read, with their numbers of tensors, e.g. "vision_tower x 437"."""
    placeholders: dict[int, str] = field(default_factory=dict)
    """Token ids that stand for an image or a sound, and which of these."""


@dataclass(slots=True, kw_only=True)
class LoadedModel(Loaded):
    """A causal language model."""

    model: CausalLM
    input_vocab_size: int
    """Exclusive upper bound of input token ids."""
    layers: Sequence[LayerSpec]
    unsteady: str | None = None
    """Why a token's results may depend on the other tokens of its step; None if they do not."""
    states: Sequence[StateSpec] = ()
    no_mtp: str | None = None
    """Why the multi-token prediction head is not read; None if it is."""
    head: CheckpointSource | None = None
    """The checkpoint of an EAGLE-3 head that was loaded with the model."""


def why_untold(model: Any, experts: bool) -> str | None:
    """Why a `CausalLM` cannot return hidden states of its layers, or, if `experts`, routed experts; None if it can."""
    if not isinstance(model, Decoder):
        return "its layers are transformers' modules, which do not tell"
    if experts and not any(layer.mixtures() for layer in model.layers):
        return "the model has no experts"
    if model.options.ranks is not None or model.options.stage is not None:
        return "other processes that have a part of the model do not tell"
    return None if model.device.type == "cpu" else "steps on a GPU are graphs, which do not tell"


def expert_type(model: Any) -> torch.dtype | None:
    """The smaller of uint8 and int16 that holds the indices of the model's experts; None if `why_untold` says so."""
    if why_untold(model, True) is not None:
        return None
    most = max(mixture.router.config.experts for layer in model.layers for mixture in layer.mixtures())
    return torch.uint8 if most <= 256 else torch.int16


@dataclass(slots=True, kw_only=True)
class LoadedEncoder(Loaded):
    """An encoder, which gives hidden states or scores."""

    model: Encoder


def load_model(
    path_or_id: str, config: EngineConfig, progress: LoadProgress | None = None,
    checkpoint: CheckpointSource | None = None, ahead: CompileAhead | None = None, headless: bool = False,
    threads: Callable[[], AbstractContextManager[object]] = nullcontext, draft: CheckpointSource | None = None,
    ranks: Ranks | None = None,
) -> LoadedModel:  # fmt: skip
    """Load the model of a folder, file or hub id. `checkpoint`: the opened model; None: it is opened here. `ahead`
    starts to compile the kernels that the model needs; None: each is compiled at its first call. `headless`: no logits
    are needed. `threads()`: context in which weights are packed, once the names of kernels are known. `draft`: a draft
    model, which is joined to this one if it is an EAGLE-3 head. `ranks`: this process's rank among those that share the
    model; `InvalidParameter` is then raised for a model that cannot be split.

    Raises `ModelNotFound` (no such model, or files missing or broken), `UnsupportedModel` (a family or option that
    cannot run here), `OutOfMemory` (weights larger than free memory), `InvalidParameter` (max_model_len, device).
    """
    with progress or LoadProgress(config.show_progress) as bar:
        bar.stage("looking for the model")
        checkpoint = headed(checkpoint or open_checkpoint(path_or_id, CheckpointOptions.of(config)), draft)
        head = checkpoint.head if isinstance(checkpoint, HeadedCheckpoint) else None
        described = describe_model(path_or_id, checkpoint, config, headless)
        checkpoint = described.checkpoint
        if described.device.type == "cpu":
            bound_kernel_caches()
        model: CausalLM
        if described.structure is not None:
            with typed(checkpoint.folder):
                model, fused, nbytes = _load_decoder(described, config, bar, ahead, threads, ranks)
        else:
            check_split(ranks, "it runs through transformers' modules")
            with threads():
                exact = config.activations == "exact"
                model, fused, nbytes = _load_module(described, bar, exact, config.trust_remote_code)
    return LoadedModel(
        **_facts(path_or_id, described, fused, nbytes), model=model,
        eos_token_ids=described.eos_token_ids(model.vocab_size), vocab_size=model.vocab_size,
        input_vocab_size=model.input_vocab_size, layers=model.specs, unsteady=model.unsteady,
        mapped_bytes=model.options.memory.file_bytes if isinstance(model, Decoder) else 0, states=model.states,
        no_mtp=described.no_mtp, head=head, left_out=checkpoint.left_out if isinstance(checkpoint, TextSource) else (),
        placeholders=placeholders(described.hf_config),
    )  # fmt: skip


def _facts(path_or_id: str, described: ModelDescription, fused: list[str], nbytes: int) -> dict[str, Any]:
    """The fields of `Loaded` that are common to decoders and encoders."""
    return {
        "name": short_name(path_or_id), "path": path_or_id, "folder": described.checkpoint.folder,
        "hf_config": described.hf_config, "max_model_len": described.max_model_len, "dtype": described.dtype,
        "device": described.device, "weights_bytes": nbytes, "stored": dict(described.stored), "fused": fused,
        "generation_defaults": dict(described.generation_defaults),
    }  # fmt: skip


def load_encoder(
    path_or_id: str, config: EngineConfig, progress: LoadProgress | None = None,
    checkpoint: CheckpointSource | None = None, ahead: CompileAhead | None = None,
    threads: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> LoadedEncoder:  # fmt: skip
    """Load an encoder. Parameters and errors are those of `load_model`."""
    with progress or LoadProgress(config.show_progress) as bar:
        bar.stage("looking for the model")
        checkpoint = checkpoint or open_checkpoint(path_or_id, CheckpointOptions.of(config), writes=False)
        described = describe_encoder(checkpoint, config)
        if described.device.type == "cpu":
            bound_kernel_caches()
        with typed(checkpoint.folder):
            outline, weights = outline_encoder(described)
            options = _layer_options(described, weights, config.attention_backend, config.activations == "exact")
            model = Encoder(outline.config, options)
            if ahead is not None and config.attention_backend != "torch":
                ahead.start(encoder_kernels_of(model))
            with threads():
                spelling = spelling_of(described.hf_config.model_type)
                slots = by_stored_name(model.slots(), described.checkpoint.tensors, spelling)
                _fill(slots, described, weights, options, config, bar)
    facts = _facts(path_or_id, described, model.describe(), model.nbytes)
    return LoadedEncoder(**facts, model=model, vocab_size=model.vocab_size)


def _load_decoder(
    described: ModelDescription, config: EngineConfig, bar: LoadProgress, ahead: CompileAhead | None,
    threads: Callable[[], AbstractContextManager[object]], ranks: Ranks | None,
) -> tuple[Decoder, list[str], int]:  # fmt: skip
    """(the decoder with its weights, numbers of modules by form, bytes of weights). Names, shapes and free memory are
    checked before any memory is allocated."""
    outline, weights = outline_decoder(described)
    options = _layer_options(described, weights, config.attention_backend, config.activations == "exact", ranks)
    if ranks is not None and not ranks.exact and (described.bits is not None or weights.forms):
        check_split(ranks, "quantized matrices are divided on a CPU alone")
    if ranks is not None and ranks.stages > 1:
        within = ranks if ranks.size > 1 else None
        options = replace(options, ranks=within, stage=_stage_of(outline, ranks, apart=bool(config.stage_hosts)))
    decoder = Decoder(outline.config, options, described.max_model_len)
    if decoder.mtp is not None and decoder.unsteady is not None:  # drafts would change an unsteady model's results
        assert isinstance(described.structure, DecoderConfig)
        del decoder  # frees its memory before the next one takes as much
        plain = replace(described, structure=replace(described.structure, mtp=None))
        return _load_decoder(plain, config, bar, ahead, threads, ranks)
    if options.ranks is not None:
        weights_here = [linear.weight for layer in decoder.layers for linear in layer.linears()]
        split = any(isinstance(weight, (LocalWeight, ShardedWeight)) for weight in weights_here)
        reason = None if split else decoder.unsteady or "all of its matrices have too few outputs"
        check_split(ranks, reason, "tensor_parallel")
    kept = kv_dtype(config.kv_cache_dtype, described.dtype)
    if ahead is not None and config.attention_backend != "torch":
        check_kv_dtype(config, decoder.specs, decoder.dtype, decoder.device)
        ahead.start(*kernels_of(decoder, config.page_size, kept, described.generation_defaults))
    on_gpu = described.device.type == "cuda" and options.kernels.name != "torch"
    works = modules_of(decoder, config.page_size, kept) if on_gpu else []
    with threads(), building(works, bar):
        slots = decoder.slots() if described.dummy else slots_of(decoder, described.checkpoint)
        _fill(slots, described, weights, options, config, bar)
    return decoder, decoder.describe(), decoder.nbytes


def _stage_of(outline: Decoder, ranks: Ranks, *, apart: bool) -> Stage:
    """The layers of this process's pipeline stage. `apart`: other stages are on other machines. Raises
    `InvalidParameter` if there are fewer layers than stages."""
    sizes = [sum(math.prod(slot.shape) for _, slot in layer.slots()) for layer in outline.layers]
    cuts = cut_layers(sizes, outline.vocab_size * outline.head.inputs, ranks.stages)
    check_split(ranks, None if cuts else f"it has {len(sizes)} layers")
    stage = Stage(ranks.stage, ranks.stages, cuts or ())
    sources = {each: getattr(outline.config.layers[each].attention, "keys_of", None) for each in stage.run}
    if apart and any(source is not None and source not in stage.run for source in sources.values()):
        check_split(ranks, "layers read keys of layers that another machine would have", "stage_hosts")
    return stage


def check_split(ranks: Ranks | None, reason: str | None, setting: str = "") -> None:
    """Raise `InvalidParameter` if several processes are to share a model that has a `reason` not to be split.
    `setting`: the one to blame; "": the one that asks for several processes."""
    if ranks is not None and reason is not None:
        setting = setting or ("pipeline_parallel" if ranks.stages > 1 else "tensor_parallel")
        raise InvalidParameter(setting, f"this model cannot be split: {reason}", ranks.size * ranks.stages)


def _layer_options(
    described: ModelDescription, weights: Weights, attention_backend: str, exact: bool, ranks: Ranks | None = None
) -> LayerOptions:
    """Options of the layers of a model whose weights fit. `exact`: as in `LayerOptions`. Raises `OutOfMemory` if they
    do not fit."""
    # ranks on a CPU share its memory: the first one checks for all, before any rank has allocated
    processes = 1 if ranks is None or (ranks.exact and ranks.rank == ranks.stage == 0) else ranks.size * ranks.stages
    check_memory(sum(weights.elements.values()) // processes, described, weights.kept_bytes // processes)
    kernels = layer_kernels(attention_backend, described.dtype, described.device)
    release, forms = described.checkpoint.release, weights.forms
    return LayerOptions(
        described.dtype, described.device, kernels, described.bits, exact, release, forms=forms, ranks=ranks
    )


def _fill(
    slots: Mapping[str, TensorSlot], described: ModelDescription, weights: Weights, options: LayerOptions,
    config: ModelSettings, bar: LoadProgress,
) -> None:  # fmt: skip
    """Fill `slots` with random weights, or from the cache of packed weights and the checkpoint's files."""
    folder, most = None if described.dummy else config.weight_cache_dir, int(config.weight_cache_disk)
    file, others = packed_file(described, slots, weights.names, options, folder, most)
    mapped = file is not None and file.map()
    regions = options.memory.regions()
    if regions:
        # packing into memory whose pages the system must still allocate takes several times as long
        bar.stage("mapping weights" if mapped else "making room for weights", len(regions))
        populate_memory(regions, threads_for(config.num_threads, options.device), bar.advance, of_file=mapped)
    if described.dummy:
        bar.stage("making up weights")
        fill_randomly(slots, described.dtype, described.device)
        return
    load_weights(described.checkpoint, slots, others if mapped else weights.names, bar)
    if file is not None and not mapped:
        bar.stage("keeping packed weights")
        mapped = file.write()
    options.memory.file_bytes = sum(region.size for region in regions) if mapped else 0


def _load_module(
    described: ModelDescription, bar: LoadProgress, exact: bool, trust_remote_code: bool
) -> tuple[CausalLM, list[str], int]:
    """transformers' own module, probed on a few tokens. Returns as `_load_decoder`. `exact`: as in `LayerOptions`."""
    from asyncengine.execution.models.fallback import model as fallback
    from asyncengine.execution.models.fallback.probing import check_module, probe

    bar.stage("reading weights")
    with typed(described.checkpoint.folder):
        module = _make_module(described, trust_remote_code)
        check_module(described.hf_config.model_type, module)
        bar.stage("checking attention")
        recorder, logits = probe(module, described.device)
    done = [] if described.bits is None else fallback.quantize_module(module, described.bits, exact)
    own_weights(module, MappedFiles(described.checkpoint.files))
    fallback.freeze_rotary(module, described.max_model_len, described.device)
    model = fallback.TransformersModel(module, recorder, logits)
    return model, ["transformers x 1", *done], fallback.resident_bytes(module)


def _make_module(described: ModelDescription, trust_remote_code: bool) -> Any:
    """transformers' module on the described device, with weights from the checkpoint's files or random ones."""
    from transformers import AutoModelForCausalLM

    from asyncengine.execution.models.fallback.model import count_elements, make_random

    described = replace(described, bits=None)  # `check_memory` counts it unquantized: it is quantized after loading
    with quiet_transformers():
        elements = count_elements(described.hf_config, described.dtype, trust_remote_code)
        if described.dummy:
            check_memory(elements, described)
            module = make_random(described.hf_config, described.dtype, described.device, trust_remote_code)
        else:
            size = sum(stored.elements for stored in described.checkpoint.tensors.values())
            if elements > 4 * size:  # transformers would allocate the whole model before it misses a tensor
                text = f"config.json describes a model of {elements} weights, but the files hold only {size}"
                raise ModelNotFound(text)
            check_memory(size, described)
            module, info = AutoModelForCausalLM.from_pretrained(
                str(described.checkpoint.folder), config=described.hf_config, dtype=described.dtype,
                use_safetensors=True, local_files_only=True, attn_implementation="eager",
                trust_remote_code=trust_remote_code, output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
            # mismatched sizes were ignored to be reported with the tensor's name
            for report, verb in (("missing_keys", "lacks"), ("mismatched_keys", "has a wrong shape for")):
                bad = sorted(str(key[0]) if isinstance(key, tuple) else str(key) for key in info.get(report) or ())
                if bad:
                    more = f" and {len(bad) - 1} more tensors" if len(bad) > 1 else ""
                    raise ModelNotFound(f"{described.checkpoint.folder} {verb} the tensor {bad[0]}{more}")
            module = module.to(described.device)
    return module.eval().requires_grad_(False)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Context without warnings and progress bars of transformers, whose settings are restored afterwards."""
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

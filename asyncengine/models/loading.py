"""Loading a causal language model: the decoder for the families that are written down, transformers for all others.

A family's file (`families`) turns config.json into a `DecoderConfig`; weights then stream from their files into layers,
by name (`weights`). Every other family runs through transformers' modules (`fallback`), or is refused with a reason.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from asyncengine.attention.base import LayerSpec
from asyncengine.config import EngineConfig
from asyncengine.device.cores import threads_for
from asyncengine.device.memory import bound_kernel_caches, free_bytes, is_out_of_memory, limited_by
from asyncengine.errors import EngineError, InvalidParameter, ModelNotFound, OutOfMemory, UnsupportedModel
from asyncengine.kernels.arena import find_memory
from asyncengine.kernels.compile_ahead import CompileAhead
from asyncengine.kernels.cpu import compiler_missing
from asyncengine.layers.kernels import layer_kernels
from asyncengine.layers.options import LayerOptions
from asyncengine.layers.states import StateSpec
from asyncengine.layers.step import CausalLM
from asyncengine.models.checking import check_config, check_module, load_config, passed_over
from asyncengine.models.checkpoint import first_line, open_checkpoint
from asyncengine.models.decoder import Decoder, DecoderConfig
from asyncengine.models.families import MULTIMODAL, decoder_config_of
from asyncengine.models.first_kernels import kernels_of
from asyncengine.models.formats import CheckpointSource
from asyncengine.models.hub import short_name
from asyncengine.models.kernel_builds import building, modules_of
from asyncengine.models.layer_kinds import named
from asyncengine.models.loaded import Loaded
from asyncengine.models.mapped import MappedFiles, own_weights
from asyncengine.models.multimodal import TextPart, placeholders, text_part
from asyncengine.models.outline import outline_of
from asyncengine.models.plain_config import plain_config
from asyncengine.models.progress import LoadProgress
from asyncengine.models.sizes import LENGTH_FIELDS, check_elements
from asyncengine.models.weights import fill_randomly, load_weights, slots_of
from asyncengine.sampling_params import SamplingParams

logger = logging.getLogger("asyncengine")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float32}
_DEFAULT_LENGTH = 2048


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


def load_model(
    path_or_id: str,
    config: EngineConfig,
    progress: LoadProgress | None = None,
    checkpoint: CheckpointSource | None = None,
    ahead: CompileAhead | None = None,
    headless: bool = False,
    threads: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> LoadedModel:
    """Load a folder or hub id, of which `checkpoint` was opened already (None: not yet). `ahead` begins to compile the
    kernels that the model needs (None: they are compiled when they are called). `headless`: no logits are wanted.
    `threads()`: weights are prepared within, once the names of kernels are known.

    Raises `ModelNotFound` (no such model, or files missing or broken), `UnsupportedModel` (a family or option that
    cannot run here), `OutOfMemory` (weights larger than what is free), `InvalidParameter` (max_model_len, device).
    """
    with progress or LoadProgress(config.show_progress) as bar:
        bar.stage("looking for the model")
        checkpoint = checkpoint or open_checkpoint(path_or_id, config)
        with typed(checkpoint.folder):
            hf_config, described, max_model_len, checkpoint = read_model(path_or_id, checkpoint, config, headless)
        device = resolve_device(config.device)
        dtype = resolve_dtype(config, hf_config, checkpoint, device)
        defaults = _generation_defaults(checkpoint, config)
        bits = quantization_bits(config, dtype, device)
        if device.type == "cpu":
            bound_kernel_caches()
        model: CausalLM
        if described is not None:
            with typed(checkpoint.folder):
                model, fused, nbytes = _load_decoder(
                    described, checkpoint, config, dtype, device, bits, max_model_len, bar, ahead, defaults, threads
                )
        else:
            with threads():
                model, fused, nbytes = _load_module(
                    checkpoint, hf_config, config, dtype, device, bits, max_model_len, bar
                )
    text_config = hf_config.get_text_config()
    return LoadedModel(
        name=short_name(path_or_id),
        folder=checkpoint.folder,
        model=model,
        hf_config=hf_config,
        generation_defaults=defaults,
        eos_token_ids=_eos_ids(model.vocab_size, defaults, hf_config, text_config),
        vocab_size=model.vocab_size,
        input_vocab_size=model.input_vocab_size,
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
        layers=model.specs,
        unsteady=model.unsteady,
        states=model.states,
        weights_bytes=nbytes,
        stored=stored_kinds(checkpoint),
        fused=fused,
        left_out=checkpoint.left_out if isinstance(checkpoint, TextPart) else (),
        placeholders=placeholders(hf_config),
    )


def read_model(
    path_or_id: str, checkpoint: CheckpointSource, config: EngineConfig, headless: bool
) -> tuple[Any, DecoderConfig | None, int, CheckpointSource]:
    """(the configuration, what the decoder is built of, if it is native, the longest sequence, that of the checkpoint
    which is the language model). Raises as `load_model` does before it reads weights."""
    hf_config, described, max_model_len = read_config(path_or_id, checkpoint, config)
    described = _without_head(hf_config, described) if headless else described
    if described is not None and hf_config.model_type in MULTIMODAL:
        checkpoint = text_part(checkpoint, described)
    try:
        check_config(hf_config, checkpoint, described)
    except UnsupportedModel as error:
        if described is None and (setting := passed_over(hf_config, config)):
            raise UnsupportedModel(f"{error}; without {setting} its layers are those written down here") from error
        raise
    return hf_config, described, max_model_len, checkpoint


def _without_head(hf_config: Any, described: DecoderConfig | None) -> DecoderConfig:
    """An output layer takes no memory where it is the embedding, and is not missed where the files have none."""
    if described is None:
        raise UnsupportedModel(
            f"family {hf_config.model_type!r} runs through transformers' modules here, which give no vectors"
        )
    heads = (*described.ignored, rf"(.*\.)?{re.escape(described.head)}\..*", r"score\..*")
    return replace(described, tied=True, head_bias=False, ignored=heads)


def read_config(
    path_or_id: str, checkpoint: CheckpointSource, config: EngineConfig
) -> tuple[Any, DecoderConfig | None, int]:
    """(the configuration, what the decoder is built of, if it is native, the longest sequence). transformers' class is
    imported only where it is needed."""
    plain = plain_config(checkpoint.config, path_or_id) if config.fuse else None
    if plain is not None:
        length = _max_model_len(plain, config)
        described = decoder_config_of(plain, length)
        if described is not None:
            return plain, described, length
    hf_config = load_config(checkpoint, config)
    length = _max_model_len(hf_config, config)
    if plain is not None or not config.fuse:  # it was tried already, or is not to be
        return hf_config, None, length
    with named(checkpoint.config):
        return hf_config, decoder_config_of(hf_config, length), length


def _load_decoder(
    described: DecoderConfig, checkpoint: CheckpointSource, config: EngineConfig, dtype: torch.dtype,
    device: torch.device, bits: int | None, max_model_len: int, bar: LoadProgress, ahead: CompileAhead | None,
    defaults: Mapping[str, Any], threads: Callable[[], AbstractContextManager[object]],
) -> tuple[Decoder, list[str], int]:  # fmt: skip
    """The decoder with its weights. Names, shapes and memory are looked at before any memory is taken."""
    outline = outline_of(described, checkpoint, config, dtype, device, bits)
    weights = outline.weights
    check_memory(sum(weights.elements.values()), dtype, device, bits, weights.kept_bytes)
    kernels = layer_kernels(config.attention_backend, dtype, device)
    options = LayerOptions(dtype, device, kernels, bits, checkpoint.release, forms=weights.forms)
    decoder = Decoder(outline.decoder.config, options, max_model_len)
    if ahead is not None and config.attention_backend != "torch":
        ahead.start(*kernels_of(decoder, config.page_size, defaults))
    works = modules_of(decoder, config, dtype) if device.type == "cuda" and kernels.name != "torch" else []
    with threads(), building(works, bar):
        find_room(options, config, bar)
        if config.load_format == "dummy":
            bar.stage("making up weights")
            fill_randomly(decoder.slots(), dtype, device)
        else:
            load_weights(checkpoint, slots_of(decoder, checkpoint), weights.names, bar)
    return decoder, decoder.describe(), decoder.nbytes


def find_room(options: LayerOptions, config: EngineConfig, bar: LoadProgress) -> None:
    """Have the system find the memory that the model's layers were given, by all threads: packing weights into memory
    that has to be found meanwhile takes several times as long."""
    parts = options.memory.parts()
    if parts:
        bar.stage("making room for weights", len(parts))
        find_memory(parts, threads_for(config.num_threads, options.device), bar.advance)


def _load_module(
    checkpoint: CheckpointSource, hf_config: Any, config: EngineConfig, dtype: torch.dtype, device: torch.device,
    bits: int | None, max_model_len: int, bar: LoadProgress,
) -> tuple[CausalLM, list[str], int]:  # fmt: skip
    """transformers' own module, tried on a few tokens."""
    from asyncengine.models.fallback.model import TransformersModel
    from asyncengine.models.fallback.probing import probe
    from asyncengine.models.fallback.quantized import quantize_module, resident_bytes
    from asyncengine.models.fallback.rotary import freeze_rotary

    family = hf_config.model_type
    bar.stage("reading weights")
    with typed(checkpoint.folder):
        module = _make_module(checkpoint, hf_config, config, dtype, device)
        check_module(family, module)
        bar.stage("checking attention")
        probed = probe(module, device)
    done = [] if bits is None else quantize_module(module, bits)
    own_weights(module, MappedFiles(checkpoint.files))
    freeze_rotary(module, max_model_len, device)
    return TransformersModel(module, probed), ["transformers x 1", *done], resident_bytes(module)


def quantization_bits(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> int | None:
    """Bits of a weight, None if they are to stay as they are. Raises `InvalidParameter` where it cannot be done."""
    if config.quantization is None:
        return None
    missing = compiler_missing(dtype, device)
    if missing is not None:
        raise InvalidParameter("quantization", f"cannot be used here: {missing}", config.quantization)
    return {"int8": 8, "int4": 4}[config.quantization]


def resolve_device(name: str) -> torch.device:
    """ "auto" -> cuda when there is one, else cpu. Raises `InvalidParameter` for a device that is not there."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidParameter("device", 'must be "auto", "cpu", "cuda" or "cuda:N"', name) from None
    if device.type == "cuda":
        index = device.index or 0
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise InvalidParameter("device", "no such CUDA device on this machine", name)
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise InvalidParameter("device", 'must be "auto", "cpu", "cuda" or "cuda:N"', name)
    return device


def resolve_dtype(
    config: EngineConfig, hf_config: Any, checkpoint: CheckpointSource, device: torch.device
) -> torch.dtype:
    """The engine's setting, or what the checkpoint is in."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    declared = _declared_dtype(hf_config, checkpoint)
    if (is_quantized(checkpoint) or checkpoint.metadata) and declared == torch.float16 and device.type == "cpu":
        return torch.bfloat16  # most say float16, for the GPUs that they were made for; no kernel here reads it
    return declared


def stored_kinds(checkpoint: CheckpointSource) -> dict[str, str]:
    """{matrix: its type} of those that are quantized in their files, layer by layer."""
    kinds = checkpoint.stored_types()
    names = [name for name, stored in checkpoint.tensors.items() if stored.quantized]

    def in_order(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isascii() and part.isdigit() else (-1, part) for part in name.split(".")]

    return {name.removesuffix(".weight"): kinds[name] for name in sorted(names, key=in_order)}


def is_quantized(checkpoint: CheckpointSource) -> bool:
    """Whether any matrix is stored in small numbers."""
    return any(stored.quantized for stored in checkpoint.tensors.values())


def _declared_dtype(hf_config: Any, checkpoint: CheckpointSource) -> torch.dtype:
    """What the configuration says, or else what most numbers are stored in."""
    declared = getattr(hf_config, "dtype", None) or getattr(hf_config.get_text_config(), "dtype", None)
    if isinstance(declared, str):
        declared = _DTYPES.get(declared)
    if isinstance(declared, torch.dtype) and declared in _DTYPES.values():
        return declared
    elements: dict[torch.dtype, int] = {}
    for stored in checkpoint.tensors.values():
        if stored.kind in _STORED:
            elements[_STORED[stored.kind]] = elements.get(_STORED[stored.kind], 0) + stored.elements
    return max(elements, key=lambda dtype: elements[dtype], default=torch.float32)


def _make_module(
    checkpoint: CheckpointSource, hf_config: Any, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> Any:
    """transformers' model on `device`: from the checkpoint's files, or made up."""
    from asyncengine.models.fallback.dummy import count_elements, make_random

    if config.load_format == "dummy":
        with _quiet_transformers():
            check_memory(count_elements(hf_config, config, dtype), dtype, device)
            module = make_random(hf_config, config, dtype, device)
    else:
        with _quiet_transformers():
            check_elements(count_elements(hf_config, config, dtype), checkpoint.elements)
        check_memory(checkpoint.elements, dtype, device)
        module = _from_pretrained(checkpoint, hf_config, config, dtype).to(device)
    return module.eval().requires_grad_(False)


def check_memory(
    elements: int, dtype: torch.dtype, device: torch.device, bits: int | None = None, stored: int = 0
) -> None:
    """`stored`: bytes of matrices that stay as the checkpoint has them; `elements`: numbers of all others."""
    need, free = stored + (elements * dtype.itemsize if bits is None else elements * bits // 8), free_bytes(device)
    if need > free:
        form = str(dtype).removeprefix("torch.") if bits is None else f"int{bits}"
        raise OutOfMemory(
            f"the weights take {need / 2**30:.1f} GiB as {form}, but only {free / 2**30:.1f} GiB are free on {device}"
            + limited_by(device)
        )


def _from_pretrained(checkpoint: CheckpointSource, hf_config: Any, config: EngineConfig, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    with _quiet_transformers():
        module, info = AutoModelForCausalLM.from_pretrained(
            str(checkpoint.folder),
            config=hf_config,
            dtype=dtype,
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
            raise ModelNotFound(f"{checkpoint.folder} {what} the tensor {bad[0]}{more}")
    return module


@contextmanager
def typed(folder: Path) -> Iterator[None]:
    """Around what transformers and safetensors do with a folder's content: they raise whatever came up."""
    try:
        yield
    except Exception as error:
        if isinstance(error, EngineError) or is_out_of_memory(error):
            raise
        raise ModelNotFound(f"{folder} cannot be loaded: {type(error).__name__}: {first_line(error)}") from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
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


_DEFAULTS = ("temperature", "top_p", "top_k", "repetition_penalty")


def _generation_defaults(checkpoint: CheckpointSource, config: EngineConfig) -> dict[str, Any]:
    """What generation_config.json sets. Raises `ModelNotFound` for a value that no request could be served with."""
    file, content = checkpoint.folder / "generation_config.json", checkpoint.generation_defaults()
    found = {key: value for key, value in content.items() if value is not None and not key.startswith("_")}
    try:
        checked = SamplingParams.from_dict({name: found[name] for name in _DEFAULTS if name in found})
        if "stop_strings" in found:
            stops = found["stop_strings"] = SamplingParams(stop=found["stop_strings"]).stop
            if len(stops) > config.max_stop_strings or max(map(len, stops), default=0) > config.max_stop_string_length:
                raise InvalidParameter("stop_strings", "are more, or longer, than the engine takes")
    except InvalidParameter as error:
        raise ModelNotFound(f"{file}: {error}") from None
    if not isinstance(found.get("do_sample", False), bool):
        raise ModelNotFound(f"{file}: do_sample must be true or false")
    return {name: getattr(checked, name) if name in _DEFAULTS else value for name, value in found.items()}


def _eos_ids(vocab_size: int, defaults: dict[str, Any], *configs: Any) -> list[int]:
    """Every end-of-sequence id that generation_config.json or config.json names, in that order, of those that the model
    can write."""
    found: dict[int, None] = {}
    for value in (defaults.get("eos_token_id"), *(getattr(item, "eos_token_id", None) for item in configs)):
        for token in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size:
                found[token] = None
    return list(found)


def _max_model_len(hf_config: Any, config: EngineConfig) -> int:
    text_config = hf_config.get_text_config()
    lengths = [getattr(text_config, name, None) for name in LENGTH_FIELDS]
    own = next((value for value in lengths if isinstance(value, int) and value > 0), None)
    if config.max_model_len is None:
        return own or _DEFAULT_LENGTH
    if own is not None and config.max_model_len > own:
        raise InvalidParameter("max_model_len", f"must not exceed the model's own {own}", config.max_model_len)
    return config.max_model_len

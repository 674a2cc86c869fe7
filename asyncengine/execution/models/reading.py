"""From an opened checkpoint to the plan of a model: its configuration, what it is built of, device and types.

A family's file (`families`) turns config.json into a `DecoderConfig` or an `EncoderConfig`. Nothing is allocated here,
and no weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from asyncengine.config import BatchingSettings, EngineConfig, ModelSettings
from asyncengine.errors import EngineError, InvalidParameter, ModelNotFound, UnsupportedModel
from asyncengine.execution.device.memory import is_out_of_memory
from asyncengine.execution.layers.stored_weight import stored_missing
from asyncengine.execution.models.checking import check_config, load_config, misnamed, passed_over
from asyncengine.execution.models.config import MissingField
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.encoder import EncoderConfig
from asyncengine.execution.models.families import MULTIMODAL, NATIVE, decoder_config_of, native_config
from asyncengine.execution.models.families.encoders import encoder_config_of
from asyncengine.execution.models.formats import CheckpointSource, first_line
from asyncengine.execution.models.multimodal import text_part
from asyncengine.execution.models.refusals import LENGTH_FIELDS

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float32}
_DEFAULT_LENGTH = 2048
_CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Everything that is known of a model before memory is taken for it."""

    checkpoint: CheckpointSource
    """The language model's part of it, where there are others."""
    hf_config: Any
    described: DecoderConfig | EncoderConfig | None
    """None: it runs through transformers' modules."""
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    bits: int | None
    """Bits of a weight that the engine quantizes; None: weights keep their type."""


def read_model(
    path_or_id: str, checkpoint: CheckpointSource, config: EngineConfig, headless: bool = False,
    device: torch.device | None = None,
) -> ModelPlan:  # fmt: skip
    """The plan of a causal language model. `headless`: no logits are wanted. `device`: see `ModelPlan.device`; None: as
    `config` says.

    Raises `ModelNotFound`, `UnsupportedModel` (a family or option that cannot run here), `InvalidParameter`
    (max_model_len, device, quantization).
    """
    with typed(checkpoint.folder):
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
    return _plan(checkpoint, config, hf_config, described, max_model_len, device)


def read_encoder(checkpoint: CheckpointSource, config: EngineConfig, device: torch.device | None = None) -> ModelPlan:
    """The plan of an encoder. Raises as `read_model`."""
    with typed(checkpoint.folder):
        hf_config = load_config(checkpoint, config)
        architectures = checkpoint.config.get("architectures") or ()
        classifies = any(isinstance(name, str) and name.endswith(_CLASSIFIER) for name in architectures)
        described = encoder_config_of(hf_config, None, classifies)
        if config.max_model_len is not None:
            if config.max_model_len > described.max_model_len:
                limit = f"must not exceed the model's own {described.max_model_len}"
                raise InvalidParameter("max_model_len", limit, config.max_model_len)
            described = encoder_config_of(hf_config, config.max_model_len, classifies)
    return _plan(checkpoint, config, hf_config, described, described.max_model_len, device)


def _plan(
    checkpoint: CheckpointSource, config: EngineConfig, hf_config: Any, described: DecoderConfig | EncoderConfig | None,
    max_model_len: int, device: torch.device | None,
) -> ModelPlan:  # fmt: skip
    device = device or resolve_device(config.device)
    dtype = resolve_dtype(config, hf_config, checkpoint, device)
    bits = quantization_bits(config, dtype, device)
    return ModelPlan(checkpoint, hf_config, described, max_model_len, device, dtype, bits)


def _without_head(hf_config: Any, described: DecoderConfig | None) -> DecoderConfig:
    """The decoder whose output layer takes no memory, as if it were the embedding, and may be missing in the files."""
    if described is None:
        raise UnsupportedModel(
            f"family {hf_config.model_type!r} runs through transformers' modules here, which give no vectors"
        )
    heads = (*described.ignored, rf"(.*\.)?{re.escape(described.head)}\..*", r"score\..*")
    return replace(described, tied=True, head_bias=False, ignored=heads)


def read_config(
    path_or_id: str, checkpoint: CheckpointSource, config: EngineConfig
) -> tuple[Any, DecoderConfig | None, int]:
    """(the configuration, what the decoder is built of, if it is native, the longest sequence).

    A family that is written down reads its configuration itself. transformers' class is imported where it does not, or
    where fields are missing for which only that class has defaults.
    """
    content = checkpoint.config
    own_code = config.trust_remote_code and "auto_map" in content
    native = config.fuse and not own_code and content.get("model_type") in (*NATIVE, *MULTIMODAL)
    if native and (error := misnamed(content)):
        raise error
    refused = not config.fuse
    if (own := native_config(content, path_or_id) if native else None) is not None:
        length = _max_model_len(own, config)
        with suppress(MissingField):
            described = decoder_config_of(own, length)
            if described is not None:
                return own, described, length
            refused = True  # an option of it is not written down
    hf_config = load_config(checkpoint, config)
    length = _max_model_len(hf_config, config)
    return hf_config, None if refused else decoder_config_of(hf_config, length), length


def _max_model_len(hf_config: Any, config: BatchingSettings) -> int:
    text_config = hf_config.get_text_config()
    lengths = [getattr(text_config, name, None) for name in LENGTH_FIELDS]
    own = next((value for value in lengths if isinstance(value, int) and value > 0), None)
    if config.max_model_len is None:
        return own or _DEFAULT_LENGTH
    if own is not None and config.max_model_len > own:
        raise InvalidParameter("max_model_len", f"must not exceed the model's own {own}", config.max_model_len)
    return config.max_model_len


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
    config: ModelSettings, hf_config: Any, checkpoint: CheckpointSource, device: torch.device
) -> torch.dtype:
    """The engine's setting, or else the type that the checkpoint declares or most of its numbers are stored in."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    declared = _declared_dtype(hf_config, checkpoint)
    quantized = any(stored.quantized for stored in checkpoint.tensors.values())
    if (quantized or checkpoint.metadata) and declared == torch.float16 and device.type == "cpu":
        return torch.bfloat16  # most say float16, for the GPUs that they were made for; no kernel here reads it
    return declared


def _declared_dtype(hf_config: Any, checkpoint: CheckpointSource) -> torch.dtype:
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


def quantization_bits(config: ModelSettings, dtype: torch.dtype, device: torch.device) -> int | None:
    """Bits of a weight, None if they are to stay as they are. Raises `InvalidParameter` where it cannot be done."""
    if config.quantization is None:
        return None
    missing = stored_missing(dtype, device)
    if missing is not None:
        raise InvalidParameter("quantization", f"cannot be used here: {missing}", config.quantization)
    return {"int8": 8, "int4": 4}[config.quantization]


@contextmanager
def typed(folder: Path) -> Iterator[None]:
    """Turns whatever transformers and safetensors raise of a folder's content into `ModelNotFound`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, EngineError) or is_out_of_memory(error):
            raise
        raise ModelNotFound(f"{folder} cannot be loaded: {type(error).__name__}: {first_line(error)}") from error

"""Description of a model before any memory is allocated for it, made in one pass over its checkpoint.

The steps, in the order in which they are taken and may be read:

1. `checkpoint.open_checkpoint` finds the files, reads config.json and the headers of the others. For a GGUF file,
   `formats.gguf.model` makes the equivalent config.json: from here on there is no difference.
2. `pooling_of` tells text generators from embedders and rerankers.
3. `read_config`: the family's table in `families` turns the content into layers. Without a table, or with an option
   that it lacks, transformers' class reads it (`fallback.probing`), and its modules run.
4. `multimodal.text_source` finds the language model's tensors among those of a multimodal model.
5. `check_config` refuses models that cannot run. (`refusals` has earlier checks, which do not depend on the family.)
6. Device, types and default sampling parameters are settled, which completes the `ModelDescription`.

No weight is read here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from asyncengine.config import EngineConfig
from asyncengine.errors import EngineError, InvalidParameter, ModelNotFound, UnsupportedModel
from asyncengine.execution.device.memory import is_out_of_memory
from asyncengine.execution.layers.stored_weight import stored_missing
from asyncengine.execution.models.config import MissingField
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.eagle import EagleConfig, with_eagle
from asyncengine.execution.models.encoder import EncoderConfig
from asyncengine.execution.models.fallback.probing import ATTENTION_LAYERS, check_family, load_config, named_layer_types
from asyncengine.execution.models.families import MULTIMODAL, NATIVE, decoder_config_of, native_config
from asyncengine.execution.models.families.encoders import encoder_config_of, is_encoder_config
from asyncengine.execution.models.formats import CheckpointSource, first_line
from asyncengine.execution.models.multimodal import text_source, with_head
from asyncengine.execution.models.pooling_files import read_pooling
from asyncengine.execution.models.refusals import LENGTH_FIELDS, check_architectures, check_files, misnamed
from asyncengine.execution.models.weights import why_no_head
from asyncengine.pooling_spec import PoolingSpec
from asyncengine.sampling_params import OPEN_PARAMETERS, SamplingParams

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float32}
_BITS = {None: None, "int8": 8, "int4": 4}
_DEFAULT_LENGTH = 2048
_CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Everything that is known of a model before memory is allocated for it."""

    checkpoint: CheckpointSource
    """The checkpoint; of a multimodal model, the language model's tensors in it."""
    hf_config: Any
    """A `ModelConfig`, or transformers' config object."""
    structure: DecoderConfig | EncoderConfig | None
    """Layers and sizes; None if the model runs through transformers' modules."""
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    bits: int | None
    """Bits to which the engine quantizes weights; None if they keep their type."""
    stored: Mapping[str, str]
    """{module: storage type} of the matrices that are quantized in the files."""
    dummy: bool = False
    """Weights are random and no weight file is read (`load_format="dummy"`)."""
    no_mtp: str | None = None
    """Why the multi-token prediction head is not read; None if it is in `structure`."""
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The settings of generation_config.json (temperature, top_p, top_k, ...), overridden by the engine's own."""

    def eos_token_ids(self, vocab_size: int) -> list[int]:
        """End-of-sequence ids below `vocab_size` that generation_config.json or config.json names, in that order."""
        configs = (self.hf_config, self.hf_config.get_text_config())
        configured = [getattr(config, "eos_token_id", None) for config in configs]
        values = (self.generation_defaults.get("eos_token_id"), *configured)
        listed = (token for value in values for token in (value if isinstance(value, (list, tuple)) else [value]))
        return list(dict.fromkeys(token for token in listed if type(token) is int and 0 <= token < vocab_size))


def describe_model(
    path_or_id: str, checkpoint: CheckpointSource, config: EngineConfig, headless: bool = False,
    device: torch.device | None = None,
) -> ModelDescription:  # fmt: skip
    """The description of a causal language model. `headless`: no logits are needed. `device`: where it is to run, which
    may be another machine's device; None: as `config` says.

    Raises `ModelNotFound`, `UnsupportedModel` (a family or option that cannot run here), `InvalidParameter`
    (max_model_len, device, quantization).
    """
    with typed(checkpoint.folder):
        own_code = config.trust_remote_code
        hf_config, structure, max_model_len = read_config(
            path_or_id, checkpoint, config.max_model_len, fuse=config.fuse, trust_remote_code=own_code
        )
        structure = _without_head(hf_config, structure) if headless else structure
        structure = with_eagle(structure, checkpoint, max_model_len)
        device = device or resolve_device(config.device)
        if structure is not None and hf_config.model_type in MULTIMODAL:
            checkpoint = text_source(checkpoint, structure)
        no_mtp = _why_no_mtp(structure, checkpoint, config, device, headless)
        if structure is not None and no_mtp is not None:
            structure = replace(structure, mtp=None)
        try:
            check_config(hf_config, checkpoint, structure)
        except UnsupportedModel as error:
            native = structure is None and hf_config.get_text_config().model_type in NATIVE
            foreign = own_code and not type(hf_config).__module__.startswith("transformers.")
            setting = "fuse=False" if not config.fuse else "trust_remote_code=True" if foreign else None
            if native and setting is not None:
                raise UnsupportedModel(f"{error}; without {setting} its layers are those written down here") from error
            raise
    forms = _number_forms(checkpoint, hf_config, device, config.dtype, config.quantization)
    given: dict[str, Any] = dict(config.sampling_defaults or ())  # type: ignore[arg-type]
    defaults = _generation_defaults(checkpoint, given, config.max_stop_strings, config.max_stop_string_length)
    dummy = config.load_format == "dummy"
    return ModelDescription(
        checkpoint, hf_config, structure, max_model_len, device, *forms, dummy, no_mtp, generation_defaults=defaults
    )


def describe_encoder(
    checkpoint: CheckpointSource, config: EngineConfig, device: torch.device | None = None
) -> ModelDescription:
    """The description of an encoder. Raises as `describe_model`."""
    with typed(checkpoint.folder):
        hf_config = load_config(checkpoint, config.trust_remote_code)
        architectures = checkpoint.config.get("architectures") or ()
        classifies = any(isinstance(name, str) and name.endswith(_CLASSIFIER) for name in architectures)
        structure = encoder_config_of(hf_config, None, classifies)
        if config.max_model_len is not None:
            _check_length(config.max_model_len, structure.max_model_len)
            structure = encoder_config_of(hf_config, config.max_model_len, classifies)
    device = device or resolve_device(config.device)
    forms = _number_forms(checkpoint, hf_config, device, config.dtype, config.quantization)
    dummy = config.load_format == "dummy"
    return ModelDescription(checkpoint, hf_config, structure, structure.max_model_len, device, *forms, dummy)


def _number_forms(
    checkpoint: CheckpointSource, hf_config: Any, device: torch.device, dtype: str, quantization: str | None
) -> tuple[torch.dtype, int | None, Mapping[str, str]]:
    """`dtype`, `bits` and `stored` of a `ModelDescription`, by the settings `dtype` and `quantization`. Raises
    `InvalidParameter` where weights cannot be quantized."""
    stored = checkpoint.quantized_types()
    model_dtype = _DTYPES.get(dtype) or _dtype_of(hf_config, checkpoint, device, quantized=bool(stored))
    if quantization is not None and (missing := stored_missing(model_dtype, device)) is not None:
        raise InvalidParameter("quantization", f"cannot be used here: {missing}", quantization)
    return model_dtype, _BITS[quantization], stored


def pooling_of(checkpoint: CheckpointSource, task: str, pooling: str | None) -> PoolingSpec | None:
    """The pooling that the model's files and the settings `task` and `pooling` specify; None for a text generator.
    Raises as `read_pooling`, and `UnsupportedModel` for a model that can neither generate text nor pool."""
    if checkpoint.metadata and task == "auto" and pooling is None:
        return None  # a GGUF file, whose pooling settings are not read
    encoder = is_encoder_config(checkpoint.config)
    spec = read_pooling(checkpoint.root(), checkpoint.config, task, pooling, encoder=encoder)
    if spec is None:
        check_files(checkpoint.folder)
        check_architectures(checkpoint.folder, checkpoint.config)
    return spec


def is_headless(pooling: PoolingSpec | None) -> bool:
    """Whether the pooling reads hidden states only, so that the output layer is not needed."""
    return pooling is not None and not pooling.scores_tokens


def read_config(
    path_or_id: str, checkpoint: CheckpointSource, max_model_len: int | None = None, *, fuse: bool = True,
    trust_remote_code: bool = False,
) -> tuple[Any, DecoderConfig | None, int]:  # fmt: skip
    """(the configuration, the decoder's structure or None if it runs through transformers, the longest sequence).

    The configuration of a family with a table is read without transformers' class, unless fields are missing whose
    defaults only that class knows, or `fuse` is off. `max_model_len`: the longest sequence; None: the model's own.
    """
    content = checkpoint.config
    own_code = trust_remote_code and "auto_map" in content
    native = fuse and not own_code and content.get("model_type") in (*NATIVE, *MULTIMODAL)
    if native and (error := misnamed(content)):
        raise error
    refused = not fuse
    if (native_fields := native_config(content, path_or_id) if native else None) is not None:
        length = _max_model_len(native_fields, max_model_len)
        with suppress(MissingField):  # a field whose default only transformers' class knows: it reads the file below
            structure = decoder_config_of(native_fields, length)
            if structure is not None:
                return native_fields, with_head(structure, content), length
            refused = True  # the table lacks an option of the model
    hf_config = load_config(checkpoint, trust_remote_code)
    length = _max_model_len(hf_config, max_model_len)
    return hf_config, with_head(None if refused else decoder_config_of(hf_config, length), content), length


def _why_no_mtp(
    structure: DecoderConfig | None, checkpoint: CheckpointSource, config: EngineConfig, device: torch.device,
    headless: bool,
) -> str | None:  # fmt: skip
    """Why the multi-token prediction head is not read; None if it is."""
    if structure is None or structure.mtp is None:
        return "none is known of this family"
    apart = isinstance(structure.mtp, EagleConfig)
    if config.load_format == "dummy":
        # there are no tensors to look at: config.json says whether the checkpoint has a head
        text = checkpoint.config.get("text_config") or checkpoint.config
        if not apart and not any(text.get(count) for count in ("num_nextn_predict_layers", "mtp_num_hidden_layers")):
            return "the model has none"
    elif (reason := why_no_head(structure, checkpoint)) is not None:
        return reason
    reasons = {
        "mtp is off": not config.mtp and not apart,
        "there is a draft model": config.draft_model is not None and not apart,
        "nothing is to be guessed": config.speculation != "auto" or headless,
        "nothing can be guessed here": device.type != "cpu" or config.attention_backend == "torch",
        "several processes have the model": config.tensor_parallel > 1 or config.pipeline_parallel > 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _max_model_len(hf_config: Any, wanted: int | None) -> int:
    text_config = hf_config.get_text_config()
    lengths = (getattr(text_config, name, None) for name in LENGTH_FIELDS)
    model_length = next((value for value in lengths if isinstance(value, int) and value > 0), None)
    if wanted is None:
        return model_length or _DEFAULT_LENGTH
    if model_length is not None:
        _check_length(wanted, model_length)
    return wanted


def _check_length(wanted: int, model_length: int) -> None:
    if wanted > model_length:
        raise InvalidParameter("max_model_len", f"must not exceed the model's own {model_length}", wanted)


def _without_head(hf_config: Any, structure: DecoderConfig | None) -> DecoderConfig:
    """The decoder without an output layer: declared as tied, it takes no memory and may be missing in the files."""
    if structure is None:
        raise UnsupportedModel(
            f"family {hf_config.model_type!r} runs through transformers' modules here, which give no vectors"
        )
    heads = (*structure.ignored, rf"(.*\.)?{re.escape(structure.head)}\..*", r"score\..*")
    return replace(structure, tied=True, head_bias=False, ignored=heads)


def check_config(hf_config: Any, checkpoint: CheckpointSource, structure: DecoderConfig | None) -> None:
    """Refuse a model whose configuration shows that it cannot run. Raises `UnsupportedModel`.

    With a `structure`, transformers' classes are not consulted, as importing them takes longer than reading a small
    model. Layer types of a structure with recurrent states were checked when it was built.
    """
    family, layers = hf_config.model_type, () if structure is None else structure.layers
    if structure is None:
        check_family(hf_config, checkpoint)
    keeps_states = any(layer.state is not None for layer in layers)
    # layers whose attention is limited to chunks of positions (Llama 4)
    in_chunks = any(getattr(layer.attention, "chunk", None) is not None for layer in layers)
    text_config = hf_config.get_text_config()
    for name in named_layer_types(text_config):
        if name == "chunked_attention" and not in_chunks:
            raise UnsupportedModel(f"family {family!r} has layers of type {name!r}, which is not written down for it")
        if name not in (*ATTENTION_LAYERS, "chunked_attention") and not keeps_states:
            raise UnsupportedModel(f"family {family!r} has layers of type {name!r}, which keep no plain KV cache")
    if getattr(text_config, "use_bidirectional_attention", None) not in (None, False, "vision"):  # no images here
        raise UnsupportedModel(f"family {family!r} is set to bidirectional attention")


def resolve_device(name: str) -> torch.device:
    """The device of the setting: "auto" is the GPU if there is one. Raises `InvalidParameter` for a missing device."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cuda":
        index = device.index or 0
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise InvalidParameter("device", "no such CUDA device on this machine", name)
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise InvalidParameter("device", 'must be "auto", "cpu", "cuda" or "cuda:N"', name)
    return device


def _dtype_of(hf_config: Any, checkpoint: CheckpointSource, device: torch.device, *, quantized: bool) -> torch.dtype:
    """The dtype that the checkpoint declares, or in which most of its numbers are stored."""
    declared = getattr(hf_config, "dtype", None) or getattr(hf_config.get_text_config(), "dtype", None)
    if isinstance(declared, str):
        declared = _DTYPES.get(declared)
    if not isinstance(declared, torch.dtype) or declared not in _DTYPES.values():
        elements = Counter[torch.dtype]()
        for stored in checkpoint.tensors.values():
            if stored.dtype in _STORED:
                elements[_STORED[stored.dtype]] += stored.elements
        declared = max(elements, key=lambda dtype: elements[dtype], default=torch.float32)
    if (quantized or checkpoint.metadata) and declared == torch.float16 and device.type == "cpu":
        return torch.bfloat16  # most say float16, for the GPUs that they were made for; no kernel here reads it
    return declared


@contextmanager
def typed(folder: Path) -> Iterator[None]:
    """Turn errors that transformers and safetensors raise for a folder's content into `ModelNotFound`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, EngineError) or is_out_of_memory(error):
            raise
        raise ModelNotFound(f"{folder} cannot be loaded: {type(error).__name__}: {first_line(error)}") from error


def _generation_defaults(
    checkpoint: CheckpointSource, given: Mapping[str, Any], max_stop_strings: int, max_stop_string_length: int
) -> dict[str, Any]:
    """The settings of generation_config.json, overridden by those `given` to the engine. Raises `ModelNotFound` for a
    value that no request could use, such as more or longer `stop_strings` than the engine takes."""
    file, content = checkpoint.folder / "generation_config.json", checkpoint.generation_defaults()
    settings = {key: value for key, value in content.items() if value is not None and not key.startswith("_")}
    try:
        checked = SamplingParams.from_dict({name: settings[name] for name in OPEN_PARAMETERS if name in settings})
        if "stop_strings" in settings:
            stops = settings["stop_strings"] = SamplingParams(stop=settings["stop_strings"]).stop
            if len(stops) > max_stop_strings or max(map(len, stops), default=0) > max_stop_string_length:
                raise InvalidParameter("stop_strings", "are more, or longer, than the engine takes")
    except InvalidParameter as error:
        raise ModelNotFound(f"{file}: {error}") from None
    if not isinstance(settings.get("do_sample", False), bool):
        raise ModelNotFound(f"{file}: do_sample must be true or false")
    defaults = {name: getattr(checked, name) if name in OPEN_PARAMETERS else value for name, value in settings.items()}
    # a temperature in the engine's settings asks for sampling, whatever the file says of `do_sample`
    return {**defaults, **({"do_sample": True} if "temperature" in given else {}), **given}

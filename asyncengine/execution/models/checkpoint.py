"""Checks of a model's folder before any weight is read: config.json, shards, and the headers of their tensors.

torch is imported only for a quantized checkpoint, so that a wrong path is refused at once.

Only safetensors files are ever opened. Pickled weights (`pytorch_model.bin`, `*.pt`) can run code when they are loaded:
they are refused and never read.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter, ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.models import formats
from asyncengine.execution.models.hub import download, parse_name
from asyncengine.execution.models.mapped import OpenFiles
from asyncengine.execution.models.pooling_files import root_folder, transformer_folder
from asyncengine.execution.models.refusals import check_architectures, check_files, check_sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from asyncengine.execution.layers.stored import StoredMatrix
    from asyncengine.execution.models.formats.stored_tensors import MatrixSpec, StoredTensors

    Find = Callable[[Mapping[str, Any], StoredTensors], dict[str, MatrixSpec]]
    """(quantization_config, tensors) -> matrices by the names that they have without quantization. Raises
    `ModelNotFound` for tensors that do not fit together, `UnsupportedModel` for a variant that is not read."""

# The quantization format of a safetensors checkpoint, and its quantized matrices.

METHODS: Mapping[str, str] = {
    "awq": "integer_formats.find_awq",
    "gptq": "integer_formats.find_gptq",
    "compressed-tensors": "integer_formats.find_compressed",
    "fp8": "float_formats.find_fp8",
    "fbgemm_fp8": "float_formats.find_fp8",
    "mxfp4": "float_formats.find_mxfp4",
    "modelopt": "float_formats.find_modelopt",
}
"""quant_method -> the function among `formats` that finds its matrices."""
_OWN_FILES = (("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("hf_quant_config.json", "modelopt"))
"""Files that may have the quantization config if config.json has none, with the quant_method of each."""
_OF_THE_CACHE = re.compile(r".*(attn|k_proj|v_proj|q_proj)\.([kqv]|kv|output|prob)_(scale|zero_point)")
"""Scales of a quantized KV cache."""


def quantization_of(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization config of a checkpoint, with its `quant_method`; None if it is not quantized."""
    nested = config.get("text_config")
    for section in (config, nested if isinstance(nested, Mapping) else {}):
        for name in ("quantization_config", "compression_config"):
            if section.get(name):
                settings = section[name]
                if not isinstance(settings, Mapping):
                    raise ModelNotFound(f"{folder / 'config.json'}: {name} must be an object")
                return settings if name == "quantization_config" else {"quant_method": "compressed-tensors", **settings}
    for name, method in _OWN_FILES:
        if (folder / name).is_file():
            settings = formats.read_json(folder / name, str(folder))
            nested = settings.get("quantization")
            return {"quant_method": method, **(nested if isinstance(nested, Mapping) else {}), **settings}
    return None


def method_of(settings: Mapping[str, Any]) -> str:
    """The quant_method of a quantization config, shortened for messages."""
    return shorten(str(settings.get("quant_method", "unknown")), 80)


def find_matrices(settings: Mapping[str, Any], tensors: StoredTensors) -> dict[str, MatrixSpec]:
    """The quantized matrices of a checkpoint, by the names that they have without quantization.

    Raises `UnsupportedModel` for a format that is not read, `ModelNotFound` for tensors that do not fit together.
    """
    packing = str(settings.get("packing_format", ""))
    if settings.get("quant_method") == "auto-round" and packing.startswith("auto_round:auto_"):
        # AutoRound writes the layout of another method, and lists modules with other settings in `extra_config`
        named = {key: settings[key] for key in ("bits", "group_size") if key in settings}
        other = packing.removeprefix("auto_round:auto_")
        settings = {**named, "quant_method": other, "dynamic": settings.get("extra_config")}
    method = method_of(settings)
    if method not in METHODS:
        raise UnsupportedModel(
            f"checkpoints quantized with {method} are not read; {', '.join(sorted(METHODS))} and GGUF are. Use the "
            "unquantized weights, and quantization='int8' or 'int4'"
        )
    module, _, name = METHODS[method].partition(".")
    find: Find = getattr(import_module(f"asyncengine.execution.models.formats.{module}"), name)
    return find(settings, tensors)


def by_logical_name(
    folder: Path, tensors: Mapping[str, formats.StoredTensor], matrices: Mapping[str, MatrixSpec]
) -> dict[str, formats.StoredTensor]:
    """The checkpoint's tensors under the names of an unquantized one: each matrix replaces its numbers, scales etc.

    Raises `ModelNotFound` for a matrix that is stored both quantized and unquantized.
    """
    by_numbers = {next(iter(matrix.names.values())): name for name, matrix in matrices.items()}
    consumed = {tensor for matrix in matrices.values() for tensor in (*matrix.names.values(), *matrix.ignored)}
    named: dict[str, formats.StoredTensor] = {}
    for name, stored in tensors.items():
        if name in by_numbers:
            logical = by_numbers[name]
            if logical != name and logical in tensors:
                raise ModelNotFound(f"{folder} has both {logical} and its quantized form {name}")
            matrix = matrices[logical]
            shape: tuple[int, ...] = matrix.shape
            if matrix.experts:  # transformers' parameter has the shape [experts, inputs, outputs]
                shape = (matrix.experts, shape[1], shape[0] // matrix.experts)
            named[logical] = formats.StoredTensor(matrix.format, shape, stored.file)
        elif name not in consumed and not (matrices and _OF_THE_CACHE.fullmatch(name)):
            named[name] = stored
    return named


_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")


_LONGEST_HEADER = 100_000_000
"""Most bytes of a header: safetensors' own limit."""


@dataclass(frozen=True, slots=True)
class Checkpoint(formats.CheckpointSource):
    """A complete model folder. With `load_format="dummy"` it has no files and no tensors."""

    folder: Path
    config: dict[str, Any]
    """config.json as it stands."""
    files: tuple[Path, ...]
    tensors: dict[str, formats.StoredTensor]
    """Tensors of all files by name. Quantized matrices have the names that they have without quantization."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Always empty: only GGUF files have metadata."""
    matrices: Mapping[str, MatrixSpec] = field(default_factory=dict)
    """Quantized matrices by their names in `tensors`."""
    stored: Mapping[str, formats.StoredTensor] = field(default_factory=dict)
    """All tensors by their names in the files; empty if none is quantized."""
    opened: OpenFiles = field(default_factory=OpenFiles)

    def read(self, name: str) -> torch.Tensor | StoredMatrix:
        """A tensor or quantized matrix, mapped and not copied. Raises `KeyError` for an unknown name."""
        matrix = self.matrices.get(name)
        if matrix is None:
            return self.opened.read(self.tensors[name].file, name)
        from asyncengine.execution.models.formats.stored_tensors import MappedMatrix

        tensors = {role: self.opened.read(self.stored[stored].file, stored) for role, stored in matrix.names.items()}
        return MappedMatrix(matrix, tensors, self.opened.release)

    def release(self, tensor: torch.Tensor | StoredMatrix) -> None:
        """Let the system reclaim the pages of a tensor from `read`, or of a slice of one."""
        from torch import Tensor

        if isinstance(tensor, Tensor):
            self.opened.release(tensor)
        else:
            tensor.release(0, tensor.shape[0])

    def generation_defaults(self) -> dict[str, Any]:
        """The content of generation_config.json. Raises `ModelNotFound` for a file that cannot be read."""
        file = self.folder / "generation_config.json"
        return formats.read_json(file, str(self.folder)) if file.is_file() else {}

    def root(self) -> Path:
        """The folder, or its parent if that is an embedder's and `folder` holds its transformer."""
        return root_folder(self.folder)


class CheckpointOptions(NamedTuple):
    """Settings that decide which of a model's files are opened, and where they are found."""

    dummy: bool = False
    """Weights are random (`load_format="dummy"`): their files are not opened."""
    images: bool = False
    """Whether a GGUF model is opened with its vision tower, if it has one."""
    mmproj: str | None = None
    """The file of that tower. None: the one beside the model."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    show_progress: bool = False
    """Bars on stderr while files are downloaded."""

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """The options that an engine's settings imply."""
        images = config.images != "off" and config.task in ("auto", "generate")
        return cls(config.load_format == "dummy", images, config.mmproj, config.revision, config.show_progress)


def open_configured(path_or_id: str, config: EngineConfig) -> formats.CheckpointSource:
    """Open the model of an engine with the settings `config`. Raises as `open_checkpoint`."""
    return open_checkpoint(path_or_id, CheckpointOptions.of(config), writes=config.task == "generate")


def open_checkpoint(
    path_or_id: str, options: CheckpointOptions | None = None, *, writes: bool = True, drafts: bool = False
) -> formats.CheckpointSource:
    """Find the folder (or download it from the hub), read config.json and, unless `dummy`, every shard's header. Of a
    GGUF model (a file, the one in a folder, "ollama:NAME"), read its header.

    `writes`: a text generator is required; `drafts`: a draft model or EAGLE head, without vision tower. Raises
    `ModelNotFound` naming a missing or broken file, `UnsupportedModel` for another model where a text generator is
    required.
    """
    options = options or CheckpointOptions()
    if drafts:
        options = options._replace(images=False, mmproj=None)
    if not os.path.exists(os.path.expanduser(path_or_id)) and (named := parse_name(path_or_id)) is not None:
        weights, shown = not options.dummy, options.show_progress
        path_or_id = str(download(named, options.revision, weights=weights, show_progress=shown))
    if (gguf := _open_gguf(path_or_id, options)) is not None:
        return gguf
    if options.mmproj is not None:
        raise InvalidParameter("mmproj", f"goes with a GGUF model, and {path_or_id} is none", options.mmproj)
    folder = _find_folder(path_or_id)
    check_files(folder, writes=writes)
    # an embedder may have its config.json and weights in a subfolder; `check_files` looks at the files beside it
    folder = folder if writes else transformer_folder(folder)
    raw = formats.read_json(folder / "config.json", path_or_id)
    check_architectures(folder, raw, writes=writes, drafts=drafts)
    files = () if options.dummy else _weight_files(folder, path_or_id)
    tensors: dict[str, formats.StoredTensor] = {}
    for file in files:
        tensors.update(read_header(file))
    check_sizes(raw, len(tensors) if files else None)
    plain = Checkpoint(folder, raw, files, tensors)
    if raw.get("model_type") == "jev":
        from asyncengine.execution.models.multimodal import decision_source

        return decision_source(plain)
    return _with_matrices(plain)


def _with_matrices(plain: Checkpoint) -> Checkpoint:
    """The checkpoint with quantized matrices under the names that they have without quantization."""
    settings = quantization_of(plain.folder, plain.config)
    if settings is None:
        return plain
    from asyncengine.execution.models.families import MULTIMODAL
    from asyncengine.execution.models.formats.stored_tensors import StoredTensors
    from asyncengine.execution.models.multimodal import language_names

    if not plain.files:
        raise UnsupportedModel(f"load_format='dummy' makes up no quantized weights ({method_of(settings)})")

    candidates = plain.tensors
    if plain.config.get("model_type") in MULTIMODAL:  # modules that do not run here may be stored in any form
        language = language_names(plain.tensors)
        candidates = {name: stored for name, stored in plain.tensors.items() if name in language}
    matrices = find_matrices(settings, StoredTensors(plain.folder, candidates, plain.read))
    named = by_logical_name(plain.folder, plain.tensors, matrices)
    return replace(plain, tensors=named, matrices=matrices, stored=plain.tensors)


def _open_gguf(path_or_id: str, options: CheckpointOptions) -> formats.CheckpointSource | None:
    """The GGUF model that `path_or_id` names, or None. The reader, which imports torch, is imported for these alone."""
    path = Path(os.path.expanduser(path_or_id))
    is_file = os.path.isfile(path)  # not Path's own: it raises for a name that is too long
    folder = bool(path_or_id) and os.path.isdir(path) and any(path.glob("*.gguf"))
    if not (is_file or folder or path_or_id.startswith("ollama:") or path_or_id.endswith(".gguf")):
        return None
    from asyncengine.execution.models.formats.sources import find_gguf, with_projector

    model = find_gguf(path_or_id)
    if model is not None and any(key.endswith(".decision.type") for key in model.metadata):
        raise UnsupportedModel(f"{path_or_id} has a decision head (decision.type); of GGUF files none is read")
    return model if model is None or not options.images else with_projector(model, options.mmproj)


def _find_folder(path_or_id: str) -> Path:
    expanded = Path(os.path.expanduser(path_or_id))
    if path_or_id and os.path.isdir(expanded):  # not Path's own: it raises for a name that is too long
        if not os.access(expanded, os.R_OK | os.X_OK):
            raise ModelNotFound(f"the folder {path_or_id} cannot be read: this process has no rights to")
        return expanded
    if os.path.isfile(expanded):
        raise ModelNotFound(f"{path_or_id} is a file; pass the folder that holds config.json and *.safetensors")
    looks_like_path = path_or_id.startswith((".", "/", "~", "\\")) or path_or_id.count("/") > 1 or "\\" in path_or_id
    shown = shorten(repr(path_or_id), 500)
    if looks_like_path or not path_or_id:
        raise ModelNotFound(f"no folder {shown}")
    raise ModelNotFound(f"{shown} is neither a folder here nor a valid Hugging Face hub id")


def _weight_files(folder: Path, path_or_id: str) -> tuple[Path, ...]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return (single,)
    named = sorted(folder.glob("gptq_model*.safetensors"))  # as AutoGPTQ called it
    if len(named) == 1:
        return (named[0],)
    if index.is_file():
        weight_map = formats.read_json(index, path_or_id).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelNotFound(f"{index} has no weight_map")
        names = list(dict.fromkeys(map(str, weight_map.values())))
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ModelNotFound(
                    f"{index} names {shorten(name, 100)!r}, which is no safetensors file of this folder"
                )
        files = [folder / name for name in names]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelNotFound(f"{path_or_id} lacks {len(missing)} of {len(files)} weight files: {missing[0]}")
        return tuple(files)
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ModelNotFound(
            f"{path_or_id} has only {pickles[0]}; asyncengine reads safetensors alone (pickled weights run code "
            "when loaded). Convert it once with transformers: save_pretrained(folder)"
        )
    raise ModelNotFound(f"{path_or_id} has no model.safetensors")


def read_header(file: Path) -> dict[str, formats.StoredTensor]:
    """The headers of a file's tensors. Raises `ModelNotFound` for a file that is not as long as its header says."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise ValueError("its header is cut off")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = _check_offsets(header)
        tensors = {
            name: formats.StoredTensor(str(entry["dtype"]), tuple(map(int, entry["shape"])), file)
            for name, entry in header.items()
        }
    except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ModelNotFound(f"{file} is not a whole safetensors file: {formats.first_line(error)}") from None
    if 8 + length + end != size:
        wrong = "is truncated" if size < 8 + length + end else "is longer than its tensors"
        raise ModelNotFound(f"{file} {wrong}: {size} bytes, its header describes {8 + length + end}")
    return tensors


def _check_offsets(header: dict[str, Any]) -> int:
    """The end of the last tensor's bytes. Raises `ValueError` for gaps, overlaps, and lengths that do not fit a shape.

    safetensors checks this, too, but only at a file's first read: a running model may have tensors of others by then.
    """
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        dtype, shape = entry["dtype"], entry["shape"]
        if first != end or last < first or any(size < 0 for size in shape):
            raise ValueError(f"the tensor {shorten(name, 200)} does not begin where the one before it ends")
        if dtype not in formats.ITEM_BYTES and dtype not in formats.UNREAD:
            raise ValueError(f"the tensor {shorten(name, 200)} is of the unknown type {shorten(repr(dtype), 40)}")
        if dtype in formats.ITEM_BYTES and last - first != math.prod(shape) * formats.ITEM_BYTES[dtype]:
            raise ValueError(f"the tensor {shorten(name, 200)} is not as long as its shape says")
        end = last
    return end

"""What can be known about a model's folder before any weight is read: config, shards, sizes, what is missing.

Only safetensors files are ever opened. Pickled weights (`pytorch_model.bin`, `*.pt`) run code when loaded; they are
refused, never read.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from asyncengine.config import EngineConfig
from asyncengine.errors import ModelNotFound, shorten
from asyncengine.models.kinds import GGUF, check_architectures, check_files
from asyncengine.models.sizes import check_sizes

_DOWNLOAD = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "tokenizer*"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")


class StoredTensor(NamedTuple):
    """What a file's header says of a tensor."""

    kind: str
    """Its dtype as safetensors calls it."""
    shape: tuple[int, ...]
    file: Path

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete model folder; of a model whose weights are made up, without files and tensors."""

    folder: Path
    config: dict[str, Any]
    """config.json as it stands."""
    files: tuple[Path, ...]
    tensors: dict[str, StoredTensor]
    """By name, over all files."""

    @property
    def weight_bytes(self) -> int:
        return sum(stored.elements * _ITEM_BYTES.get(stored.kind, 4) for stored in self.tensors.values())

    @property
    def elements(self) -> int:
        return sum(stored.elements for stored in self.tensors.values())


_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


def open_checkpoint(path_or_id: str, config: EngineConfig) -> Checkpoint:
    """Find the folder (downloading a hub id), read config.json and, if they are wanted, every shard's header.

    Raises `ModelNotFound` naming what is missing or broken, `UnsupportedModel` for what is no text generator.
    """
    folder = _find_folder(path_or_id, config)
    check_files(folder)
    raw = read_json(folder / "config.json", path_or_id)
    check_architectures(folder, raw)
    files = () if config.load_format == "dummy" else _weight_files(folder, path_or_id)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors.update(_read_header(file))
    check_sizes(raw, len(tensors) if files else None)
    return Checkpoint(folder, raw, files, tensors)


def _find_folder(path_or_id: str, config: EngineConfig) -> Path:
    expanded = Path(os.path.expanduser(path_or_id))
    if path_or_id and os.path.isdir(expanded):  # not Path's own: it raises for a name that is too long
        return expanded
    if os.path.isfile(expanded):
        if expanded.suffix == ".gguf":
            raise ModelNotFound(f"{path_or_id} {GGUF}")
        raise ModelNotFound(f"{path_or_id} is a file; pass the folder that holds config.json and *.safetensors")
    looks_like_path = path_or_id.startswith((".", "/", "~", "\\")) or path_or_id.count("/") > 1 or "\\" in path_or_id
    if looks_like_path or not path_or_id:
        raise ModelNotFound(f"no folder {shorten(repr(path_or_id), 500)}")
    return _download(path_or_id, config)


def _download(hub_id: str, config: EngineConfig) -> Path:
    from huggingface_hub import snapshot_download, utils
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    def make_bar(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["disable"] = not (config.show_progress and sys.stderr.isatty())
        bar.__init__(self, *args, **kwargs)

    module: Any = utils
    bar = module.tqdm
    quiet: Any = type("QuietBar", (bar,), {"__init__": make_bar})
    wanted = [kind for kind in _DOWNLOAD if config.load_format != "dummy" or kind != "*.safetensors"]
    try:
        return Path(snapshot_download(hub_id, revision=config.revision, allow_patterns=wanted, tqdm_class=quiet))
    except RevisionNotFoundError:
        raise ModelNotFound(f"{hub_id} has no revision {config.revision!r} on the Hugging Face hub") from None
    except RepositoryNotFoundError:
        raise ModelNotFound(
            f"{hub_id!r} is neither a folder here nor a model on the Hugging Face hub (or it is private)"
        ) from None
    except HFValidationError:
        raise ModelNotFound(f"{hub_id!r} is neither a folder here nor a valid Hugging Face hub id") from None
    except Exception as error:
        raise ModelNotFound(
            f"{hub_id!r} is no folder here, and the Hugging Face hub cannot be reached ({type(error).__name__})"
        ) from error


def read_json(file: Path, path_or_id: str) -> dict[str, Any]:
    """The JSON object in a file of a model's folder. Raises `ModelNotFound`."""
    if not file.is_file():
        raise ModelNotFound(f"{path_or_id} has no {file.name}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelNotFound(f"{file} cannot be read: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise ModelNotFound(f"{file} does not hold a JSON object")
    return content


def _weight_files(folder: Path, path_or_id: str) -> tuple[Path, ...]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return (single,)
    if index.is_file():
        weight_map = read_json(index, path_or_id).get("weight_map")
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
    if any(folder.glob("*.gguf")):
        raise ModelNotFound(f"{path_or_id} {GGUF}")
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ModelNotFound(
            f"{path_or_id} has only {pickles[0]}; asyncengine reads safetensors alone (pickled weights run code "
            "when loaded). Convert it once with transformers: save_pretrained(folder)"
        )
    raise ModelNotFound(f"{path_or_id} has no model.safetensors")


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """What a file holds, after checking that it is as long as its header says."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError("its header is cut off")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        tensors = {
            name: StoredTensor(str(entry["dtype"]), tuple(map(int, entry["shape"])), file)
            for name, entry in header.items()
        }
    except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ModelNotFound(f"{file} is not a whole safetensors file: {first_line(error)}") from None
    if 8 + length + end != size:
        raise ModelNotFound(f"{file} is truncated: {size} bytes, its header describes {8 + length + end}")
    return tensors


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, in one short line."""
    return shorten(" ".join(str(error).split()), 300) or type(error).__name__

"""Places of GGUF models: a file, a folder with one, a model of Ollama's; and which of several is meant."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.layers.stored import StoredMatrix
from asyncengine.execution.models.formats import CheckpointSource, StoredTensor, read_json
from asyncengine.execution.models.formats.gguf.container import SPLIT, GgufFile, is_gguf, open_files
from asyncengine.execution.models.formats.gguf.header import Header
from asyncengine.execution.models.formats.gguf.model import GgufModel
from asyncengine.execution.models.formats.gguf.projector_kinds import LAYER, PARAMETERS, PROJECTORS, Projector, Tower
from asyncengine.execution.models.formats.gguf.tensors import TensorPart

# Models that Ollama has pulled: from a name to the GGUF file among its blobs. Read only.

PREFIX = "ollama:"
_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_KIND = "application/vnd.ollama.image."
_MAX_JSON = 2**20
"""Bytes of a manifest, and of parameters."""
_PARAMETERS = {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
_PARAMETERS["repeat_penalty"] = "repetition_penalty"
"""Ollama's name -> that of generation_config.json."""


def find_ollama(name: str) -> tuple[Path, dict[str, Any]]:
    """(weights in GGUF, sampling parameters under generation_config.json's names) of "NAME[:TAG]", "USER/NAME[:TAG]" or
    "HOST/USER/NAME[:TAG]".

    Raises `ModelNotFound` for a name that is not there or a broken manifest, `UnsupportedModel` for a model with an
    adapter of Ollama's.
    """
    parts = _name_parts(name)
    given = os.environ.get("OLLAMA_MODELS")
    # else those of its user, and of its service on Linux
    folders = [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]
    folders = [Path(given).expanduser()] if given else folders
    manifest = next((file for folder in folders if (file := folder.joinpath("manifests", *parts)).is_file()), None)
    if manifest is None:
        raise ModelNotFound(f"Ollama has no model {shorten(repr(name), 200)} in {folders[0]}{_known(folders)}")
    blobs = manifest.parents[4] / "blobs"
    layers = _layers(manifest)
    if "adapter" in layers:
        raise UnsupportedModel(f"ollama:{name} has an adapter in GGUF on top of its weights, which is not read")
    if "model" not in layers:
        raise ModelNotFound(f"{manifest} names no weights")
    file = _blob(manifest, blobs, layers["model"])
    defaults = {}
    if "params" in layers:
        defaults = _defaults(_small_json(_blob(manifest, blobs, layers["params"])))
    return file, defaults


def _name_parts(name: str) -> tuple[str, str, str, str]:
    path, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        path, tag = name, _TAG
    parts = path.split("/")
    every = [*(_HOST, _NAMESPACE)[: max(3 - len(parts), 0)], *parts, tag]
    if len(every) != 4 or not all(_PART.fullmatch(part) for part in every):
        raise ModelNotFound(
            f"{shorten(repr(name), 200)} is no name of a model in Ollama: NAME, NAME:TAG or USER/NAME:TAG"
        )
    return every[0], every[1], every[2], every[3]


def _known(folders: list[Path]) -> str:
    found = []
    for folder in folders:
        host = folder / "manifests" / _HOST / _NAMESPACE
        found += sorted(f"{file.parent.name}:{file.name}" for file in host.glob("*/*") if file.is_file())
    return f". It has {', '.join(found[:10])}" if found else ""


def _layers(manifest: Path) -> dict[str, Mapping[str, Any]]:
    """Each kind's first layer. Raises `ModelNotFound` for several files of weights."""
    listed = _small_json(manifest).get("layers")
    if not isinstance(listed, list):
        raise ModelNotFound(f"{manifest} has no layers")
    found: dict[str, Mapping[str, Any]] = {}
    for layer in listed:
        kind = layer.get("mediaType") if isinstance(layer, dict) else None
        if not isinstance(kind, str) or not kind.startswith(_KIND):
            continue
        kind = kind.removeprefix(_KIND)
        if kind == "model" and kind in found:
            raise ModelNotFound(f"{manifest} names several files of weights")
        found.setdefault(kind, layer)
    return found


def _blob(manifest: Path, blobs: Path, layer: Mapping[str, Any]) -> Path:
    digest = layer.get("digest")
    named = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if named is None:
        raise ModelNotFound(f"{manifest} has a digest that is none: {shorten(repr(digest), 100)}")
    file = blobs / f"sha256-{named[1]}"
    if not file.is_file():
        raise ModelNotFound(f"{manifest} names {file.name}, which is not in {blobs}; pull the model again")
    size, held = layer.get("size"), file.stat().st_size
    if isinstance(size, int) and size != held:
        raise ModelNotFound(f"{file} has {held} bytes, its manifest says {size}; pull the model again")
    return file


def _small_json(file: Path) -> dict[str, Any]:
    if file.stat().st_size > _MAX_JSON:
        raise ModelNotFound(f"{file} is larger than {_MAX_JSON} bytes")
    return read_json(file, str(file))


def _defaults(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of sampling, and the strings that end an answer."""
    found: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in _PARAMETERS and isinstance(value, (int, float)) and not isinstance(value, bool):
            found[_PARAMETERS[name]] = value
    stop = parameters.get("stop")
    if isinstance(stop, str):
        stop = [stop]
    if isinstance(stop, list) and all(isinstance(each, str) for each in stop):
        found["stop_strings"] = [each for each in stop if each]
    return found


# The image part of a GGUF model (`mmproj`): a file beside that of the language model, in llama.cpp's names.


class ProjectedModel(CheckpointSource):
    """Two files: a language model and its image part."""

    def __init__(self, model: GgufModel, path: Path) -> None:
        """Raises `ModelNotFound` for a file that is broken, incomplete, or another model's, `UnsupportedModel` for a
        kind that is not read."""
        (self._file,) = open_files(path)
        header, kind = _header_of(path, self._file)
        pair = kind.families.get(model.config["model_type"])
        if pair is None:
            own = model.metadata.short.get("general.architecture")
            raise ModelNotFound(f"{path} is the image part of another model than {model.path.name}, which is {own}")
        width, own = header["projection_dim"], model.config["hidden_size"]
        if width != own:
            raise ModelNotFound(f"{path} makes tokens of {width} numbers, and {model.path.name} has {own}")
        self._model, self.folder, self.metadata = model, model.folder, model.metadata
        self.files = (*model.files, path)
        tower = Tower(header, model)
        self._restored = partial(kind.restore, tower)
        described = kind.describe(tower)
        self.image_processor: dict[str, Any] = described["processor"] | tower.colors()
        """The content of preprocessor_config.json."""
        kept = ("architectures", "tie_word_embeddings", "dtype", "pad_token_id")
        self.config = {
            **{name: model.config[name] for name in kept if name in model.config}, "model_type": pair[0],
            **_token_ids(model, kind.tokens), **described["whole"],
            "text_config": model.config | {"model_type": pair[1]} | described["text"],
            "vision_config": described["vision"],
        }  # fmt: skip
        self._names = {re.sub(r"^model\.", "model.language_model.", name): name for name in model.tensors}
        self._tower = _tensors(tower, kind, self._file)
        self.tensors = {name: model.tensors[own] for name, own in self._names.items()}
        for name, parts in self._tower.items():
            outlines = [torch.empty(part.place.shape, device="meta") for part in parts]
            self.tensors[name] = StoredTensor("F32", tuple(self._whole(name, outlines).shape), path)

    def read(self, name: str) -> torch.Tensor | StoredMatrix:
        """A tensor of the language model as `GgufModel` reads it; the tower's are never quantized."""
        if name in self._names:
            return self._model.read(self._names[name])
        parts = [part.plain() if part.place.kind.form is None else part.dense() for part in self._tower[name]]
        return self._whole(name, parts)

    def _whole(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A tensor of the tower as transformers has it, of its parts in the file."""
        if len(parts) == 1:
            return self._restored(name, parts[0])
        return torch.stack(tuple(parts), 2) if parts[0].ndim == 4 else torch.cat(tuple(parts))  # frames, or rows

    def release(self, tensor: torch.Tensor | StoredMatrix) -> None:
        """A tensor from `read` will not be read again. Nothing happens to a copy."""
        self._model.release(tensor)

    def generation_defaults(self) -> dict[str, Any]:
        """Sampling parameters under generation_config.json's names."""
        return self._model.generation_defaults()


def _header_of(path: Path, file: GgufFile) -> tuple[Header, Projector]:
    """The header of an image part and its kind."""
    header = Header(path, "clip.vision", file.metadata, file.tensors)
    if file.metadata.short.get("general.architecture") not in ("clip", "mmproj"):
        raise ModelNotFound(f"{path} is no image part of a model (mmproj)")
    name = file.metadata.short.get("clip.projector_type") or header.other("projector_type")
    if name not in PROJECTORS:
        known = ", ".join(PROJECTORS)
        raise UnsupportedModel(f"{path}: image part {shorten(repr(name), 60)} is not read. Read are {known}")
    return header, PROJECTORS[name]


def _token_ids(model: GgufModel, tokens: Mapping[str, str]) -> dict[str, int]:
    every = model.metadata.get("tokenizer.ggml.tokens")
    every = every if isinstance(every, list) else []
    places = {token: place for place, token in enumerate(every) if token in tokens.values()}
    if missing := sorted(set(tokens.values()) - places.keys()):
        raise UnsupportedModel(f"{model.path}: its vocabulary lacks {missing[0]}, which stands for pictures")
    return {field: places[token] for field, token in tokens.items()}


def _tensors(tower: Tower, kind: Projector, file: GgufFile) -> dict[str, list[TensorPart]]:
    """The tower's tensors by their names in transformers: the parts that each is joined of."""
    found: dict[str, dict[int, TensorPart]] = {}
    for whole, place in file.tensors.items():
        taken = re.fullmatch(r"(.+?)\.(weight|bias)(\.1)?", whole)
        stem, suffix, frame = taken.groups() if taken else (whole, "", None)
        number = ""
        if (layer := LAYER.match(stem)) is not None:
            number = layer[2] if layer[1] == "blk" else str(tower.deep.index(int(layer[2])))
            stem = f"v.{layer[1]}.{{}}.{stem[layer.end() :]}"
        there, _, part = kind.names.get(tower.swapped.get(stem, stem), "?").partition("#")
        if not there:
            continue
        if there == "?":
            raise tower.wrong(f"has a tensor that such an image part does not have: {shorten(whole, 100)}")
        if place.kind.form is None and place.kind.plain is None:
            raise UnsupportedModel(f"{file.path} has the tensor {shorten(whole, 100)} as {place.kind.name}")
        name = there.format(number) if there.endswith(PARAMETERS) else f"{there.format(number)}.{suffix}"
        added = 1.0 if stem == "mm.soft_emb_norm" else 0.0
        stored = StoredTensor(place.kind.name, place.shape, file.path)
        found.setdefault(name, {})[int(part or bool(frame))] = TensorPart(file, place, stored, added=added)
    for name, parts in found.items():
        if len({part.place.shape for part in parts.values()}) > 1 or parts.keys() != set(range(len(parts))):
            raise tower.wrong(f"has parts of {name} that do not go together")
    return {name: [parts[place] for place in sorted(parts)] for name, parts in found.items()}


logger = logging.getLogger("asyncengine")

_BESIDE = ("mmproj", "imatrix")
"""In the names of files that lie beside a model and are none."""


def find_gguf(path_or_id: str) -> GgufModel | None:
    """Open what `path_or_id` names, if that is a GGUF model; None: it is something else.

    A folder that has safetensors as well is not one: those are the original weights. Raises `ModelNotFound` for what is
    missing, broken or not the only one, `UnsupportedModel` as `GgufModel` does.
    """
    if path_or_id.startswith(PREFIX):
        return GgufModel(*find_ollama(path_or_id.removeprefix(PREFIX)))
    path = Path(os.path.expanduser(path_or_id))
    if path_or_id and os.path.isdir(path):  # not Path's own: it raises for a name that is too long
        file = only_gguf(path)
        return None if file is None else GgufModel(file)
    if os.path.exists(path):
        return GgufModel(path) if path.suffix == ".gguf" or is_gguf(path) else None
    if path_or_id.endswith(".gguf"):
        raise ModelNotFound(f"no file {shorten(repr(path_or_id), 500)}")
    return None


def with_projector(model: GgufModel, given: str | None) -> GgufModel | ProjectedModel:
    """The model with its image part: the file `given`, or else the one beside it that has "mmproj" in its name.

    Raises `ModelNotFound` and `UnsupportedModel` as `ProjectedModel` does for one that was given; of one that was
    found, this is logged, and the model reads text alone.
    """
    if given is not None:
        path = Path(os.path.expanduser(given))
        if not os.path.isfile(path):
            raise ModelNotFound(f"mmproj: no file {shorten(repr(given), 500)}")
        return ProjectedModel(model, path)
    beside = sorted(file for file in model.path.parent.glob("*.gguf") if "mmproj" in file.name.lower())
    try:
        if len(beside) > 1:
            raise ModelNotFound(f"{len(beside)} image parts lie beside it; pass one as mmproj: {beside[0].name}, ...")
        return ProjectedModel(model, beside[0]) if beside else model
    except (ModelNotFound, UnsupportedModel) as error:
        logger.warning("%s reads text alone: %s", model.path.name, error)
        return model


def only_gguf(folder: Path) -> Path | None:
    """The one GGUF model of a folder (of several files, the first); None if there is none, or safetensors.

    Raises `ModelNotFound` listing them if there are several.
    """
    if any(folder.glob("*.safetensors")):
        return None
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.gguf")}
    files = pick_gguf(sizes, str(folder), "pass the path of one")
    return None if files is None else folder / files[0]


def pick_gguf(sizes: Mapping[str, int], where: str, how: str, choice: str = "") -> list[str] | None:
    """The files of the GGUF model among `sizes` (bytes by path) that is `choice`, whose path has that as a word, or a
    word that begins with it; without a choice, of the only model. None: there is none, and none was chosen.

    Raises `ModelNotFound` listing them, with `how` to choose one, if none is meant or several are.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(sizes):
        if name.endswith(".gguf") and not any(word in name.lower() for word in _BESIDE):
            part = SPLIT.fullmatch(name)
            models.setdefault(name if part is None else f"{part['name']} {part['count']}", []).append(name)
    if not models and not choice:
        return None
    word = rf"(?<![^\W_]){re.escape(choice)}"
    meant = [files for files in models.values() if choice in files]
    for pattern in (rf"{word}(?!\w)", word):
        meant = meant or [files for files in models.values() if re.search(pattern, files[0], re.IGNORECASE)]
    if len(meant) == 1:
        return meant[0]
    each = {files[0]: sum(map(sizes.__getitem__, files)) / 1e9 for files in meant or models.values()}
    listed = ", ".join(f"{name} ({size:.1f} GB)" for name, size in sorted(each.items(), key=itemgetter(1)))
    of_choice = f" for {choice!r}" if meant and choice else f", none for {choice!r}" if choice else ""
    raise ModelNotFound(f"{where} has {len(each)} GGUF models{of_choice}; {how}: {listed}")

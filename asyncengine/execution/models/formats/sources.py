"""Sources of GGUF models: a file, a folder with one, a model of Ollama; and the choice among several."""

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
from asyncengine.execution.models.formats.gguf.projectors import LAYER, PARAMETERS, PROJECTORS, Projector, Tower
from asyncengine.execution.models.formats.gguf.tensors import FileTensor

# Models that Ollama has pulled: from a name to the GGUF file among its blobs. Nothing is written there.

PREFIX = "ollama:"
_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_NAME_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_MEDIA_TYPE = "application/vnd.ollama.image."
_MAX_JSON = 2**20
"""Most bytes of a manifest, and of a file of parameters."""
_PARAMETERS = {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
_PARAMETERS["repeat_penalty"] = "repetition_penalty"
"""Ollama's name of a sampling parameter -> that of generation_config.json."""


def find_ollama(name: str) -> tuple[Path, dict[str, Any]]:
    """(weights in GGUF, sampling parameters under generation_config.json's names) of "NAME[:TAG]", "USER/NAME[:TAG]" or
    "HOST/USER/NAME[:TAG]".

    Raises `ModelNotFound` for a name that is not there or a broken manifest, `UnsupportedModel` for a model with an
    adapter of Ollama's.
    """
    components = _manifest_path(name)
    configured = os.environ.get("OLLAMA_MODELS")
    # else those of its user, and of its service on Linux
    folders = [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]
    folders = [Path(configured).expanduser()] if configured else folders
    manifest = next((file for folder in folders if (file := folder.joinpath("manifests", *components)).is_file()), None)
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


def _manifest_path(name: str) -> tuple[str, str, str, str]:
    path, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        path, tag = name, _TAG
    components = path.split("/")
    full = [*(_HOST, _NAMESPACE)[: max(3 - len(components), 0)], *components, tag]
    if len(full) != 4 or not all(_NAME_COMPONENT.fullmatch(component) for component in full):
        raise ModelNotFound(
            f"{shorten(repr(name), 200)} is no name of a model in Ollama: NAME, NAME:TAG or USER/NAME:TAG"
        )
    return full[0], full[1], full[2], full[3]


def _known(folders: list[Path]) -> str:
    names = []
    for folder in folders:
        host = folder / "manifests" / _HOST / _NAMESPACE
        names += sorted(f"{file.parent.name}:{file.name}" for file in host.glob("*/*") if file.is_file())
    return f". It has {', '.join(names[:10])}" if names else ""


def _layers(manifest: Path) -> dict[str, Mapping[str, Any]]:
    """The first layer of each media type in a manifest. Raises `ModelNotFound` for several files of weights."""
    listed = _small_json(manifest).get("layers")
    if not isinstance(listed, list):
        raise ModelNotFound(f"{manifest} has no layers")
    layers: dict[str, Mapping[str, Any]] = {}
    for layer in listed:
        media_type = layer.get("mediaType") if isinstance(layer, dict) else None
        if not isinstance(media_type, str) or not media_type.startswith(_MEDIA_TYPE):
            continue
        media_type = media_type.removeprefix(_MEDIA_TYPE)
        if media_type == "model" and media_type in layers:
            raise ModelNotFound(f"{manifest} names several files of weights")
        layers.setdefault(media_type, layer)
    return layers


def _blob(manifest: Path, blobs: Path, layer: Mapping[str, Any]) -> Path:
    digest = layer.get("digest")
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise ModelNotFound(f"{manifest} has a digest that is none: {shorten(repr(digest), 100)}")
    file = blobs / f"sha256-{match[1]}"
    if not file.is_file():
        raise ModelNotFound(f"{manifest} names {file.name}, which is not in {blobs}; pull the model again")
    size, actual = layer.get("size"), file.stat().st_size
    if isinstance(size, int) and size != actual:
        raise ModelNotFound(f"{file} has {actual} bytes, its manifest says {size}; pull the model again")
    return file


def _small_json(file: Path) -> dict[str, Any]:
    if file.stat().st_size > _MAX_JSON:
        raise ModelNotFound(f"{file} is larger than {_MAX_JSON} bytes")
    return read_json(file, str(file))


def _defaults(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Default sampling parameters, with stop strings, of Ollama's parameters."""
    defaults: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in _PARAMETERS and isinstance(value, (int, float)) and not isinstance(value, bool):
            defaults[_PARAMETERS[name]] = value
    stop = parameters.get("stop")
    if isinstance(stop, str):
        stop = [stop]
    if isinstance(stop, list) and all(isinstance(each, str) for each in stop):
        defaults["stop_strings"] = [each for each in stop if each]
    return defaults


# The vision tower of a GGUF model (`mmproj`): a file beside that of the language model, with llama.cpp's tensor names.


class ProjectedModel(CheckpointSource):
    """A language model with the vision tower of a second file."""

    def __init__(self, model: GgufModel, path: Path) -> None:
        """Raises `ModelNotFound` for a file that is broken, incomplete, or another model's, `UnsupportedModel` for a
        projector type that is not read."""
        (self._file,) = open_files(path)
        header, projector = _header_of(path, self._file)
        model_types = projector.families.get(model.config["model_type"])
        if model_types is None:
            actual = model.metadata.short.get("general.architecture")
            raise ModelNotFound(f"{path} is the image part of another model than {model.path.name}, which is {actual}")
        width, actual = header["projection_dim"], model.config["hidden_size"]
        if width != actual:
            raise ModelNotFound(f"{path} makes tokens of {width} numbers, and {model.path.name} has {actual}")
        self._model, self.folder, self.metadata = model, model.folder, model.metadata
        self.files = (*model.files, path)
        tower = Tower(header, model)
        self._restored = partial(projector.restore, tower)
        described = projector.describe(tower)
        self.image_processor: dict[str, Any] = described["processor"] | tower.colors()
        """The content of preprocessor_config.json."""
        inherited = ("architectures", "tie_word_embeddings", "dtype", "pad_token_id")
        self.config = {
            **{name: model.config[name] for name in inherited if name in model.config}, "model_type": model_types[0],
            **_token_ids(model, projector.tokens), **described["whole"],
            "text_config": model.config | {"model_type": model_types[1]} | described["text"],
            "vision_config": described["vision"],
        }  # fmt: skip
        self._names = {re.sub(r"^model\.", "model.language_model.", name): name for name in model.tensors}
        self._tower = _tensors(tower, projector, self._file)
        self.tensors = {name: model.tensors[actual] for name, actual in self._names.items()}
        for name, sources in self._tower.items():
            outlines = [torch.empty(source.info.shape, device="meta") for source in sources]
            self.tensors[name] = StoredTensor("F32", tuple(self._whole(name, outlines).shape), path)

    def read(self, name: str) -> torch.Tensor | StoredMatrix:
        """A tensor of the language model as `GgufModel` reads it, or one of the tower, which is dequantized."""
        if name in self._names:
            return self._model.read(self._names[name])
        tensors = [source.plain() if source.info.type.form is None else source.dense() for source in self._tower[name]]
        return self._whole(name, tensors)

    def _whole(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A tensor of the tower as transformers has it, from the tensors of the file that it joins."""
        if len(tensors) == 1:
            return self._restored(name, tensors[0])
        return torch.stack(tuple(tensors), 2) if tensors[0].ndim == 4 else torch.cat(tuple(tensors))  # frames, or rows

    def release(self, tensor: torch.Tensor | StoredMatrix) -> None:
        self._model.release(tensor)

    def generation_defaults(self) -> dict[str, Any]:
        return self._model.generation_defaults()


def _header_of(path: Path, file: GgufFile) -> tuple[Header, Projector]:
    """The header of a vision tower, and its projector type."""
    header = Header(path, "clip.vision", file.metadata, file.tensors)
    if file.metadata.short.get("general.architecture") not in ("clip", "mmproj"):
        raise ModelNotFound(f"{path} is no image part of a model (mmproj)")
    name = file.metadata.short.get("clip.projector_type") or header.other("projector_type")
    if name not in PROJECTORS:
        known = ", ".join(PROJECTORS)
        raise UnsupportedModel(f"{path}: image part {shorten(repr(name), 60)} is not read. Read are {known}")
    return header, PROJECTORS[name]


def _token_ids(model: GgufModel, tokens: Mapping[str, str]) -> dict[str, int]:
    vocabulary = model.metadata.get("tokenizer.ggml.tokens")
    vocabulary = vocabulary if isinstance(vocabulary, list) else []
    ids = {token: index for index, token in enumerate(vocabulary) if token in tokens.values()}
    if missing := sorted(set(tokens.values()) - ids.keys()):
        raise UnsupportedModel(f"{model.path}: its vocabulary lacks {missing[0]}, which stands for pictures")
    return {field: ids[token] for field, token in tokens.items()}


def _tensors(tower: Tower, projector: Projector, file: GgufFile) -> dict[str, list[FileTensor]]:
    """The tower's tensors by their names in transformers, each as the tensors of the file that it joins."""
    sources: dict[str, dict[int, FileTensor]] = {}
    for name_in_file, info in file.tensors.items():
        match = re.fullmatch(r"(.+?)\.(weight|bias)(\.1)?", name_in_file)
        stem, suffix, second = match.groups() if match else (name_in_file, "", None)
        number = ""
        if (layer := LAYER.match(stem)) is not None:
            number = layer[2] if layer[1] == "blk" else str(tower.deep.index(int(layer[2])))
            stem = f"v.{layer[1]}.{{}}.{stem[layer.end() :]}"
        target, _, index = projector.names.get(tower.swapped.get(stem, stem), "?").partition("#")
        if not target:
            continue
        if target == "?":
            raise tower.wrong(f"has a tensor that such an image part does not have: {shorten(name_in_file, 100)}")
        if info.type.form is None and info.type.plain is None:
            raise UnsupportedModel(f"{file.path} has the tensor {shorten(name_in_file, 100)} as {info.type.name}")
        name = target.format(number) if target.endswith(PARAMETERS) else f"{target.format(number)}.{suffix}"
        added = 1.0 if stem == "mm.soft_emb_norm" else 0.0
        stored = StoredTensor(info.type.name, info.shape, file.path)
        sources.setdefault(name, {})[int(index or bool(second))] = FileTensor(file, info, stored, added=added)
    for name, pieces in sources.items():
        if len({index.info.shape for index in pieces.values()}) > 1 or pieces.keys() != set(range(len(pieces))):
            raise tower.wrong(f"has parts of {name} that do not go together")
    return {name: [pieces[info] for info in sorted(pieces)] for name, pieces in sources.items()}


logger = logging.getLogger("asyncengine")

_BESIDE = ("mmproj", "imatrix")
"""Words in the names of GGUF files that lie beside a model and are no language model."""


def find_gguf(path_or_id: str) -> GgufModel | None:
    """Open the GGUF model that `path_or_id` names; None if it names something else.

    A folder that has safetensors as well is no GGUF model: those are the original weights. Raises `ModelNotFound` for a
    model that is missing, broken or one of several, `UnsupportedModel` as `GgufModel` does.
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
    """The model with its vision tower: the file `given`, or else the one beside it that has "mmproj" in its name.

    Raises `ModelNotFound` and `UnsupportedModel` as `ProjectedModel` does for a `given` file. For one that lies beside
    the model, the error is logged, and the model reads text alone.
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
    """The files of one GGUF model among `sizes` (bytes by path): of the model that has the file `choice`, or whose path
    contains it as a word, or as the beginning of one; without a choice, of the only model. None if there are no GGUF
    models and no choice.

    Raises `ModelNotFound` listing the models, with `how` to choose one, if none or several of them fit.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(sizes):
        if name.endswith(".gguf") and not any(word in name.lower() for word in _BESIDE):
            split = SPLIT.fullmatch(name)
            models.setdefault(name if split is None else f"{split['name']} {split['count']}", []).append(name)
    if not models and not choice:
        return None
    word = rf"(?<![^\W_]){re.escape(choice)}"
    matching = [files for files in models.values() if choice in files]
    for pattern in (rf"{word}(?!\w)", word):
        matching = matching or [files for files in models.values() if re.search(pattern, files[0], re.IGNORECASE)]
    if len(matching) == 1:
        return matching[0]
    totals = {files[0]: sum(map(sizes.__getitem__, files)) / 1e9 for files in matching or models.values()}
    listed = ", ".join(f"{name} ({size:.1f} GB)" for name, size in sorted(totals.items(), key=itemgetter(1)))
    of_choice = f" for {choice!r}" if matching and choice else f", none for {choice!r}" if choice else ""
    raise ModelNotFound(f"{where} has {len(totals)} GGUF models{of_choice}; {how}: {listed}")

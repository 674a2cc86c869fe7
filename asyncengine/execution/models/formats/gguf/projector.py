"""The image part of a GGUF model (`mmproj`): a file beside that of the language model, in llama.cpp's names.

`ProjectedModel` joins both into one checkpoint in transformers' names, with what its image processor is told. Sizes
are those of the tensors, so that no header can claim others; the header has only what tensors do not show. The kinds of
image parts are in `projector_kinds`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.layers.stored import StoredMatrix
from asyncengine.execution.models.formats import CheckpointSource, StoredTensor
from asyncengine.execution.models.formats.gguf.container import GgufFile, open_files
from asyncengine.execution.models.formats.gguf.header import Header
from asyncengine.execution.models.formats.gguf.model import GgufModel
from asyncengine.execution.models.formats.gguf.projector_kinds import LAYER, PARAMETERS, PROJECTORS, Projector, Tower
from asyncengine.execution.models.formats.gguf.tensors import TensorPart


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
        self.image_processor: dict[str, Any] = described.processor | tower.colors()
        """The content of preprocessor_config.json."""
        kept = ("architectures", "tie_word_embeddings", "dtype", "pad_token_id")
        self.config = {
            **{name: model.config[name] for name in kept if name in model.config}, "model_type": pair[0],
            **_token_ids(model, kind.tokens), **described.whole,
            "text_config": model.config | {"model_type": pair[1]} | described.text, "vision_config": described.vision,
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

"""Places of GGUF models: a file, a folder with one, a model of Ollama's; and which of several is meant."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.models.formats.gguf.container import SPLIT, is_gguf
from asyncengine.execution.models.formats.gguf.model import GgufModel
from asyncengine.execution.models.formats.gguf.projector import ProjectedModel
from asyncengine.execution.models.formats.ollama import PREFIX, find_ollama

logger = logging.getLogger("asyncengine")

_BESIDE = ("mmproj", "imatrix")
"""In the names of files that lie beside a model and are none."""


def find_gguf(path_or_id: str) -> GgufModel | None:
    """Open what `path_or_id` names, if that is a GGUF model; None: it is something else.

    A folder that has safetensors as well is not one: those are the original weights. Raises `ModelNotFound` for what is
    missing, broken or not the only one, `UnsupportedModel` as `GgufModel` does.
    """
    if path_or_id.startswith(PREFIX):
        found = find_ollama(path_or_id.removeprefix(PREFIX))
        return GgufModel(found.file, found.defaults)
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

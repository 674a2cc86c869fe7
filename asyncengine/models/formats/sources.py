"""Where a GGUF model may be: a file, a folder with one, a model of Ollama's, or a file of a repository on the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from asyncengine.config import EngineConfig
from asyncengine.errors import ModelNotFound, shorten
from asyncengine.models.formats.gguf.container import is_gguf
from asyncengine.models.formats.gguf.model import GgufModel, open_gguf
from asyncengine.models.formats.gguf.splits import SPLIT, sibling_names
from asyncengine.models.formats.ollama import PREFIX, find_ollama

_HUB = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*):(?P<file>[^:\\]+\.gguf)", re.ASCII)
_BESIDE = ("mmproj", "imatrix")
"""In the names of files that lie beside a model and are none."""


def find_gguf(path_or_id: str, config: EngineConfig) -> GgufModel | None:
    """Open what `path_or_id` names, if that is a GGUF model; None: it is something else.

    A folder that has safetensors as well is not one: those are the original weights. Raises `ModelNotFound` for what is
    missing, broken or not the only one, `UnsupportedModel` as `open_gguf` does.
    """
    if path_or_id.startswith(PREFIX):
        found = find_ollama(path_or_id.removeprefix(PREFIX))
        return open_gguf(found.file, found.defaults)
    path = Path(os.path.expanduser(path_or_id))
    if path_or_id and os.path.isdir(path):  # not Path's own: it raises for a name that is too long
        file = only_gguf(path)
        return None if file is None else open_gguf(file)
    if os.path.exists(path):
        return open_gguf(path) if path.suffix == ".gguf" or is_gguf(path) else None
    named = _HUB.fullmatch(path_or_id)
    if named is not None and ".." not in PurePosixPath(named["file"]).parts:
        return open_gguf(_download(named["repo"], named["file"], config))
    if path_or_id.endswith(".gguf"):
        raise ModelNotFound(f"no file {shorten(repr(path_or_id), 500)}")
    return None


def only_gguf(folder: Path) -> Path | None:
    """The one GGUF model of a folder (of several files, the first); None if there is none, or safetensors.

    Raises `ModelNotFound` listing them if there are several.
    """
    if any(folder.glob("*.safetensors")):
        return None
    models: dict[str, Path] = {}
    for file in sorted(folder.glob("*.gguf")):
        if any(word in file.name.lower() for word in _BESIDE):
            continue
        part = SPLIT.fullmatch(file.name)
        models.setdefault(file.name if part is None else f"{part['name']} {part['count']}", file)
    if len(models) > 1:
        names = ", ".join(file.name for file in list(models.values())[:10])
        raise ModelNotFound(f"{folder} has {len(models)} GGUF models; pass the path of one: {names}")
    return next(iter(models.values()), None)


def _download(repo: str, name: str, config: EngineConfig) -> Path:
    """A file of a repository, and the others of a split model beside it. Raises `ModelNotFound`."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    download: Any = hf_hub_download
    folder = PurePosixPath(name).parent
    try:
        paths = [
            Path(download(repo, str(folder / part), revision=config.revision))
            for part in sibling_names(PurePosixPath(name).name)
        ]
    except RevisionNotFoundError:
        raise ModelNotFound(f"{repo} has no revision {config.revision!r} on the Hugging Face hub") from None
    except RepositoryNotFoundError:
        raise ModelNotFound(f"{repo!r} is no repository on the Hugging Face hub (or it is private)") from None
    except EntryNotFoundError as error:
        if type(error).__name__ == "LocalEntryNotFoundError":
            raise ModelNotFound(f"{repo}:{name} is not here, and the Hugging Face hub cannot be reached") from error
        raise ModelNotFound(f"{repo} has no file {name}, or not all of its parts") from None
    except ModelNotFound:
        raise
    except Exception as error:
        raise ModelNotFound(
            f"{repo}:{name} is not here, and the Hugging Face hub cannot be reached ({type(error).__name__})"
        ) from error
    return paths[0]

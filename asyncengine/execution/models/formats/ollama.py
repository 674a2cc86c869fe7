"""Models that Ollama has pulled: from a name to the GGUF file among its blobs. Read only.

    models/manifests/HOST/NAMESPACE/MODEL/TAG      JSON: layers, each with a media type and a digest
    models/blobs/sha256-HEX                        the layers: weights (GGUF), template, parameters, license

Nothing that a manifest says becomes part of a path but sixty-four hexadecimal digits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.models.formats import read_json

PREFIX = "ollama:"
_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_KIND = "application/vnd.ollama.image."
_MAX_JSON = 2**20
"""Bytes of a manifest, and of parameters."""
_PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
}
"""Ollama's name -> that of generation_config.json."""


class OllamaModel(NamedTuple):
    """Files that a manifest names."""

    file: Path
    """Its weights, in GGUF."""
    defaults: dict[str, Any]
    """Sampling parameters, under generation_config.json's names."""


def find_ollama(name: str) -> OllamaModel:
    """The files of "NAME[:TAG]", "USER/NAME[:TAG]" or "HOST/USER/NAME[:TAG]".

    Raises `ModelNotFound` for a name that is not there or a broken manifest, `UnsupportedModel` for a model with an
    adapter of Ollama's.
    """
    parts = _name_parts(name)
    folders = _folders()
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
    return OllamaModel(file, defaults)


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


def _folders() -> list[Path]:
    """Folders in which Ollama keeps models: the one that it was given, or its user's folder, or that of its service on
    Linux."""
    folder = os.environ.get("OLLAMA_MODELS")
    if folder:
        return [Path(folder).expanduser()]
    return [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]


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

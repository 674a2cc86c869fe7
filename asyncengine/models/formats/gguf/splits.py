"""Models in several GGUF files, as llama.cpp's gguf-split names them: NAME-00001-of-00003.gguf."""

from __future__ import annotations

import re
from pathlib import Path

from asyncengine.errors import ModelNotFound
from asyncengine.models.formats.gguf.container import GgufFile
from asyncengine.models.formats.gguf.metadata import broken

SPLIT = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def open_files(path: Path) -> tuple[GgufFile, ...]:
    """A model's files, the one with the header first; `path` may be any of them. Raises `ModelNotFound`."""
    found = SPLIT.fullmatch(path.name)
    if found is None or found["count"] == "00001":
        file = GgufFile(path)
        if _whole(file, "split.count", 1) > 1:
            raise ModelNotFound(
                f"{path} is part of a model of {_whole(file, 'split.count', 1)} files, under another name"
            )
        return (file,)
    paths = [path.with_name(name) for name in sibling_names(path.name)]
    missing = next((part for part in paths if not part.exists()), None)
    if missing is not None:
        raise ModelNotFound(f"{path} is one of {len(paths)} files; missing is {missing.name}")
    files = []
    for number, part in enumerate(paths):
        file = GgufFile(part)
        stated = (_whole(file, "split.no", -1), _whole(file, "split.count", -1))
        if stated != (number, len(paths)):
            raise broken(part, f"it says that it is part {stated[0] + 1} of {stated[1]}")
        files.append(file)
    held, stated_count = sum(len(file.tensors) for file in files), _whole(files[0], "split.tensors.count", -1)
    if stated_count not in (-1, held):
        raise broken(path, f"its parts hold {held} tensors, not {stated_count}")
    return tuple(files)


def sibling_names(name: str) -> list[str]:
    """The names of all files of a split model, of one of them; of another file its own. Raises `ModelNotFound`."""
    found = SPLIT.fullmatch(name)
    if found is None:
        return [name]
    number, count = int(found["number"]), int(found["count"])
    if not 1 <= number <= count <= 9999:
        raise ModelNotFound(f"{name} is no part of {count} files")
    return [f"{found['name']}-{each:05}-of-{count:05}.gguf" for each in range(1, count + 1)]


def _whole(file: GgufFile, key: str, default: int) -> int:
    found = file.metadata.single(key) if key in file.metadata else default
    if isinstance(found, bool) or not isinstance(found, int):
        raise broken(file.path, f"its {key} is no whole number")
    return found

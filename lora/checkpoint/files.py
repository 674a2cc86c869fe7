"""Finding an adapter's files: only inside the configured root, only regular files, never a pickle."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from asyncengine.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20


def find_folder(path: str | os.PathLike[str], root: Path | None) -> Path:
    """The folder at `path`, links resolved. Relative paths are under `root`, or the working directory without one.

    Raises `AdapterError` if it is no folder, and if it lies outside `root` once every link is followed.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise AdapterError("path", "must be the path of an adapter's folder", path)
    given = Path(text)
    try:
        folder = (root / given if root is not None else given.expanduser()).resolve()
        if root is not None:
            _check_inside(folder, root, text)
        exists, is_file = folder.is_dir(), folder.is_file()
    except (OSError, RuntimeError) as error:  # a ring of links, a name too long, no permission
        raise AdapterError("path", f"cannot be followed ({type(error).__name__})", text) from None
    if is_file:
        raise AdapterError("path", f"is a file; pass the folder that holds {CONFIG_FILE}", text)
    if not exists:
        raise AdapterError("path", "is no folder", text)
    return folder


def _check_inside(real: Path, root: Path, given: str) -> None:
    if not real.is_relative_to(root.resolve()):
        raise AdapterError("path", "leaves the folder that adapters may be loaded from", given)


def open_file(folder: Path, name: str, root: Path | None) -> BufferedReader:
    """Open `folder/name` for reading. Raises `AdapterError` if it is missing, not a regular file, or leads outside."""
    try:
        real = (folder / name).resolve()
        if root is not None:
            _check_inside(real, root, f"{folder.name}/{name}")
        # O_NOFOLLOW: a link put there since `resolve` is refused. O_NONBLOCK: opening a named pipe returns at once.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(real, flags)
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(folder, name) from None
    except (OSError, RuntimeError) as error:
        raise AdapterError("path", f"{name} cannot be opened ({type(error).__name__})", str(folder)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AdapterError("path", f"{name} is not a regular file", str(folder))
    return os.fdopen(descriptor, "rb")


def _missing(folder: Path, name: str) -> AdapterError:
    if name == WEIGHTS_FILE:
        try:
            pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        except OSError:
            pickles = []
        if pickles:
            return AdapterError(
                "path",
                f"has only {pickles[0]}; adapters are read from safetensors alone (pickled weights run code when "
                "loaded). Save it once more with peft: save_pretrained(folder, safe_serialization=True)",
                str(folder),
            )
    return AdapterError("path", f"has no {name}", str(folder))


def read_config(folder: Path, root: Path | None) -> bytes:
    """The text of adapter_config.json."""
    with open_file(folder, CONFIG_FILE, root) as stream:
        content = stream.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        raise AdapterError(CONFIG_FILE, f"is larger than {MAX_CONFIG_BYTES} bytes")
    return content


def discover(root: Path) -> dict[str, Path]:
    """Name -> folder of every adapter directly under `root`, by name. Links that leave `root` are passed over."""
    folders: dict[str, Path] = {}
    real_root = root.resolve()
    for entry in sorted(root.iterdir()):
        if (entry / CONFIG_FILE).is_file() and entry.resolve().is_relative_to(real_root):
            folders[entry.name] = entry
    return folders

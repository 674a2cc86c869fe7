"""Models on the Hugging Face hub: names and addresses, the download, and errors that say what helps.

`huggingface_hub` finds, downloads and caches the files by its own settings (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE). It resumes interrupted downloads, and downloads no file that its cache has.
"""

from __future__ import annotations

import errno
import glob
import logging
import os
import re
import shutil
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from asyncengine.errors import ModelNotFound, shorten
from asyncengine.progress import is_terminal

logger = logging.getLogger("asyncengine")

_HUB = "the Hugging Face hub"
_SITE = re.compile(r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)|hf:/)/")
_REPO = r"(?P<repo>[\w-][\w.-]*(?:/[\w-][\w.-]*)?)"
_NAME = re.compile(rf"{_REPO}(?::(?P<choice>[^:\\]+))?", re.ASCII)
_PAGE = re.compile(rf"{_REPO}/(?P<view>tree|blob|resolve|raw)/(?P<revision>[^/]+)(?:/(?P<path>.+))?", re.ASCII)
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "tokenizer*")
_SECOND_COPIES = "consolidated*"
"""A second copy of the weights in a repository, under the names of the model's authors (Mistral)."""


class HubName(NamedTuple):
    """A repository on the hub, and the choice of a GGUF model in it."""

    repo: str
    choice: str = ""
    """A file, or a word in a file's path ("Q4_K_M"). Empty: the safetensors, or the only GGUF model."""
    revision: str | None = None
    """Branch, tag or commit, if the name is an address with one."""


def parse_name(text: str) -> HubName | None:
    """The model that `text` names on the hub: USER/REPO, USER/REPO:QUANTIZATION, USER/REPO:FILE.gguf, or the address of
    a page. None if it can only be a path. Raises `ModelNotFound` for an address of anything else.
    """
    mirror = re.escape(os.environ.get("HF_ENDPOINT", "").rstrip("/"))
    site = _SITE.match(text) or (re.match(mirror + "/", text) if mirror else None)
    rest = text if site is None else re.split("[?#]", text[site.end() :])[0].rstrip("/")
    if site is not None and (page := _PAGE.fullmatch(rest)) is not None:
        path = unquote(page["path"] or "")
        of_model = page["view"] == "tree" or path.endswith(".gguf")  # of any other file, its repository is meant
        return HubName(page["repo"], path if of_model else "", unquote(page["revision"]))
    named = _NAME.fullmatch(rest)
    # "word:word" without a user is no repository, and "NAME.gguf" a file that is missing
    if named is not None and ("/" in named["repo"] if named["choice"] else not rest.endswith(".gguf")):
        return HubName(named["repo"], named["choice"] or "")
    if site is not None or "://" in text:
        raise ModelNotFound(
            f"{shorten(repr(text), 300)} is no address of a model on {_HUB}, such as "
            "https://huggingface.co/USER/REPO, .../tree/REVISION or .../blob/REVISION/FILE.gguf"
        )
    return None


def short_name(path_or_id: str) -> str:
    """The model's name without folder, user or address."""
    named = None if os.path.exists(path_or_id) else parse_name(path_or_id)
    components = [path_or_id.rstrip("/")] if named is None else [named.repo, named.choice]
    return ":".join(component.rsplit("/", 1)[-1] for component in components if component)


def download(named: HubName, revision: str | None = None, *, weights: bool = True, show_progress: bool = False) -> Path:
    """The folder of a model's files, or a GGUF file with its other shards beside it: from the cache, or downloaded.
    `revision` overrides the one of an address. `weights=False`: safetensors files are not needed.

    Raises `ModelNotFound` with the reason and what helps, or with the GGUF models to choose from.
    """
    repo, revision = named.repo, revision or named.revision
    shown = show_progress and is_terminal(sys.stderr)
    try:
        return _download(repo, revision, named.choice, weights, shown)
    except ModelNotFound:
        raise
    except Exception as error:
        raise ModelNotFound(_explain(error, repo, revision)) from error


def _download(repo: str, revision: str | None, choice: str, weights: bool, shown: bool) -> Path:
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache

    wanted, first = [pattern for pattern in _FILES if weights or pattern != "*.safetensors"], "."
    # a snapshot that is complete in the cache needs no answer from the hub, which may be down
    if choice or not _is_cached(repo, revision, wanted, weights):
        sizes = _sizes(repo, revision)
        if choice or (weights and not any(name.endswith(".safetensors") for name in sizes)):
            from asyncengine.execution.models.formats.sources import pick_gguf

            files = pick_gguf(sizes, repo, f'choose one, as in "{repo}:Q4_K_M"', choice)
            if files is not None:
                wanted, first = [glob.escape(file) for file in files], files[0]
        names = [name for name in sizes if any(fnmatch(name, pattern) for pattern in wanted)]
        names = [name for name in names if not fnmatch(name, _SECOND_COPIES)]
        missing = [name for name in names if not isinstance(try_to_load_from_cache(repo, name, revision=revision), str)]
        size = sum(sizes[name] for name in missing)
        if size > _free(constants.HF_HUB_CACHE):
            raise OSError(errno.ENOSPC, f"it takes {size / 1e9:.1f} GB")
        if missing:
            text = f"downloading {len(missing)} files of {repo} ({size / 1e9:.1f} GB) to {constants.HF_HUB_CACHE}"
            logger.info(text)
            if shown:
                print(text, file=sys.stderr)
    folder = snapshot_download(
        repo, revision=revision, allow_patterns=wanted, ignore_patterns=_SECOND_COPIES, tqdm_class=_bars(shown)
    )
    return Path(folder, first)


def _is_cached(repo: str, revision: str | None, wanted: list[str], weights: bool) -> bool:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    which: Any = {"allow_patterns": wanted, "ignore_patterns": _SECOND_COPIES, "local_files_only": True}
    try:
        folder = Path(snapshot_download(repo, revision=revision, **which))
    except LocalEntryNotFoundError:
        return False
    return not weights or any(folder.rglob("*.safetensors"))


def _bars(shown: bool) -> Any:
    """A class of `huggingface_hub`'s progress bars that shows none for downloads that end at once."""
    from huggingface_hub import utils

    def make_bar(self: Any, *args: Any, **kwargs: Any) -> None:
        bar.__init__(self, *args, **{**kwargs, "disable": not shown, "delay": 0.5})

    def display(self: Any, *args: Any, **kwargs: Any) -> Any:
        return bar.display(self, *args, **kwargs) if self.n else None

    module: Any = utils
    bar = module.tqdm
    return type("Bar", (bar,), {"__init__": make_bar, "display": display})


def _sizes(repo: str, revision: str | None) -> dict[str, int]:
    """{path: bytes} of the files of a repository; if the hub cannot be reached, of the GGUF files in the cache."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    except Exception as error:
        try:
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=[], local_files_only=True))
        except Exception:
            raise error from None
        return {file.relative_to(folder).as_posix(): file.stat().st_size for file in folder.rglob("*.gguf")}
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _free(folder: str) -> int:
    """Free bytes on the disk of `folder`, which need not exist yet."""
    return shutil.disk_usage(next(there for there in (Path(folder), *Path(folder).parents) if there.exists())).free


def _explain(error: Exception, repo: str, revision: str | None) -> str:
    """The message for a failed download: the reason, and what helps."""
    from huggingface_hub import constants, errors, get_token

    cause: BaseException = error
    while isinstance(cause, (errors.LocalEntryNotFoundError, errors.DryRunError)) and cause.__cause__ is not None:
        cause = cause.__cause__
    cache, number = constants.HF_HUB_CACHE, getattr(cause, "errno", None)
    token = "there is one, which may not read it" if get_token() else "there is none"
    said = shorten(" ".join(str(getattr(cause, "strerror", None) or cause).split()), 200) or type(cause).__name__
    if isinstance(cause, errors.GatedRepoError):
        page, tokens = f"{constants.ENDPOINT}/{repo}", f"{constants.ENDPOINT}/settings/tokens"
        return (
            f"{repo} is gated: accept its licence at {page}, and set HF_TOKEN to a token of yours ({tokens}; {token})"
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r} on {_HUB}"
    if isinstance(cause, errors.RepositoryNotFoundError):
        return f"{repo!r} is neither a folder here nor a model on {_HUB}; for a private one, set HF_TOKEN ({token})"
    if isinstance(cause, errors.HFValidationError):
        return f"{repo!r} is neither a folder here nor a valid Hugging Face hub id"
    if constants.is_offline_mode():
        return f"{repo} is not, or not whole, in {cache}, and HF_HUB_OFFLINE keeps it from being downloaded"
    if isinstance(cause, errors.HfHubHTTPError):
        return _explain_status(cause.response.status_code, cause.response.headers, repo, cause.server_message or said)
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in said:
        free = f"{_free(cache) / 1e9:.1f} GB are free ({said})"
        return f"{repo} does not fit into {cache}, where {free}: make room, or set HF_HOME to a folder of another disk"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{repo} cannot be kept in {cache} ({said}): set HF_HOME to a folder that you may write to"
    why = f"({type(cause).__name__}: {said})"
    return f"{repo!r} is no folder here, and {_HUB} cannot be reached at {constants.ENDPOINT} {why}"


def _explain_status(status: int, headers: Mapping[str, str], repo: str, said: str) -> str:
    if status == 401:
        return f"{_HUB} refuses your token: set HF_TOKEN to a valid one, or to none"
    if status == 403:
        return f"{_HUB} does not let you read {repo}: {said}"
    if status == 429:
        reset = re.search(r"\bt=(\d+)", headers.get("ratelimit", ""))
        wait = headers.get("retry-after") or (reset[1] if reset else "some")
        return f"{_HUB} wants you to wait {wait} seconds after too many requests; with HF_TOKEN it allows more"
    if status >= 500:
        return f"{_HUB} has a fault of its own (HTTP {status}): try again later"
    return f"{_HUB} answers HTTP {status} for {repo}: {said}"

"""Compiled kernels on disk: found again by whoever runs the same code here, and never in a load's way."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from asyncengine.execution.models.progress import LoadProgress
from asyncengine.kernels.cache_folder import VARIABLE, cache_root
from asyncengine.kernels.cpu import cache
from asyncengine.kernels.cpu.cache import KernelFolder, kernel_folder, stamp_of
from asyncengine.kernels.cpu.jit import serial

NAME = "module.kernel-0123.kernel"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "kernel_folder", cache.functools.cache(kernel_folder.__wrapped__))
    return tmp_path / "cache"


def compiled(number: int) -> tuple[int, list[str]]:
    """A fresh kernel's result for `number`, of the same source each time, and the names of what was compiled for it."""

    @serial
    def three_more(value: int) -> int:
        return value + 3

    heard: list[str] = []
    progress = LoadProgress(False)
    progress.compiling = lambda name, most: heard.append(name)  # type: ignore[method-assign]
    with progress:
        return three_more(number), heard


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_root({}, "linux") == tmp_path / ".cache" / "asyncengine"
    assert cache_root({"XDG_CACHE_HOME": "/x"}, "linux") == Path("/x/asyncengine")
    assert cache_root({"XDG_CACHE_HOME": "not/absolute"}, "linux") == tmp_path / ".cache" / "asyncengine"
    assert cache_root({}, "darwin") == tmp_path / "Library" / "Caches" / "asyncengine"
    assert cache_root({"LOCALAPPDATA": "/local"}, "win32") == Path("/local/asyncengine/Cache")
    for system in ("linux", "darwin", "win32"):
        assert cache_root({VARIABLE: "/mine", "XDG_CACHE_HOME": "/x"}, system) == Path("/mine")


def test_what_the_key_is_made_of(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {cache.kernel_folder(("triple", "cpu", "+avx")).folder, cache.kernel_folder(("triple", "cpu", "")).folder}
    monkeypatch.setattr(cache.numba, "__version__", "0.0")
    found.add(cache.kernel_folder(("triple", "cpu", "", "newer numba")).folder)
    monkeypatch.setattr(cache, "stamp_of", lambda folder: "edited")
    found.add(cache.kernel_folder(("triple", "cpu", "", "newer source")).folder)
    assert len(found) == 4
    assert {folder and folder.parent for folder in found} == {place / "kernels"}


def test_the_source_of_all_counts(tmp_path: Path) -> None:
    """A kernel holds the code of what it calls: an edit there must not find the old one on the disk."""
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("same")
    before = stamp_of(tmp_path)
    assert stamp_of(tmp_path) == before
    (tmp_path / "two.py").write_text("other")
    assert stamp_of(tmp_path) != before


def test_a_kernel_is_compiled_once(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert compiled(4) == (7, ["three more"])
    assert compiled(5) == (8, [])
    (file,) = (place / "kernels").glob("*/*")
    assert file.name.startswith("test_cache.three_more-")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "elsewhere"))
    cache.kernel_folder.cache_clear()
    assert compiled(6) == (9, ["three more"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(file.read_bytes()[:40] + b"x" + file.read_bytes()[41:]),
        lambda file: KernelFolder(file.parent).keep(file.name, b"whole, but no kernel"),
        lambda file: (file.unlink(), file.mkdir()),
    ],
    ids=["empty", "half", "changed", "nonsense", "a folder"],
)
def test_damage_is_compiled_over(place: Path, damage: Any) -> None:
    compiled(1)
    (file,) = (place / "kernels").glob("*/*")
    whole = file.stat().st_size
    damage(file)
    assert compiled(2) == (5, ["three more"])
    if file.is_file():
        assert file.stat().st_size == pytest.approx(whole, rel=0.05)
        assert compiled(3) == (6, [])


def test_a_folder_that_cannot_be_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    for number in (1, 2):
        assert compiled(number) == (number + 3, ["three more"])
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "compiled kernels are not kept" in record.getMessage()
    assert VARIABLE in record.getMessage()

    def nobody(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache, "kernels_root", nobody)
    cache.kernel_folder.cache_clear()
    assert compiled(1) == (4, ["three more"])
    assert "home directory" in caplog.text


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no such owners here")
def test_what_others_could_have_written_is_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    KernelFolder(tmp_path / "a").keep(NAME, b"code")
    assert KernelFolder(tmp_path / "a").find(NAME) == b"code"
    (tmp_path / "a").chmod(0o777)
    open_to_all = KernelFolder(tmp_path / "a")
    assert open_to_all.find(NAME) is None
    open_to_all.keep("another.kernel", b"code")
    assert len(caplog.records) == 1
    assert not (tmp_path / "a" / "another.kernel").exists()
    (tmp_path / "a").chmod(0o755)
    owner = (tmp_path / "a").stat().st_uid
    if owner == 0:  # what root installed is anybody's to use
        monkeypatch.setattr(os, "getuid", lambda: 1000)
        assert KernelFolder(tmp_path / "a").find(NAME) == b"code"
        os.chown(tmp_path / "a", 4321, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert KernelFolder(tmp_path / "a").find(NAME) is None


def test_unused_keys_go_when_a_new_one_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys go that were not used for 90 days, and beyond so many bytes those that were not used for longest."""
    monkeypatch.setattr(cache, "_MOST_BYTES", 10_000)
    now = time.time()
    for days in range(0, 120, 10):  # a kilobyte and a bit each
        folder = tmp_path / f"{days:016x}"
        KernelFolder(folder).keep(NAME, b"x" * 1000)
        os.utime(folder, (now - days * 86400, now - days * 86400))
    others = tmp_path / "somebody's"
    others.mkdir()
    os.utime(others, (0, 0))
    KernelFolder(tmp_path / f"{110:016x}").find(NAME)  # the oldest, but in use
    KernelFolder(tmp_path / ("f" * 16)).keep(NAME, b"x" * 50_000)  # its own size is no matter
    left = {int(folder.name, 16) for folder in tmp_path.iterdir() if folder != others}
    assert left == {110, *range(0, 80, 10), int("f" * 16, 16)}  # nine of a kilobyte
    assert others.is_dir()
    monkeypatch.setattr(cache, "_MOST_BYTES", 10**9)
    KernelFolder(tmp_path / ("e" * 16)).keep(NAME, b"x")
    assert len([*tmp_path.iterdir()]) == len(left) + 2, "nobody else is old enough"
    for days in (60, 70):
        os.utime(tmp_path / f"{days:016x}", (now - 91 * 86400, now - 91 * 86400))
    KernelFolder(tmp_path / ("d" * 16)).keep(NAME, b"x")
    assert not (tmp_path / f"{60:016x}").exists()
    assert (tmp_path / f"{50:016x}").exists()


def test_keys_that_another_process_removes_meanwhile_harm_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    KernelFolder(tmp_path / ("a" * 16)).keep(NAME, b"code")
    KernelFolder(tmp_path / ("b" * 16)).keep(NAME, b"code")
    looked = Path.is_dir

    def gone_then(path: Path) -> bool:
        found = looked(path)
        shutil.rmtree(path, ignore_errors=True)
        return found

    monkeypatch.setattr(Path, "is_dir", gone_then)
    mine = KernelFolder(tmp_path / ("c" * 16))
    mine.keep(NAME, b"code")
    assert mine.find(NAME) == b"code"
    assert caplog.records == []


def test_many_at_once_find_all_or_nothing(tmp_path: Path) -> None:
    contents = [bytes([number]) * 100_000 for number in range(6)]
    start, wrong = threading.Barrier(len(contents)), []

    def work(content: bytes) -> None:
        start.wait()
        folder = KernelFolder(tmp_path / "k")
        for _ in range(30):
            folder.keep(NAME, content)
            if folder.find(NAME) not in contents:
                wrong.append(1)

    threads = [threading.Thread(target=work, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [file.name for file in (tmp_path / "k").iterdir()] == [NAME]


def test_the_bar_counts_kernels(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")

    def shown(bar: Any) -> list[tuple[str, float, float | None]]:
        return [(task.description, task.completed, task.total) for task in bar._bar.tasks]

    with LoadProgress(True) as bar:
        bar.stage("preparing layers", 4)
        bar.advance()
        bar.compiling("first", 50)
        bar.compiling("second", 50)
        layers = ("preparing layers", 1, 4)
        assert shown(bar) == [layers, ("compiling kernel 2 of at most 50, once on this machine: second", 1, 50)]
        bar.stage("reading on")
        assert shown(bar) == [("reading on", 0, None)]
    with bar:  # the next part of the same load goes on counting
        bar.compiling("third", 2)
        assert shown(bar) == [("compiling kernel 3 of at most 3, once on this machine: third", 2, 3)]

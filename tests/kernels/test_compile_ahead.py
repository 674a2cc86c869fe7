"""Kernels compiled by other processes: they are in the cache afterwards, nobody waits for ever, nobody is left."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncengine.kernels import compile_ahead
from asyncengine.kernels.compile_ahead import CompileAhead, can_start
from asyncengine.kernels.cpu import compiler_missing

if compiler_missing(torch.float32, torch.device("cpu")) is not None:
    pytest.skip("no compiler", allow_module_level=True)

from asyncengine.kernels.cache_folder import VARIABLE
from asyncengine.kernels.cpu import cache, norm
from asyncengine.kernels.cpu.cache import KernelFolder, kernel_folder
from asyncengine.kernels.cpu.jit import compiled_for
from asyncengine.kernels.elsewhere import elsewhere, watcher

_CPU = "asyncengine.kernels.cpu."
SMALL = f"{_CPU}gather:copy_few_rows:(int64, int64, int64, int64, int64)"
CALLS_OTHERS = f"{_CPU}norm:norm:(int64, int64, int64, int64, int64, float32, float32, int64)"
UNKNOWN = f"{_CPU}gather:nothing_of_the_kind:(int64)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, of this process and of those it starts."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(compile_ahead, "loaded_names", set())
    kernel_folder.cache_clear()
    yield tmp_path
    kernel_folder.cache_clear()


def kept(folder: Path) -> list[str]:
    """The functions whose code is in the cache, and other files there."""
    return sorted(file.name.rsplit("-", 1)[0] for file in folder.glob("kernels/*/*") if not file.name.startswith("."))


def compiling_process() -> subprocess.Popen[str]:
    """One that waits for names."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from asyncengine.kernels.compile_worker import main; main()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has a shell run a program in the place of each process that compiles."""
    start = subprocess.Popen

    def put(program: str) -> None:
        monkeypatch.setattr(subprocess, "Popen", lambda command, **rest: start(["sh", "-c", program], **rest))

    return put


def answering(begin: Path) -> str:
    """A program that says of each kernel that it is compiled, from when this file is there."""
    return f"until [ -e {begin} ]; do sleep 0.01; done; echo ready; while read name; do echo =; done"


def finished(ahead: CompileAhead, names: list[str], later: list[str] | None = None) -> list[tuple[str, int]]:
    """Reports of a whole load: each name, with the number of names that are needed. Nothing is compiled afterwards."""
    told: list[tuple[str, int]] = []
    ahead.start(names, later or [])
    ahead.finish(lambda name, most: told.append((name, most)))
    ahead.close()
    return told


ALONE = "mkdir {}/taken || exec sleep 100"
"""Beginning of a program of which only the first serves."""


def serving() -> list[threading.Thread]:
    """Threads that give names to processes."""
    return [each for each in threading.enumerate() if each.name.startswith("asyncengine-compile")]


def test_all_are_kept_with_those_they_call_and_the_next_load_starts_nothing(folder: Path) -> None:
    ahead, told = CompileAhead(2), []
    ahead.start([SMALL, CALLS_OTHERS])
    assert ahead.kept == ()
    ahead.finish(lambda name, most: told.append((name, most)))
    ahead.close()
    assert ahead.kept == [SMALL, CALLS_OTHERS]
    assert sorted(name.split(":")[1] for name, _ in told) == ["_run", "copy_few_rows", "norm", "norm.share"]
    assert told[-1][1] == 4
    assert {"norm.norm.share", "norm.norm", "calls._run", "first_load", "gather._copy_rows"} <= set(kept(folder))
    assert [process.ended for process in ahead.processes] == [True, True]
    again = CompileAhead(2)
    again.start([CALLS_OTHERS, SMALL])
    assert serving() == []
    assert again.kept == [CALLS_OTHERS, SMALL]
    again.finish(lambda name, most: pytest.fail("nothing is left to be compiled"))


def test_a_load_waits_for_what_a_first_answer_needs_and_whoever_calls_another_kernel_for_that(folder: Path) -> None:
    ahead = CompileAhead(2)
    ahead.start([SMALL], [CALLS_OTHERS])
    assert ahead.left == []
    told = []
    ahead.finish(lambda name, most: told.append((name, most)))
    assert told == [(SMALL, 1)]
    assert ahead.kept == [SMALL]
    module, function, types = CALLS_OTHERS.split(":")
    assert elsewhere == [ahead]
    assert not ahead.wait_for(module, "(int64)")
    assert not ahead.wait_for(f"{module}s", types)
    assert ahead.wait_for(module, types)
    assert f"norm.{function}" in kept(folder)
    assert not ahead.wait_for(module, types)  # it is there
    ahead.wait()
    assert elsewhere == []
    assert {"norm.norm.share", "calls._run", "first_load"} <= set(kept(folder))
    again = CompileAhead(2)
    again.start([SMALL], [CALLS_OTHERS])
    assert serving() == []
    assert again.kept == [SMALL, CALLS_OTHERS]
    assert again.left == []


def test_a_kernel_that_a_needed_one_calls_is_needed_too(folder: Path, in_place: Callable[[str], None]) -> None:
    """It was known as one that a first answer does without."""
    calls = f"read name; echo '+{CALLS_OTHERS}'; echo =; read name; echo ="
    in_place(f"{ALONE.format(folder)}; echo ready; {calls}; exec sleep 100")
    ahead = CompileAhead(2)
    assert finished(ahead, [SMALL], [UNKNOWN, CALLS_OTHERS]) == [(SMALL, 2), (CALLS_OTHERS, 2)]
    assert ahead.kept == [SMALL]


@pytest.mark.parametrize("most", [1, 2])
def test_what_this_process_has_is_not_looked_for(most: int, folder: Path) -> None:
    """A model that was loaded before, or another one with the same kernels, leaves kernels in this process."""
    compile_ahead.loaded_names.update([SMALL, CALLS_OTHERS])
    ahead = CompileAhead(most)
    ahead.start([SMALL], [CALLS_OTHERS])
    assert (ahead.kept, ahead.left, serving()) == ([SMALL, CALLS_OTHERS], [], [])
    ahead.finish(lambda name, most: pytest.fail("nothing is left to be compiled"))
    other = CompileAhead(1)
    other.start([SMALL, UNKNOWN])
    assert (other.kept, other.left) == ((), [SMALL, UNKNOWN])


def test_a_kernel_is_not_compiled_here_while_others_are_at_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of a request calls it: the kernel is asked for by its module and types, and found in the cache."""
    asked, by_address = [], CALLS_OTHERS.replace("(", "void(")

    def wait_for(module: str, types: str) -> bool:
        asked.append((module, types))
        finished(ahead := CompileAhead(2), [by_address])
        return ahead.kept == [by_address]

    monkeypatch.setattr("asyncengine.kernels.cpu.cache.elsewhere", [SimpleNamespace(wait_for=wait_for)])
    heard: list[str] = []
    token = watcher.set(lambda name, most: heard.append(name))
    try:
        compiled_for(norm.norm, by_address.split(":")[2])
    finally:
        watcher.reset(token)
    assert asked == [(f"{_CPU}norm", CALLS_OTHERS.split(":")[2])]
    assert heard == []


def test_what_comes_later_gives_way(folder: Path) -> None:
    with compiling_process() as process:
        for line, priority in ((SMALL, os.getpriority(os.PRIO_PROCESS, 0)), (f"?{SMALL}", 19)):
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "=\n"
            assert os.getpriority(os.PRIO_PROCESS, process.pid) == priority


@pytest.mark.parametrize(
    ("device", "gpu", "backend", "expected"),
    [
        ("cpu", True, "auto", 2), ("auto", False, "auto", 2), ("auto", True, "auto", 0), ("cuda", True, "auto", 0),
        ("cpu", False, "torch", 0),
    ],
)  # fmt: skip
def test_where_nothing_was_ever_compiled_processes_start_before_torch_is_there(
    device: str, gpu: bool, backend: str, expected: int, folder: Path, monkeypatch: pytest.MonkeyPatch,
    in_place: Callable[[str], None],
) -> None:  # fmt: skip
    in_place("exec sleep 100")
    monkeypatch.setattr(os.path, "exists", lambda path: gpu and path == "/dev/nvidiactl")
    monkeypatch.setattr(sys, "platform", "linux")
    for _ in range(2):
        ahead = CompileAhead.for_engine(2, device, backend)
        assert len(serving()) == expected
        ahead.finish(lambda name, most: pytest.fail("nothing was to be compiled"))
        assert serving() == []
        assert all(process.ended for process in ahead.processes)
        (folder / "kernels").mkdir(exist_ok=True)
        expected = 0


def test_what_only_keys_in_bytes_need_is_compiled_for_these_alone(folder: Path) -> None:
    """In a process of its own: numba asks once in a process what a call of these types needs."""
    program = """
from asyncengine.kernels.cpu import attention_blocks
from asyncengine.kernels.cpu.jit import compiled_for
from asyncengine.kernels.elsewhere import called_apart

called_apart.set(lambda name, rare: print(operand, name.split(":")[1], rare))
for operand in ("uint16", "int16"):
    compiled_for(attention_blocks.gather, f"void({', '.join(['int64'] * 8)}, uint16, {operand})")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["int16", "_gather_quantized", "False"]


def test_cpus_that_a_program_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert compile_ahead.usable_cpus() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert 1 <= compile_ahead.usable_cpus() <= (os.cpu_count() or 1)


def test_what_cannot_be_compiled_is_left_to_its_caller(folder: Path) -> None:
    ahead = CompileAhead(2)
    assert sorted(name for name, _ in finished(ahead, [UNKNOWN, SMALL])) == [SMALL, UNKNOWN]
    assert kept(folder) == ["gather._copy_rows"]  # and no mark that says that all are there
    assert ahead.kept == ()


def test_a_load_that_is_given_up_ends_the_processes_at_once(folder: Path) -> None:
    ahead = CompileAhead(2)
    ahead.start([CALLS_OTHERS, SMALL])

    def give_up(name: str, most: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ahead.finish(give_up)
    ahead.close()
    assert all(process.ended for process in ahead.processes)
    assert serving() == []


@pytest.mark.parametrize(
    "program", ["exit 3", "echo ready; read line; exit 3", "exec sleep 100", "echo ready; exec sleep 100"]
)
def test_processes_that_die_or_hang_are_not_waited_for(
    program: str, folder: Path, in_place: Callable[[str], None]
) -> None:
    """They do so before they are ready, or with a kernel."""
    in_place(program)
    ahead = CompileAhead(2)
    if "sleep" in program:
        ahead.patience = 0.2
    ahead.start([SMALL, UNKNOWN], [CALLS_OTHERS])
    ahead.finish(lambda name, most: None)
    module, _, types = CALLS_OTHERS.split(":")
    assert not ahead.wait_for(module, types)
    if "exit" in program:
        ahead.wait()
        assert elsewhere == []
        assert ahead.left == [SMALL, UNKNOWN, CALLS_OTHERS]
    ahead.close()
    assert kept(folder) == []
    assert all(process.ended for process in ahead.processes)


def refuse(*args: object, **rest: object) -> None:
    raise PermissionError("no processes here")


def frozen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "frozen", True, raising=False)


NOBODY: dict[str, tuple[int, Callable[[pytest.MonkeyPatch], None]]] = {
    "no core": (0, lambda patch: None),
    "one core": (1, lambda patch: None),
    "a frozen program": (2, frozen),
    "a frozen program on one core": (1, frozen),
    "a cache that keeps nothing": (
        2, lambda patch: patch.setattr(cache, "kernel_folder", lambda machine: KernelFolder(None, "there is none")),
    ),
    "processes are forbidden": (2, lambda patch: patch.setattr(subprocess, "Popen", refuse)),
    **{f"the program {name}": (2, lambda patch, name=name: patch.setattr(sys, "executable", name))
       for name in ("", None, "/usr/bin/uwsgi", "C:/program/app.exe")},
}  # fmt: skip


@pytest.mark.parametrize("why", NOBODY)
def test_where_no_process_may_compile_it_is_left_to_the_load(
    why: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is said, but by a cache that keeps nothing."""
    assert can_start()
    most, plant = NOBODY[why]
    plant(monkeypatch)
    with caplog.at_level(logging.INFO):
        ahead = CompileAhead(most)
        ahead.start([SMALL], [CALLS_OTHERS])
        assert why == "processes are forbidden" or serving() == []
        ahead.finish(lambda name, most: pytest.fail("nobody compiled"))
        for thread in serving():  # they end by themselves
            thread.join(60)
    assert (ahead.kept, ahead.left) == ((), [SMALL, CALLS_OTHERS])
    assert [record for record in caplog.records if "kernels are not kept" not in record.getMessage()] == []


def test_whoever_waits_for_a_kernel_gets_it_next(folder: Path, in_place: Callable[[str], None]) -> None:
    begin = folder / "begin"
    in_place(f"{ALONE.format(folder)}; {answering(begin)}")
    ahead = CompileAhead(2)
    ahead.start([SMALL, CALLS_OTHERS], [UNKNOWN])
    ahead.patience = 0.01
    module, _, types = CALLS_OTHERS.split(":")
    assert not ahead.wait_for(module, types)  # nobody compiles it yet
    ahead.patience = 60.0
    begin.touch()
    told = []
    ahead.finish(lambda name, most: told.append(name))
    ahead.close()
    assert told == [CALLS_OTHERS, SMALL]


def test_the_process_ends_with_the_program_that_started_it() -> None:
    """The process ends whatever it is doing: here, waiting for names, with its input closed as a dead program's is."""
    process = compiling_process()
    process.stdin.close()
    assert process.wait(timeout=120) == 0
    assert process.stdout.read() == ""


_IN_A_COMPILER = """
import ctypes
from asyncengine.kernels.cpu import calls
from asyncengine.kernels.compile_worker import main

def compile_named(name):
    calls.called_apart.get()("it is in it", False)
    ctypes.PyDLL(None).pause()  # with the interpreter's lock, as long as it takes

calls.compile_named = compile_named
main()
"""
_PROGRAM = """
import os, subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(worker.pid, flush=True)
worker.stdin.write("kernel\\n")
worker.stdin.flush()
print(worker.stdout.readline(), worker.stdout.readline(), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems say nothing of a parent's end")
def test_the_process_ends_with_its_program_even_inside_a_compiler() -> None:
    """No Python code in it gets to run there. It has the program's stderr: what is read ends when both have ended."""
    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, _IN_A_COMPILER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    worker = int(program.stdout.readline())
    try:
        said, shown = program.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.kill(worker, signal.SIGKILL)
        raise
    assert said.split("\n")[:2] == ["ready", " +it is in it"], shown
    assert program.returncode == 0

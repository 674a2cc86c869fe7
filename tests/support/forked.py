"""Python programs that begin with torch imported: forks of one process that has it, for tests that start many.

Importing torch and numba takes two seconds of CPU; a fork takes some milliseconds. What a program imports beyond them,
and all that it does, is its own. Elsewhere than on Linux each is a process of its own, as usual.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache

_SERVER = """
import atexit, gc, json, os, signal, socket, sys, threading
import numba.core.dispatcher, torch
gc.collect()
gc.freeze()  # a fork need not look at it, nor copy it
asked, running = socket.socket(fileno=int(sys.argv[1])), set()
while message := socket.recv_fds(asked, 1 << 20, 2)[:2]:
    text, files = message
    if not text:
        break
    job = json.loads(text)
    if "wait" in job:
        running.discard(job["wait"])
        answer = os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1])
    else:
        answer = os.fork()
        if not answer:
            asked.close()
            for number, file in enumerate(files, 1):
                os.dup2(file, number)
                os.close(file)
            sys.argv = ["-c", *job["arguments"]]
            os.environ.clear()
            os.environ.update(job["environment"])
            exec(compile(job["code"], "<string>", "exec"), vars(sys.modules["__main__"]))
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(0)  # taking down what torch has made takes longer than most programs here
        running.add(answer)
    for file in files:
        os.close(file)
    asked.sendall(json.dumps(answer).encode())
for child in running:
    os.kill(child, signal.SIGKILL)
"""


@cache
def _server() -> socket.socket:
    """The connection to the process that forks; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen([sys.executable, "-c", _SERVER, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    return ours


class Forked:
    """A running program: the part of `subprocess.Popen` that tests of processes need."""

    def __init__(self, code: str, arguments: tuple[str, ...], stderr: int = 2) -> None:
        read, write = os.pipe()
        job = {"code": code, "arguments": arguments, "environment": dict(os.environ)}
        with open(write, "wb"):
            socket.send_fds(_server(), [json.dumps(job).encode()], [write, stderr])
            self.pid: int = json.loads(_server().recv(100))
        self.stdout = open(read, "rb")  # noqa: SIM115 - its reader closes it

    def kill(self) -> None:
        os.kill(self.pid, 9)

    def wait(self) -> int:
        _server().sendall(json.dumps({"wait": self.pid}).encode())
        return int(json.loads(_server().recv(100)))


Program = Forked | subprocess.Popen[bytes]


def start(code: str, *arguments: str) -> Program:
    """Start a program whose output is read by a pipe, `stdout`."""
    if sys.platform != "linux":
        return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
    return Forked(code, arguments)


def run(code: str, *arguments: str) -> str:
    """The output of a program that must end well."""
    if sys.platform != "linux":
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout
    with tempfile.TemporaryFile() as errors:
        program = Forked(code, arguments, errors.fileno())
        with program.stdout:
            output = program.stdout.read().decode()
        ended = program.wait()
        errors.seek(0)
        assert ended == 0, errors.read().decode()
    return output

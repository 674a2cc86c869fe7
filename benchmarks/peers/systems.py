"""Systems to compare with, what each can do, and whether it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.workloads import Workload

FILE_TYPES = ("q8_0", "q6_k", "q4_k_m", "q4_0")
"""Forms of GGUF files that this engine and llama.cpp read alike."""
LLAMA_TYPES = {"none": "", "int8": "q8_0", "int4": "q4_0", **{kind: kind for kind in FILE_TYPES}}
PYTHONS = ("transformers", "llama", "vllm")
"""Names for which the caller can give a Python: `llama` serves llama-cpp-python and the writing of GGUF files."""


@dataclass(frozen=True, slots=True)
class System:
    name: str
    title: str
    driver: str
    needs: tuple[str, ...]
    """Packages, the first of which gives the version."""
    python: str = ""
    """Python of the system's own environment; "": the one that runs this."""
    gguf: bool = False
    """Reads the GGUF file."""
    streams: bool = False
    arrivals: bool = False
    """Takes requests while others run."""
    serial: bool = False
    """One request at a time."""
    chat: bool = False
    """Through LangChain: the worker is that of `driver`, only the way of asking differs."""
    quantization: str = "none"

    @property
    def worker(self) -> str:
        """Systems with the same worker share a process and a loaded model."""
        return f"{self.driver} {self.quantization}"

    def refuses(self, workload: Workload) -> str | None:
        """Why it does not run `workload`."""
        if workload.arrivals and not self.arrivals:
            return "takes no requests while others run"
        if self.chat and not workload.chat:
            return "not asked of it"
        if self.serial and workload.name == "conc-64":
            return "one at a time: as with 16"
        return None


ENGINE = System("engine", "this engine", "engine", ("asyncengine",), streams=True, arrivals=True)
BASE: tuple[System, ...] = (
    ENGINE,
    System("langchain", "this engine, LangChain abatch", "engine", ("asyncengine", "langchain_core"), chat=True),
    System("vllm", "vLLM offline", "vllm_offline", ("vllm",), "vllm"),
    System("vllm-async", "vLLM AsyncLLM", "vllm_async", ("vllm",), "vllm", streams=True, arrivals=True),
    System("llama-server", "llama.cpp server", "llama_server", (), "llama", gguf=True, streams=True, arrivals=True),
    System("llama-python", "llama-cpp-python", "llama_python", ("llama_cpp",), "llama", gguf=True, serial=True),
    System("transformers", "transformers generate", "transformers_generate", ("transformers", "torch"), "transformers"),
    System(
        "transformers-batching", "transformers batching", "transformers_batching", ("transformers", "torch"),
        "transformers",
    ),
)  # fmt: skip


def readers(form: str) -> list[System]:
    """The systems that read a GGUF file of that form."""
    return [_variant(system, form, form, gguf=True) for system in BASE if system is ENGINE or system.gguf]


def systems(quantizations: list[str]) -> list[System]:
    """Every system in each of these forms that it has: only this engine and llama.cpp have quantized ones here."""
    found = []
    for form in quantizations:
        for system in BASE:
            if form == "none":
                found.append(system)
            elif system is ENGINE or system.gguf:
                suffix = LLAMA_TYPES[form] if system.gguf else form
                found.append(_variant(system, form, suffix, gguf=system.gguf or form in FILE_TYPES))
    return found


def _variant(system: System, form: str, suffix: str, *, gguf: bool) -> System:
    return System(
        f"{system.name}-{suffix}", f"{system.title} {suffix}", system.driver, system.needs, system.python, gguf,
        system.streams, system.arrivals, system.serial, system.chat, form,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Places:
    """Places of peers."""

    pythons: Mapping[str, str]
    server: str | None

    def python(self, name: str) -> str:
        return self.pythons.get(name, sys.executable)


def parse_python(text: str) -> tuple[str, str]:
    """ "vllm=/path/bin/python" to its halves. Raises `ValueError`."""
    name, _, path = text.partition("=")
    if name not in PYTHONS or not path:
        raise ValueError(f"must be NAME=PATH, NAME one of {', '.join(PYTHONS)}: {text!r}")
    return name, path


def find_server(path: str | None) -> str | None:
    return shutil.which(path or "llama-server")


def look_for(system: System, places: Places) -> tuple[str | None, str]:
    """Version, or None and the reason why it is absent."""
    if system.driver == "llama_server":
        if places.server is None:
            version, missing = packages(places.python("llama"), ("xllamacpp",))
            return version, f"no llama-server on the path: give --llama-server; nor its wheels: {missing}"
        run = subprocess.run([places.server, "--version"], capture_output=True, text=True, check=False)
        lines = (run.stderr + run.stdout).splitlines()
        return next((line for line in lines if line.startswith("version")), "unknown version"), ""
    python = places.python(system.python)
    if not Path(python).exists():
        return None, f"{python} does not exist"
    return packages(python, system.needs)


_PROBE = """
import importlib.metadata, importlib.util, json, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
names = importlib.metadata.packages_distributions()
found = [importlib.metadata.version(names[name][0]) for name in sys.argv[1:2] if names.get(name)]
print(json.dumps([missing, found]))
"""


def packages(python: str, needs: tuple[str, ...]) -> tuple[str | None, str]:
    """Version of the first of these packages in that Python, or None and which are missing. Imports none of them."""
    run = subprocess.run([python, "-c", _PROBE, *needs], capture_output=True, text=True, check=False)
    if run.returncode:
        return None, f"{python} does not run: {run.stderr.strip()[-200:]}"
    missing, versions = json.loads(run.stdout)
    if missing:
        return None, f"{', '.join(missing)} not installed in {python}"
    return (versions or ["this checkout"])[0], ""

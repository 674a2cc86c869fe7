"""A loader without files, stepped by hand if wanted: what the registry needs of one, and no more."""

from __future__ import annotations

import hashlib
import os
import threading

import torch

from asyncengine.errors import AdapterError
from asyncengine.lora.adapter import Adapter
from asyncengine.seams import LoraWeights


def adapter_of(name: str, content: str, nbytes: int) -> Adapter:
    half = torch.zeros(1, nbytes // 8)
    weights = LoraWeights("q_proj", half, half.T.contiguous())
    digest = hashlib.sha256(content.encode()).hexdigest()
    return Adapter(name, digest, 1, {"q_proj": weights}, nbytes)


def digest_of(content: str) -> str:
    return adapter_of("", content, 8).digest


class FakeLoader:
    """Last part of a path -> content; one that starts with "bad" does not load. `gate`: cleared, nothing is read."""

    def __init__(self, nbytes: int = 800) -> None:
        self.contents: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.nbytes = nbytes
        self.gate = threading.Event()
        self.gate.set()
        self.reads: list[str] = []
        self.threads: list[threading.Thread] = []

    def fingerprint(self, path: str, max_bytes: int) -> object:
        path = os.path.basename(path)
        if self.size(path) > max_bytes:
            raise AdapterError("adapter_memory", "too small")
        return (path, self.contents.get(path))

    def size(self, path: str) -> int:
        return self.sizes.get(path, self.nbytes)

    def load(self, name: str, path: str) -> Adapter:
        self.threads.append(threading.current_thread())
        path = os.path.basename(path)
        content = self.contents.get(path, path)
        self.reads.append(content)
        assert self.gate.wait(120)
        if content.startswith("bug"):
            raise ZeroDivisionError
        if content.startswith("bad"):
            raise AdapterError("rank_pattern", "is bad")
        return adapter_of(name, content, self.size(path))

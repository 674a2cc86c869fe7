"""Time of loading beside that of reading the file, and of a command's start beside `import torch`.

    python -m benchmarks.loading [--shape qwen3-0.6b --kinds bf16 int8 int4 --repeat 3 --at-hand | --start | --first]

A random checkpoint of the shape in bfloat16, in the page cache. "read" is its file read by one thread into a buffer
that is used again and again, "new memory" into memory that the system has to find first, as whoever keeps weights has
to, and "huge pages" the same in pages of 2 MiB, as weights are kept here. Each reading and each load is a process of
its own, after the same imports: a virtual machine's host takes back memory that has been free for two seconds, and
needs longer to find it again than all else here takes. `--at-hand`: each process has it found before its clock starts,
for readings and loads alike, as on a machine whose memory nobody takes away. Kernels come from the cache. Seconds,
medians of `--repeat` rounds in turn, the ratios to the readings, and the peak of memory beyond what the process had
before, relative to the weights that are kept.

`--start`: `asyncengine generate demo` and `import torch`, whole processes in turn. `--first`: a load with no kernel
compiled before (an empty `ASYNCENGINE_CACHE`) of the shape and of the demo model.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from benchmarks.random_model import SHAPES

SETTINGS: dict[str, dict[str, Any]] = {"bf16": {}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}}
_PIECE = 2**22


def main() -> None:
    options = parse()
    if options.one is not None:
        import_all()
        if options.at_hand:
            have_at_hand(2 * (Path(options.folder) / "model.safetensors").stat().st_size)
        print(json.dumps(read(Path(options.folder)) if options.one == "read" else load(options.folder, options.one)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or scratch)
        if not (folder / "model.safetensors").exists():
            write(folder, SHAPES[options.shape])
        found: dict[str, Any] = {"bytes": (folder / "model.safetensors").stat().st_size}
        found.update(rounds(options, folder))
    print(json.dumps(found) if options.json else table(found))


def rounds(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Medians of what is measured in turn."""
    at_hand = ["--at-hand"] if options.at_hand else []
    turns: dict[str, Callable[[], dict[str, float]]] = {"read": partial(apart, "read", folder, *at_hand)}
    if not (options.start or options.first):
        turns.update({kind: partial(apart, kind, folder, *at_hand) for kind in options.kinds})
    if options.first:
        turns["first load"] = lambda: with_empty_cache("bf16", folder)
        turns["first load, demo"] = lambda: with_empty_cache("bf16", Path("demo"))
    if options.start:
        turns["import torch"] = lambda: command("-c", "import torch")
        turns["generate demo"] = lambda: command("-m", "asyncengine", "generate", "demo", "Hello")
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in turns}
    for _ in range(options.repeat):
        for name, turn in turns.items():
            measured[name].append(turn())
    return {
        name: {key: statistics.median(each[key] for each in all_of) for key in all_of[0]}
        for name, all_of in measured.items()
    }


def write(folder: Path, shape: dict[str, Any]) -> None:
    """A checkpoint with the tensors of the shape, random and small."""
    import torch
    from safetensors.torch import save_file

    from asyncengine.execution.models.families import decoder_config_of, native_config

    config = {"model_type": "qwen3", **shape, "dtype": "bfloat16"}
    plain = native_config(config)
    if plain is None:
        raise SystemExit(f"no such shape can be written: {shape}")
    described = decoder_config_of(plain, 64)
    shapes = tensors_of(described)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.empty(size, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
        for name, size in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def tensors_of(described: Any) -> dict[str, tuple[int, ...]]:
    """{name: shape} of what its decoder is loaded from."""
    import torch

    from asyncengine.execution.layers.kernels import layer_kernels
    from asyncengine.execution.layers.options import LayerOptions
    from asyncengine.execution.models.decoder import Decoder

    device = torch.device("meta")
    options = LayerOptions(torch.bfloat16, device, layer_kernels("torch", torch.bfloat16, device), None)
    return {name: slot.shape for name, slot in Decoder(described, options, 64).slots().items()}


def read(folder: Path) -> dict[str, float]:
    """Seconds of reading the file, into memory used again and into new memory of both kinds."""
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with file.open("rb", buffering=0) as opened:
        piece = bytearray(_PIECE)
        begun = time.perf_counter()
        while opened.readinto(piece):
            pass
        again = time.perf_counter() - begun
        small = read_into_new(opened, size, huge=False)
        huge = read_into_new(opened, size, huge=True)
    return {"seconds": again, "new_memory": small, "huge_pages": huge}


def read_into_new(opened: FileIO, size: int, *, huge: bool) -> float:
    """Seconds of reading the file into memory that the system has to find, in pages of this size."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    opened.seek(0)
    begun = time.perf_counter()
    view, place = memoryview(memory), 0
    while place < size:
        place += opened.readinto(view[place : place + 2**26]) or size
    seconds = time.perf_counter() - begun
    view.release()
    memory.close()
    return seconds


def have_at_hand(size: int) -> None:
    """So much memory has been free for no time at all when this returns, in pages of 2 MiB."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for place in range(0, size, mmap.PAGESIZE):
        memory[place] = 1
    memory.close()


def import_all() -> None:
    """Import all that a load imports."""


def load(folder: str, kind: str) -> dict[str, float]:
    """Seconds of `from_pretrained` after all imports, of its stages, and what memory it took beyond before."""
    from asyncengine import Engine
    from asyncengine.execution.models.progress import LoadProgress

    begun = time.perf_counter()
    stages: list[tuple[str, float]] = []
    known = LoadProgress.stage

    def stage(self: Any, name: str, *more: Any, **others: Any) -> Any:
        stages.append((name, time.perf_counter() - begun))
        return known(self, name, *more, **others)

    LoadProgress.stage = stage  # type: ignore[method-assign]
    before, peak = memory_now(), Peak()
    used = resource.getrusage(resource.RUSAGE_SELF)
    begun = time.perf_counter()
    engine = Engine.from_pretrained(folder, show_progress=False, kv_cache_memory="256MiB", **SETTINGS[kind])
    seconds = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "seconds": seconds,
        "peak": (peak.end() - before) / engine.info.weight_bytes,
        "weights": float(engine.info.weight_bytes),
        "user": after.ru_utime - used.ru_utime,
        "system": after.ru_stime - used.ru_stime,
        "faults": float(after.ru_minflt - used.ru_minflt),
    }
    ends = [*(begun for _, begun in stages[1:]), seconds]
    for (name, start), end in zip(stages, ends, strict=True):
        found[f"stage: {name}"] = found.get(f"stage: {name}", 0.0) + end - start
    engine.close()
    return found


class Peak:
    """The most memory of its own that the process has had, pages of files aside, looked at every few milliseconds."""

    def __init__(self) -> None:
        self._most, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self._most = max(self._most, memory_now())

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return max(self._most, memory_now())


def memory_now() -> int:
    """Bytes of anonymous memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("needs Linux")


def apart(kind: str, folder: Path, *more: str, **environment: str) -> dict[str, float]:
    """The same in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.loading", "--one", kind, "--folder", str(folder), *more],
        check=False, capture_output=True, text=True, env={**os.environ, **environment},
    )  # fmt: skip
    if run.returncode:
        raise SystemExit(run.stderr)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def with_empty_cache(kind: str, folder: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        return apart(kind, folder, ASYNCENGINE_CACHE=cache)


def command(*arguments: str) -> dict[str, float]:
    begun = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return {"seconds": time.perf_counter() - begun}


def table(found: dict[str, Any]) -> str:
    once, new, huge = (found["read"][name] for name in ("seconds", "new_memory", "huge_pages"))
    lines = [f"{found['bytes'] / 1e9:.2f} GB: read {once:.2f} s, into new memory {new:.2f} s, huge pages {huge:.2f} s"]
    for name, values in found.items():
        if name in ("bytes", "read"):
            continue
        line = f"{name:18} {values['seconds']:6.2f} s"
        if "peak" in values:
            line += f"  {values['seconds'] / once:5.2f} x read  {values['seconds'] / new:5.2f} x new memory"
            line += f"  {values['seconds'] / huge:5.2f} x huge pages"
            line += f"  peak {values['peak']:.2f}  user {values['user']:.2f} system {values['system']:.2f}"
            line += "\n    " + ", ".join(f"{key[7:]} {s:.2f}" for key, s in values.items() if key.startswith("stage: "))
        lines.append(line)
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--kinds", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--folder", help="where the checkpoint is, or is to stay")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--at-hand", action="store_true", help="memory that the machine has found already")
    parser.add_argument("--start", action="store_true", help="a command's start instead")
    parser.add_argument("--first", action="store_true", help="first loads instead")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=["read", *SETTINGS], help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""The command. Run it from the root of the repository: python -m benchmarks.peers"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.peers import report
from benchmarks.peers.drivers.base import Settings
from benchmarks.peers.files import make_ggufs, read_shape
from benchmarks.peers.memory import affinity
from benchmarks.peers.pool import MachineLock
from benchmarks.peers.results import Results
from benchmarks.peers.run import Run, say
from benchmarks.peers.shapes import SHAPES, weight_bytes, write_checkpoint
from benchmarks.peers.systems import (
    BASE,
    LLAMA_TYPES,
    Places,
    System,
    find_server,
    look_for,
    parse_python,
    readers,
    systems,
)
from benchmarks.peers.workloads import DEEP_OUT, Workload, deep, workloads

KV_TOKENS = 20480
"""64 requests of 192 tokens, and what pages of 128 tokens leave empty."""
MAX_LEN = 2304
MAX_SEQS = 64
MEMORY = "memory"


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # workers that are stopped do not end by themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)  # even where the shell said to ignore it
    chosen, memory = choose_workloads(options)
    with tempfile.TemporaryDirectory() as scratch:
        run = prepare(options, Path(options.cache or scratch))
        run.save = lambda: save(run, options)
        try:
            run.all(chosen, memory)
        except KeyboardInterrupt:
            say("interrupted: what was measured so far follows")
        run.save()
        report.show(run, chosen, Console(width=None if sys.stdout.isatty() else 200))
        if options.markdown:
            Path(options.markdown).write_text(report.as_markdown(run, chosen), encoding="utf-8")
        if options.plot:
            report.plot(run, chosen, options.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=sys.modules["benchmarks.peers"].__doc__
    )
    names = [system.name for system in BASE]
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen3-0.6b")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--quantization", nargs="+", choices=tuple(LLAMA_TYPES), default=["none"],
        help="int8, int4: this engine's, beside llama.cpp's q8_0 and q4_0; others: both read one file")  # fmt: skip
    add("--gguf", metavar="FILE", help="a real model in the place of random weights; this engine and llama.cpp read it")
    add("--expanded", action="store_true",
        help="of --gguf: all systems get its numbers in --dtype, as a checkpoint and as a GGUF file")  # fmt: skip
    add("--threads", type=int, default=None, help="for each system; default: the cores this process may use")
    add("--only", nargs="+", metavar="SYSTEM", choices=names, help=f"of {', '.join(names)}; this engine always runs")
    add("--skip", nargs="+", metavar="SYSTEM", choices=names, default=[])
    add("--workloads", nargs="+", choices=[*workloads(1, 1), MEMORY])
    add("--deep", type=int, nargs="+", metavar="TOKENS", default=[],
        help="in the place of workloads: one stream with so long a prompt, and its decoding behind it")  # fmt: skip
    add("--repeats", type=int, default=3)
    add("--quick", action="store_true", help="fewer requests and tokens, one repetition: does everything run?")
    add("--rate", type=float, default=None, help="requests a second that arrive at random")
    add("--seconds", type=float, default=30.0, help="how long they arrive")
    add("--python", action="append", type=parse_python, default=[], metavar="NAME=PATH",
        help="Python of a peer with an environment of its own: transformers, llama or vllm")  # fmt: skip
    add("--llama-server", metavar="PATH")
    add("--llama-quantize", metavar="PATH", help="default: beside llama-server")
    add("--cache", metavar="FOLDER", help="keep checkpoints, GGUF files, compiled code and logs here")
    add("--patience", type=float, default=60.0, help="what takes more seconds is measured once, and marked so")
    add("--company", type=float, default=0.2, metavar="CORES",
        help="a turn beside which others took more is tried again, twice at most; the best try counts")  # fmt: skip
    add("--beside", type=int, default=0, metavar="N", help="busy processes beside every turn: a machine with company")
    add("--limit", type=float, default=600.0, help="seconds after which a system has failed")
    add("--lock", metavar="FILE", help="measure only while holding an exclusive lock on this file (flock)")
    add("--json", metavar="FILE")
    add("--markdown", metavar="FILE")
    add("--plot", metavar="FILE")
    options = parser.parse_args()
    options.threads = options.threads or affinity()
    options.measured = read_shape(Path(options.gguf)) if options.gguf else SHAPES[options.shape]
    options.rate = options.rate or options.measured.rate
    if options.quick:
        options.repeats, options.seconds = 1, min(options.seconds, 6.0)
    return options


def choose_workloads(options: argparse.Namespace) -> tuple[list[Workload], bool]:
    """Workloads asked for, in the order of the report; and whether memory is measured."""
    if options.deep:
        return [deep(tokens) for tokens in options.deep], False
    found = workloads(options.rate, options.seconds, options.quick)
    wanted = options.workloads or [*found, MEMORY]
    return [workload for name, workload in found.items() if name in wanted], MEMORY in wanted


def choose_systems(options: argparse.Namespace) -> list[System]:
    """This engine always, for it is what the others are compared with."""
    chosen = [system.name for system in BASE if not options.only or system.name in options.only]
    kept = [name for name in chosen if name not in options.skip]
    form = Path(options.gguf).stem.rpartition(".")[2].lower() if options.gguf and not options.expanded else ""
    return [
        system for system in (readers(form) if form else systems(options.quantization))
        if (system.driver == "engine" and not system.chat) or any(system.name.startswith(name) for name in kept)
    ]  # fmt: skip


def prepare(options: argparse.Namespace, folder: Path) -> Run:
    """Everything that is not measured: files on disk, and who is there."""
    shape = options.measured
    cache = folder / f"{shape.name}-{options.dtype}"
    logs = folder / "logs"
    for made in (cache, logs):
        made.mkdir(parents=True, exist_ok=True)
    as_stored = bool(options.gguf) and not options.expanded
    if not as_stored:
        write_checkpoint(shape, options.dtype, cache, options.gguf)
    places = Places(dict(options.python), find_server(options.llama_server))
    run = Run(
        shape, settings_of(options, cache, folder, places), places, [], Results(options.repeats), logs, {},
        MachineLock(options.lock), options.limit, options.patience,
    )  # fmt: skip
    run.company, run.beside = options.company, options.beside
    if options.gguf:
        run.weights = f"of {Path(options.gguf).name}"
    weights = Path(options.gguf).stat().st_size if as_stored else weight_bytes(cache)
    run.room = int(1.5 * weights) + run.settings.kv_bytes + 2 * 2**30
    for system in choose_systems(options):
        version, reason = look_for(system, places)
        if version is None:
            run.absent[system.name] = reason
            say(f"{system.title}: absent: {reason}")
        else:
            run.facts[system.name] = {"version": version}
        run.systems.append(system)
    if as_stored:
        run.ggufs = dict.fromkeys((system.quantization for system in run.systems), str(Path(options.gguf).resolve()))
        return run
    needed = {system.quantization for system in run.systems if system.gguf and system.name not in run.absent}
    found, reasons = make_ggufs(cache, needed, places, options.llama_quantize)
    run.ggufs |= found
    run.absent |= {system.name: reasons[system.quantization] for system in run.systems
                   if system.gguf and system.name not in run.absent and system.quantization in reasons}  # fmt: skip
    return run


def settings_of(options: argparse.Namespace, checkpoint: Path, scratch: Path, places: Places) -> Settings:
    longest = max([MAX_LEN, *(tokens + 2 * DEEP_OUT for tokens in options.deep)])
    tokens = max(KV_TOKENS, longest)
    kv_bytes = tokens * options.measured.kv_bytes(options.dtype)
    return Settings(
        str(checkpoint.resolve()), options.dtype, options.threads, "none", tokens, kv_bytes, longest, MAX_SEQS, "",
        places.server or "", str(scratch.resolve()),
    )  # fmt: skip


def save(run: Run, options: argparse.Namespace) -> None:
    if not options.json:
        return
    named = {
        name: value for name, value in vars(options).items() if name not in ("python", "lock", "cache", "measured")
    }
    found = {
        "options": named,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "systems": run.facts,
        "absent": run.absent,
        "results": run.results.as_json(),
        "first_tokens": run.firsts,
    }
    Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The command: `python -m tools.gpucheck [--quick] [--only NAME ...] [--skip NAME ...] [--json FILE]`."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from asyncengine.device.process import is_terminal
from asyncengine.errors import InvalidParameter
from asyncengine.models.loading import resolve_device
from tools.gpucheck import environment, greedy, kernels, memory, modes, sampling, speed, stress, waiting
from tools.gpucheck.report import Report
from tools.gpucheck.session import Section, Session, Settings, choose, flashinfer_missing
from tools.gpucheck.table import show

NO_GPU = 2
"""Exit status where there is nothing to check."""

SECTIONS = (
    Section("environment", "the machine", 15, environment.run),
    Section("compile", "compiling kernels", 210, kernels.run_compile),
    Section("kernels", "attention kernels against the torch backend", 30, kernels.run),
    Section("greedy", "greedy outputs against transformers", 75, greedy.run),
    Section("modes", "graphs, overlap, adapters and grammars, on against off", 75, modes.run),
    Section("sampling", "sampling on the device against the CPU", 15, sampling.run),
    Section("waiting", "launches that wait for the device", 20, waiting.run),
    Section("stress", "random requests and aborts", 30, stress.run),
    Section("memory", "running out of memory", 15, memory.run),
    Section("speed", "speed of a small model", 120, speed.run_small, checks=False),
    Section("large", "speed of a large model", 70, speed.run_large, checks=False),
)


def main(
    argv: Sequence[str] | None = None, settings: Settings | None = None, sections: Sequence[Section] = SECTIONS
) -> int:
    """The exit status: 0 all passed, 1 a check failed, 2 no GPU or a wrong argument. `settings`: for tests."""
    args = parse(argv, sections)
    try:
        chosen = choose(sections, args.only, args.skip)
    except ValueError as error:
        print(f"gpucheck: {error}", file=sys.stderr)
        return 2
    if settings is None:
        if not torch.cuda.is_available():
            print(f"gpucheck: there is no NVIDIA GPU here that torch {torch.__version__} can use; nothing was checked")
            return NO_GPU
        try:
            device = resolve_device(args.device)
        except InvalidParameter as error:
            print(f"gpucheck: {error}", file=sys.stderr)
            return 2
        seed = secrets.randbelow(2**31) if args.seed is None else args.seed
        backend = "flashinfer" if flashinfer_missing() is None else "torch"
        settings = Settings(str(device), backend, args.quick, seed, args.budget)
        torch.cuda.set_device(device)
    else:
        settings = replace(settings, quick=args.quick, budget=args.budget)
    console = Console(stderr=True)
    if args.json is not None and not _write(Report(), args.json):
        return 2
    with tempfile.TemporaryDirectory(prefix="gpucheck-") as folder:
        session = Session(settings, Path(folder), lambda text: console.print(f"... {text}", markup=False))
        report = session.run(chosen, lambda so_far: args.json is None or _write(so_far, args.json))
    show(report, Console(width=None if is_terminal(sys.stdout) else 160))
    written = args.json is None or _write(report, args.json)
    return report.exit_code if written else 1


def _write(report: Report, file: Path) -> bool:
    try:
        file.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"gpucheck: {file} cannot be written: {error}", file=sys.stderr)
        return False
    return True


def parse(argv: Sequence[str] | None, sections: Sequence[Section]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpucheck",
        description="Prove the GPU path on this machine and measure it. "
        "Exit status: 0 all checks passed, 1 one failed, 2 there is no GPU.",
        epilog="sections: " + "; ".join(f"{section.name} ({section.about})" for section in sections),
    )
    parser.add_argument("--only", metavar="SECTION", nargs="+", default=[], help="only these sections")
    parser.add_argument("--skip", metavar="SECTION", nargs="+", default=[], help="not these")
    parser.add_argument("--quick", action="store_true", help="fewer variants, shorter loads")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report there too")
    parser.add_argument("--seed", type=int, help="of all random data; default: a new one, which is reported")
    parser.add_argument("--device", default="cuda:0", help="[%(default)s]")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for everything [%(default)s]")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

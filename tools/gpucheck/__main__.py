"""The command: `python -m tools.gpucheck [ranks | ladder] [--quick] [--only NAME ...] [--skip NAME ...] [--seconds N]
[--out FILE]`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from asyncengine.errors import InvalidParameter
from asyncengine.execution.models.reading import resolve_device
from tools.gpucheck import environment, greedy, kernels, memory, modes, prompt, ranks, sampling, stress, waiting
from tools.gpucheck.ladder import Ladder
from tools.gpucheck.report import Report
from tools.gpucheck.session import Section, Session, Settings, choose, flashinfer_missing

NO_GPU = 2
"""Exit status where there is nothing to check."""
SECTIONS = (
    Section("environment", "the machine", 15, environment.run),
    Section("compile", "compiling kernels", 120, kernels.run_compile),
    Section("prompt", "prompts longer than a step", 60, prompt.run),
    Section("greedy", "greedy outputs against transformers", 110, greedy.run),
    Section("modes", "graphs, overlap, adapters and grammars, on against off", 110, modes.run),
    Section("sampling", "sampling on the device against the CPU", 30, sampling.run),
    Section("waiting", "launches that wait for the device", 40, waiting.run),
    Section("stress", "random requests and aborts", 60, stress.run),
    Section("memory", "running out of memory", 30, memory.run),
    Section("kernels", "attention kernels against the torch backend", 60, kernels.run),
)
TWO_GPUS = (
    Section("environment", "the machine", 15, environment.run),
    Section("ranks", "a model over two GPUs", 500, ranks.run),
)
_GRACE = 20.0
"""Seconds after its time at which a run that hangs is ended."""


def main(
    argv: Sequence[str] | None = None, settings: Settings | None = None, sections: Sequence[Section] | None = None
) -> int:
    """The exit status: 0 all passed, 1 a check failed, 2 no GPU or a wrong argument. `settings` and `sections`: for
    tests."""
    args = parse(argv)
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
        settings = Settings(str(device), backend, args.quick, seed, args.seconds)
        torch.cuda.set_device(device)
    else:
        settings = replace(settings, quick=args.quick, seconds=args.seconds)
    if args.out is not None and not _write(Report(), args.out):
        return 2
    with tempfile.TemporaryDirectory(prefix="gpucheck-") as folder, contextlib.ExitStack() as stack:
        session = Session(settings, Path(folder), partial(print, flush=True))
        if sections is None:
            sections = TWO_GPUS if args.what == "ranks" else SECTIONS
            if args.what == "ladder":
                sections = stack.enter_context(Ladder(session)).sections()
        try:
            chosen = choose(sections, args.only, args.skip)
        except ValueError as error:
            print(f"gpucheck: {error}", file=sys.stderr)
            return 2
        hung = threading.Timer(args.seconds + _GRACE, _end_hung, [session, args.out])
        hung.daemon = True
        hung.start()
        stack.callback(hung.cancel)
        report = session.run(chosen, lambda so_far: args.out is None or _write(so_far, args.out))
    _summarize(report)
    written = args.out is None or _write(report, args.out)
    return report.exit_code if written else 1


def _summarize(report: Report) -> None:
    """Facts, what failed once more, and counts."""
    print("".join(f"{name}: {value}; " for name, value in report.facts.items()))
    for check in report.failed:
        print(check)
    counts = {status: sum(check.status == status for check in report.checks) for status in ("pass", "fail", "skip")}
    print(
        f"{counts['pass']} checks passed, {counts['fail']} failed, {counts['skip']} skipped, {len(report.figures)} "
        f"figures, in {report.seconds:.0f} s",
        flush=True,
    )


def _end_hung(session: Session, file: Path | None) -> None:
    """End the process: a kernel or a compiler that never returns cannot be cancelled."""
    print(f"gpucheck: still in its last section {_GRACE:.0f} s after its time; ended", file=sys.stderr, flush=True)
    if file is not None:
        _write(session.report, file)
    os._exit(1)


def _write(report: Report, file: Path) -> bool:
    try:
        file.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"gpucheck: {file} cannot be written: {error}", file=sys.stderr)
        return False
    return True


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpucheck",
        description="Prove the GPU path on this machine (checks), over two GPUs (ranks), or measure it (ladder). "
        "Exit status: 0 all checks passed, 1 one failed, 2 there is no GPU.",
        epilog="checks: " + "; ".join(f"{section.name} ({section.about})" for section in SECTIONS),
    )
    parser.add_argument(
        "what", nargs="?", choices=("checks", "ranks", "ladder"), default="checks", help="[%(default)s]"
    )
    parser.add_argument("--only", metavar="SECTION", nargs="+", default=[], help="only these sections, in this order")
    parser.add_argument("--skip", metavar="SECTION", nargs="+", default=[], help="not these")
    parser.add_argument("--quick", action="store_true", help="fewer variants, shorter loads")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write what is found there too, after every section")
    parser.add_argument("--seed", type=int, help="of all random data; default: a new one, which is reported")
    parser.add_argument("--device", default="cuda:0", help="[%(default)s]")
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything [%(default)s]")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

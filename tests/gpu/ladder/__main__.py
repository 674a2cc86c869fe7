"""The command: `python -m tests.gpu.ladder [--list] [--quick] [--only NAME ...] [--skip NAME ...] [--seconds N]
[--out FILE]`."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .rungs import Ladder
from .session import Report, Session, Settings, choose, flashinfer_missing

NO_GPU = 2
"""Exit status where there is nothing to measure."""
_GRACE = 20.0
"""Seconds after its time at which a run that hangs is ended: a kernel that never returns cannot be cancelled."""


def main(argv: Sequence[str] | None = None, settings: Settings | None = None) -> int:
    """The exit status: 0, 1 if a section failed, 2 without a GPU or for a wrong argument. `settings`: for tests."""
    args = parse(argv)
    chosen_settings = settings or Settings()
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        if args.list:
            for section in Ladder(Session(Settings("cpu"), Path(folder))).sections():
                print(f"{section.name:16} {section.about}")
            return 0
        if settings is None:
            if not torch.cuda.is_available():
                print(f"ladder: no NVIDIA GPU that torch {torch.__version__} can use; nothing was measured")
                return NO_GPU
            seed = secrets.randbelow(2**31) if args.seed is None else args.seed
            backend = "flashinfer" if flashinfer_missing() is None else "torch"
            chosen_settings = Settings(args.device, backend, seed=seed)
            torch.cuda.set_device(args.device)
        session = Session(replace(chosen_settings, quick=args.quick, seconds=args.seconds), Path(folder))
        with Ladder(session) as ladder:
            try:
                sections = choose(ladder.sections(), args.only, args.skip)
            except ValueError as error:
                print(f"ladder: {error}", file=sys.stderr)
                return 2
            hung = threading.Timer(args.seconds + _GRACE, _end_hung, [session, args.out])
            hung.daemon = True
            hung.start()
            report = session.run(sections, args.out)
            hung.cancel()
    _summarize(report, session.seconds)
    return 1 if any("skipped: " not in each for each in report.failed) else 0


def _summarize(report: Report, seconds: float) -> None:
    """Facts, what failed once more, and counts."""
    print("".join(f"{name}: {value}; " for name, value in report.facts.items()))
    for each in report.failed:
        print(each)
    print(
        f"{len(report.figures)} figures, {len(report.failed)} sections failed or skipped, in {seconds:.0f} s",
        flush=True,
    )


def _end_hung(session: Session, file: Path | None) -> None:
    print(f"ladder: still in its last section {_GRACE:.0f} s after its time; ended", file=sys.stderr, flush=True)
    if file is not None:
        session.report.write(file)
    os._exit(1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.ladder",
        description="Measure what an engine does on this GPU. Exit status: 0, 1 if a section failed, 2 without a GPU.",
    )
    parser.add_argument("--list", action="store_true", help="name the sections, and do nothing")
    parser.add_argument("--only", metavar="SECTION", nargs="+", default=[], help="only these sections, in this order")
    parser.add_argument("--skip", metavar="SECTION", nargs="+", default=[], help="not these")
    parser.add_argument("--quick", action="store_true", help="shorter loads")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write what is found there too, after every section")
    parser.add_argument("--seed", type=int, help="of all random data; default: a new one, which is reported")
    parser.add_argument("--device", default="cuda:0", help="[%(default)s]")
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything [%(default)s]")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

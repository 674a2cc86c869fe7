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
from pathlib import Path

import torch

from .machine import flashinfer_missing
from .rungs import Ladder
from .session import Session, choose

NO_GPU = 2
"""Exit status where there is nothing to measure."""
_GRACE = 20.0
"""Seconds after its time at which a run that hangs is ended: a kernel that never returns cannot be cancelled."""


def main(argv: Sequence[str] | None = None, *, on_cpu: bool = False) -> int:
    """The exit status: 0, 1 if a section failed, 2 without a GPU or for a wrong argument. `on_cpu`: for tests, whose
    stand-ins run there."""
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        if args.list:
            for section in Ladder(Session(Path(folder), "cpu", "torch")).sections():
                print(f"{section.name:16} {section.about}")
            return 0
        if not on_cpu and not torch.cuda.is_available():
            print(f"ladder: no NVIDIA GPU that torch {torch.__version__} can use; nothing was measured")
            return NO_GPU
        device, backend = "cpu", "flashinfer"
        if not on_cpu:
            device, backend = args.device, "torch" if flashinfer_missing() else "flashinfer"
            torch.cuda.set_device(device)
        seed = secrets.randbelow(2**31) if args.seed is None else args.seed
        session = Session(Path(folder), device, backend, quick=args.quick, seed=seed, seconds=args.seconds)
        with Ladder(session) as ladder:
            try:
                sections = choose(ladder.sections(), args.only, args.skip)
            except ValueError as error:
                print(f"ladder: {error}", file=sys.stderr)
                return 2
            hung = threading.Timer(args.seconds + _GRACE, _end_hung, [session, args.out])
            hung.daemon = True
            hung.start()
            session.run(sections, args.out)
            hung.cancel()
    print("".join(f"{name}: {value}; " for name, value in session.facts.items()), *session.failed, sep="\n")
    counts = f"{len(session.figures)} figures, {len(session.failed)} sections failed or skipped"
    print(f"{counts}, in {session.seconds:.0f} s", flush=True)
    return 1 if any("skipped: " not in each for each in session.failed) else 0


def _end_hung(session: Session, file: Path | None) -> None:
    print(f"ladder: still in its last section {_GRACE:.0f} s after its time; ended", file=sys.stderr, flush=True)
    session.write(file)
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

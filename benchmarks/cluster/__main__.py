"""Simulate a cluster that is not there: `python -m benchmarks.cluster placement|routing [flags]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from asyncengine.errors import EngineError

COMMANDS = {
    "placement": "models come and go, nodes fail and return: what is placed, refused, lost",
    "routing": "requests with shared prefixes over replicas: hit rates and balance of routers",
}
"""Each is a module of this package with `add_arguments(parser)` and `run(args)`, imported when it is asked for."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 for bad input."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        if name in given[:1]:
            import_module(f"benchmarks.cluster.{name}").add_arguments(command)
    args = parser.parse_args(given)
    module = import_module(f"benchmarks.cluster.{args.command}")
    try:
        return int(module.run(args))
    except (EngineError, OSError) as error:
        print(f"benchmarks.cluster: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""`asyncengine stage`: compute some layers of a model for an engine on another machine."""

from __future__ import annotations

import argparse
import logging

from asyncengine.integrations.cli.exits import CliError
from asyncengine.integrations.fleet.stages import host_stages


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        host_stages(args.address)
    except (OSError, ValueError, OverflowError) as error:
        raise CliError(f"no address to listen at: {args.address} ({error})") from error
    return 0

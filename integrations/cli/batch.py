"""`asyncengine batch`: a file of requests in, a file of answers out. The next run continues one that was cut off."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from functools import partial
from string import Formatter
from typing import Any

from asyncengine.checks import as_integer
from asyncengine.engine_group import EngineGroup
from asyncengine.integrations.cli.exits import FAILED, CliError
from asyncengine.integrations.cli.serve import Plan, check_models, read_plan
from asyncengine.progress import counted


def run(args: argparse.Namespace) -> int:
    plan = read_plan(args)
    as_integer("in_flight", args.in_flight, 1)
    try:
        [*Formatter().parse(args.template or "")]
    except ValueError as error:
        raise CliError(f"template: {error}") from error
    try:
        from asyncengine.integrations.http import rows

        common = dict(json.loads(args.body))
    except ImportError as error:
        raise CliError(f'batch needs {error.name}: pip install "asyncengine[serve]"', FAILED) from error
    except (ValueError, TypeError) as error:
        raise CliError(f"body: must be a JSON object: {error}") from error
    if not args.input.is_file() or not args.output.absolute().parent.is_dir():
        raise CliError(f"batch: there is no file {args.input}, or no folder for {args.output}")
    check_models(plan)
    with rows.journal(args.output) as done:
        total = rows.count_rows(args.input)
        left = rows.read_rows(args.input, done, template=args.template, common=common)
        failed = asyncio.run(_answer(args, plan, left, len(done), total)) if len(done) < total else 0
    print(f"{total} rows, {len(done)} of them done before, {failed} refused or failed now", file=sys.stderr)
    return 0


async def _answer(args: argparse.Namespace, plan: Plan, left: Any, before: int, total: int) -> int:
    """Answer the rows that are `left`. Returns the number of those that were refused or failed."""
    from asyncengine.integrations.http import app, rows

    answers = Counter[bool]()
    async with await EngineGroup.from_pretrained(plan.models) as group:
        served = app(group, aliases=plan.aliases, max_body=sys.maxsize)
        with counted("rows", total) as advance:
            advance(before)

            def on_answer(answered: bool) -> None:
                answers[answered] += 1
                advance(1)

            send = partial(rows.post, served)
            await rows.answer_rows(send, left, (args.output, args.output), args.in_flight, on_answer)
    return answers[False]

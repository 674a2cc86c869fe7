"""`asyncengine perplexity`: how well a model, as it is loaded here, predicts a text."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator

from asyncengine.checks import as_integer
from asyncengine.integrations.cli.exits import CliError
from asyncengine.integrations.cli.loading import open_engine
from asyncengine.integrations.cli.options import engine_config
from asyncengine.integrations.cli.text import read_text, write, write_json
from asyncengine.sampling_params import SamplingParams

CONTEXT = 1024
"""Tokens of a chunk, if the context of the model holds them."""


def run(args: argparse.Namespace) -> int:
    text = read_text("text", args.text)
    config = engine_config(args, show_progress=not args.json)
    losses: list[float] = []
    with open_engine(args.model, config) as engine:
        front = engine.tokenize("")  # what stands before every prompt stands before every chunk
        context, stride = _sizes(args, len(front), engine.info.max_model_len)
        ids = engine.tokenize(text, add_special_tokens=False)
        chunks = list(chunked(ids, context, stride, front))
        for number, (chunk, start) in enumerate(chunks, 1):
            params = SamplingParams(max_tokens=0, prompt_logprobs_start=start)
            scores = engine.generate(chunk, params).prompt_logprobs or []
            losses += [-score.logprob for score in scores[start:] if score is not None]
            perplexity = math.exp(statistics.fmean(losses))
            print(f"chunk {number} of {len(chunks)}: {perplexity:.4f} so far", file=sys.stderr, flush=True)
    if len(losses) < 2:
        raise CliError("text: so short a text says nothing of a model")
    error = perplexity * statistics.stdev(losses) / math.sqrt(len(losses))  # that of the mean, through exp
    if args.json:
        sizes = {"tokens": len(losses), "chunks": len(chunks), "context": context, "stride": stride}
        write_json({"model": args.model, "perplexity": perplexity, "standard_error": error, **sizes})
    else:
        write(f"perplexity {perplexity:.4f} +- {error:.4f} ({len(losses)} tokens in chunks of {context})\n")
    return 0


def chunked(ids: list[int], context: int, stride: int, front: list[int]) -> Iterator[tuple[list[int], int]]:
    """Pairs of a prompt, `front` and a window of `ids`, at most `context` tokens; and its first position to score.
    Windows begin `stride` tokens apart. Each scores the tokens that no window before it had; a text's very first token,
    which follows none, is not scored."""
    room = context - len(front)
    for begin in range(0, max(1, len(ids) - room + stride), stride):
        prompt = front + ids[begin : begin + room]
        start = len(front) + (room - stride if begin else 0) or 1
        if start < len(prompt):
            yield prompt, start


def _sizes(args: argparse.Namespace, front: int, most: int) -> tuple[int, int]:
    """Context and stride, in tokens. Raises `InvalidParameter` or `CliError` for sizes that the model cannot read."""
    context = min(CONTEXT, most) if args.context is None else as_integer("context", args.context, front + 2)
    if context > most:
        raise CliError(f"context: this model reads {most} tokens at most, got {context}")
    stride = context - front if args.stride is None else as_integer("stride", args.stride, 1)
    if stride > context - front:
        raise CliError(f"stride: must be at most {context - front}, or tokens would be left out, got {stride}")
    return context, stride

"""`asyncengine perplexity`: how well a model, as it is loaded here, predicts a text."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from asyncengine.checks import as_integer
from asyncengine.cli.errors import CliError
from asyncengine.cli.loading import open_engine
from asyncengine.cli.options import engine_config
from asyncengine.cli.text import write, write_json
from asyncengine.sampling_params import SamplingParams
from asyncengine.sync_engine import Engine

CONTEXT = 1024
"""Tokens of a chunk, where the model reads so many."""


def run(args: argparse.Namespace) -> int:
    text = _read(args.text)
    config = engine_config(args, show_progress=not args.json)
    losses: list[float] = []
    with open_engine(args.model, config) as engine:
        front = engine.tokenize("")  # what stands before every prompt stands before every chunk
        context, stride = _sizes(args, len(front), engine.info.max_model_len)
        ids = engine.tokenize(text, add_special_tokens=False)
        chunks = list(chunked(ids, context, stride, front))
        for number, (chunk, start) in enumerate(chunks, 1):
            losses += scored(engine, chunk, start)
            so_far = f"chunk {number} of {len(chunks)}: perplexity {_perplexity(losses):.4f}"
            print(f"{so_far} over {len(losses)} tokens so far", file=sys.stderr, flush=True)
        info = engine.info
    if len(losses) < 2:
        raise CliError("text: so short a text says nothing of a model")
    perplexity = _perplexity(losses)
    error = perplexity * statistics.stdev(losses) / math.sqrt(len(losses))  # of the mean, carried through exp
    if args.json:
        figures = {"model": info.name, "dtype": info.dtype, "perplexity": perplexity, "standard_error": error}
        write_json({**figures, "tokens": len(losses), "chunks": len(chunks), "context": context, "stride": stride})
    else:
        sizes = f"{len(losses)} tokens in {len(chunks)} chunks (context {context}, stride {stride})"
        write(f"perplexity {perplexity:.4f} +- {error:.4f} over {sizes}\n")
    return 0


def chunked(ids: list[int], context: int, stride: int, front: list[int]) -> Iterator[tuple[list[int], int]]:
    """(a prompt of at most `context` tokens, `front` and some of `ids`; its first position to score). Prompts begin
    `stride` tokens apart. Each scores the tokens that none before it has, but none that has nothing before it."""
    room = context - len(front)
    done = 0
    for begin in range(0, len(ids), stride):
        end = min(begin + room, len(ids))
        start = len(front) + done - begin or 1
        if start < len(front) + end - begin:
            yield front + ids[begin:end], start
        if end == len(ids):
            return
        done = end


def scored(engine: Engine, prompt: list[int], start: int) -> list[float]:
    """The negative log-probabilities of a prompt's tokens from position `start` on, in nats."""
    params = SamplingParams(max_tokens=0, prompt_logprobs_start=start)
    entries = engine.generate(prompt, params).prompt_logprobs or []
    return [-entry.logprob for entry in entries[start:] if entry is not None]


def _perplexity(losses: list[float]) -> float:
    return math.exp(math.fsum(losses) / len(losses))


def _read(name: str) -> str:
    """Raises `CliError` for a text that is empty or cannot be read."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"text: cannot read {name}: {error}") from error
    if not text:
        raise CliError(f"text: {name} is empty")
    return text


def _sizes(args: argparse.Namespace, front: int, most: int) -> tuple[int, int]:
    """Context and stride, in tokens. Raises `InvalidParameter` or `CliError` for what the model cannot read."""
    context = min(CONTEXT, most) if args.context is None else as_integer("context", args.context, front + 2)
    if context > most:
        raise CliError(f"context: this model reads {most} tokens at most, got {context}")
    stride = context - front if args.stride is None else as_integer("stride", args.stride, 1)
    if stride > context - front:
        raise CliError(f"stride: must be at most {context - front}, or tokens would be left out, got {stride}")
    return context, stride

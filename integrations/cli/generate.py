"""`asyncengine generate`: one prompt, streamed."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from asyncengine.grammar import Grammar
from asyncengine.integrations.cli.exits import FAILED, CliError
from asyncengine.integrations.cli.inputs import check_reads_images, chosen_adapter, given_adapters, image_part
from asyncengine.integrations.cli.loading import open_engine
from asyncengine.integrations.cli.options import engine_config, sampling_params, say_stopped, start_limited
from asyncengine.integrations.cli.text import read_text, write, write_json
from asyncengine.outputs import Completion
from asyncengine.sampling_params import SamplingParams
from asyncengine.stream import SyncTokenStream
from asyncengine.sync_engine import Engine


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args, grammar=_grammar(args))
    adapter = chosen_adapter(args)
    config = engine_config(
        args, max_num_seqs=max(16, params.n), show_progress=not args.json, adapters=given_adapters(args)
    )
    prompt = _prompt(args.prompt)
    if args.system is not None and args.chat is False:
        raise CliError("system: --no-chat sends no messages")
    if args.image and args.chat is False:
        raise CliError("image: --no-chat sends no messages")
    images = [image_part(path, config.max_image_bytes) for path in args.image]
    with open_engine(args.model, config) as engine:
        if images:
            check_reads_images(engine.info)
        messages = _messages(prompt, args.system, images) if _is_chat(args, engine) else None

        def start(params: SamplingParams) -> SyncTokenStream:
            if messages is None:
                return engine.stream(prompt, params, adapter=adapter)
            return engine.stream_chat(messages, params, adapter=adapter)

        with start_limited(params, start) as stream:
            live = not args.json and params.n == 1
            completion = _show(stream) if live else stream.result()
        if args.json:
            write_json(asdict(completion))
        elif not live:
            for index, sample in enumerate(completion.samples):
                write(f"[{index}] {sample.text}\n")
        say_stopped(completion, engine.info.max_model_len)
        if args.stats:
            print(_figures(completion, engine, adapter), file=sys.stderr)
    if completion.finish_reason == "timeout":
        raise CliError("request_timeout: the deadline passed before the output was complete", FAILED)
    return 0


def _is_chat(args: argparse.Namespace, engine: Engine) -> bool:
    """Whether the prompt is a message, where no flag says it: models with a chat template were trained to answer
    messages, not to go on with a text."""
    if args.chat is None and args.system is None and not args.image:
        if not engine.info.has_chat_template:
            why = "has no chat template: it goes on with the prompt as it is (--chat-template sets one)"
            print(f"{engine.info.name} {why}", file=sys.stderr)
        return engine.info.has_chat_template
    return args.chat is not False


def _prompt(text: str) -> str:
    if text == "-":
        text = sys.stdin.read()
    if not text:
        raise CliError("prompt: must not be empty")
    return text


def _grammar(args: argparse.Namespace) -> Grammar | None:
    """Raises `GrammarError`, or `CliError` for a file that cannot be read."""
    if args.schema is not None:
        return Grammar.json_schema(read_text("schema", str(args.schema)))
    if args.regex is not None:
        return Grammar.regex(args.regex)
    return None if args.choice is None else Grammar.choice(args.choice)


def _messages(prompt: str, system: str | None, images: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    head = [] if system is None else [{"role": "system", "content": system}]
    content = [*images, {"type": "text", "text": prompt}] if images else prompt
    return [*head, {"role": "user", "content": content}]


def _show(stream: SyncTokenStream) -> Completion:
    for chunk in stream:
        write(chunk.text)
    write("\n")
    return stream.result()


def _figures(completion: Completion, engine: Engine, adapter: str | None) -> str:
    usage, timings = completion.usage, completion.timings
    first = timings.first_token or timings.total
    rate = (usage.completion_tokens - 1) / (timings.total - first) if timings.total > first else 0.0
    counts = sorted(Counter(engine.info.stored.values()).items())
    stored = " with " + ", ".join(f"{dtype} x {count}" for dtype, count in counts) if counts else ""  # "awq x 196"
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} from the cache), {usage.completion_tokens} output "
        f"tokens ({completion.finish_reason}); first token after {first * 1000:.0f} ms, then {rate:.1f} tokens/s; "
        f"{engine.info.name}{f' with {adapter}' if adapter else ''}, {engine.info.dtype}{stored}, "
        f"{engine.info.device}"
    )

"""`asyncengine chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

from asyncengine.config import CHAT_TEMPLATES
from asyncengine.errors import AdapterError, InvalidParameter, QueueFull, RequestFailed
from asyncengine.integrations.cli.exits import CliError
from asyncengine.integrations.cli.inputs import check_reads_images, chosen_adapter, given_adapters, image_part
from asyncengine.integrations.cli.loading import open_engine
from asyncengine.integrations.cli.options import MOST_TOKENS, engine_config, sampling_params, say_stopped, start_limited
from asyncengine.integrations.cli.text import write
from asyncengine.sampling_params import SamplingParams
from asyncengine.stream import SyncTokenStream
from asyncengine.sync_engine import Engine

HELP = (
    "/image FILE shows a picture with the next prompt, /reset forgets the conversation, /adapter NAME changes who "
    "answers, /stats shows figures, /exit or Ctrl-D ends; Ctrl-C stops an answer"
)
ADAPTER_HELP = "/adapter NAME uses it, /adapter NAME=PATH loads it first, /adapter {model} uses none"


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    adapter = chosen_adapter(args)
    config = engine_config(args, max_num_seqs=4, adapters=given_adapters(args))
    with open_engine(args.model, config) as engine:
        if not engine.info.has_chat_template:
            way = f"give it one (--chat-template {'|'.join(CHAT_TEMPLATES)}, or a file), or use: asyncengine generate"
            raise CliError(f"model: {engine.info.name} has no chat template; {way}")
        watched, most = sys.stdin.isatty(), config.max_image_bytes
        start = [] if args.system is None else [{"role": "system", "content": args.system}]
        Conversation(engine, params, start, adapter, watched, most, messages=list(start)).run()
    return 0


@dataclass(slots=True)
class Conversation:
    """One chat from its first prompt to its end."""

    engine: Engine
    params: SamplingParams
    start: list[dict[str, Any]]
    """Messages that /reset keeps: the system prompt."""
    adapter: str | None
    watched: bool
    """Whether stdin is a terminal, so that prompts and hints are shown."""
    max_image_bytes: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    """Pictures for the next prompt."""
    last: str = ""
    warned_full: bool = False

    def run(self) -> None:
        if self.watched:
            with contextlib.suppress(ImportError):  # line editing and history, where the platform has it
                import readline  # noqa: F401
            print(f"{self._who()}, context {self.engine.info.max_model_len} tokens\n{HELP}")
        while (line := self._read()) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        """The next line; None at its end. A second Ctrl-C in a row at the prompt ends the program."""
        try:
            return self._input()
        except KeyboardInterrupt:
            print("\n(Ctrl-C again, Ctrl-D or /exit ends)")
        return self._input()

    def _input(self) -> str | None:
        try:
            return input("> " if self.watched else "").strip()
        except EOFError:
            if self.watched:
                print()
            return None

    def _command(self, line: str) -> bool:
        """Run a command. Returns False if the conversation is over."""
        command, _, rest = line.partition(" ")
        if line in ("/exit", "/quit"):
            return False
        if line == "/reset":
            self.messages, self.images = list(self.start), []
            print("(forgotten)")
        elif line == "/stats":
            print(self._figures())
        elif command == "/adapter":
            self._change_adapter(rest.strip())
        elif command == "/image" and rest.strip():
            self._take_image(rest.strip())
        else:
            print(HELP)
        return True

    def _who(self) -> str:
        name = self.engine.info.name
        return name if self.adapter is None else f"{name} with {self.adapter}"

    def _change_adapter(self, wanted: str) -> None:
        """Answer with another adapter from now on, which reads the conversation so far."""
        name, _, path = wanted.partition("=")
        loaded = [info.name for info in self.engine.adapters()]
        try:
            if path:
                self.engine.load_adapter(name, path)
            elif name == self.engine.info.name:
                name = ""
            elif name not in loaded:
                print(f"loaded: {', '.join(loaded) or 'none'}; {ADAPTER_HELP.format(model=self.engine.info.name)}")
                return
        except AdapterError as error:
            print(f"error: {error}", file=sys.stderr)
            return
        self.adapter = name or None
        print(f"({self._who()})")

    def _take_image(self, path: str) -> None:
        try:
            check_reads_images(self.engine.info)
            self.images.append(image_part(path, self.max_image_bytes))
        except CliError as error:
            print(f"error: {error}", file=sys.stderr)
            return
        print(f"({len(self.images)} with the next prompt)")

    def _answer(self, question: str) -> None:
        content = [*self.images, {"type": "text", "text": question}] if self.images else question
        self.images = []  # also if they are refused, so that the next prompt can do without them
        messages = [*self.messages, {"role": "user", "content": content}]
        try:
            messages = self._fitted(messages)
            start = partial(self.engine.stream_chat, messages, adapter=self.adapter, clip_max_tokens=True)
            with start_limited(self.params, start) as stream, _stopped_by_ctrl_c(stream):
                for chunk in stream:
                    write(chunk.text)
                completion = stream.result()
        except (InvalidParameter, QueueFull, RequestFailed) as error:
            print(f"error: {error}; /reset starts over", file=sys.stderr)
            return
        stopped = {"abort": " (stopped)", "timeout": " (timeout)"}
        print(stopped.get(completion.finish_reason, "") if self.watched else "", flush=True)
        say_stopped(completion, self.engine.info.max_model_len)
        self.messages = [*messages, {"role": "assistant", "content": completion.text}]
        usage, first = completion.usage, completion.timings.first_token or 0.0
        self.last = (
            f"last answer: {usage.prompt_tokens} prompt tokens ({usage.cached_tokens} from the cache), "
            f"{usage.completion_tokens} output tokens, first after {first * 1000:.0f} ms, "
            f"all in {completion.timings.total:.2f} s"
        )

    def _fitted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages without the oldest turns (a question and its answer each), as many as must go for the context to
        have room for an answer of `max_tokens`, but at most a quarter of it."""
        context, first = self.engine.info.max_model_len, len(self.start)
        most = context - min(self.params.max_tokens or MOST_TOKENS, context // 4)
        while len(messages) > first + 2 and self.engine.count_tokens(messages) > most:
            messages = [*messages[:first], *messages[first + 2 :]]
            if not self.warned_full:
                print(f"(the context of {context} tokens is full: the oldest turns leave it)", file=sys.stderr)
            self.warned_full = True
        return messages

    def _figures(self) -> str:
        stats = self.engine.stats()
        pages = stats.pages
        total = (
            f"since the start: {stats.prompt_tokens} prompt tokens ({stats.hit_rate:.0%} from the cache), "
            f"{stats.generated_tokens} output tokens; {pages.total - pages.free} of {pages.total} pages used"
        )
        return f"{self.last}\n{total}".lstrip("\n")


@contextlib.contextmanager
def _stopped_by_ctrl_c(stream: SyncTokenStream) -> Iterator[None]:
    """Ctrl-C ends the answer, not the program: the engine drops the request before its next step, and the stream
    ends by itself with reason "abort", so nothing that came before is lost. A second Ctrl-C is an ordinary one."""

    def stop(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        stream.abort()

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as `nohup` and background jobs of shells set it: keep it
        yield
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

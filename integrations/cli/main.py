"""The command's entry point: parse, dispatch, and turn every error into one line and an exit code."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Collection, Sequence
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from asyncengine import __version__
from asyncengine.config import GROUPS, EngineConfig
from asyncengine.errors import EngineError, InvalidParameter, ModelNotFound, UnsupportedModel, nearest
from asyncengine.integrations.cli.adapters import name_and_path
from asyncengine.integrations.cli.errors import FAILED, INTERRUPTED, USAGE, CliError
from asyncengine.integrations.cli.options import (
    ENGINE_FIELDS,
    MOST_TOKENS,
    SAMPLING_FIELDS,
    add_flags,
    field_docs,
    literal,
)
from asyncengine.integrations.cli.starting import interruptible
from asyncengine.integrations.cli.text import drop_output, prepare_streams
from asyncengine.integrations.http.settings import ServerSettings
from asyncengine.sampling_params import SamplingParams

# The arguments of each command. Light on purpose: `--help` must not import a model library.

Commands = Any
"""The type of what `add_subparsers` returns; argparse does not export its type."""


def add_demo(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo", help="show everything on the bundled model, in half a minute", allow_abbrev=False,
        usage="asyncengine demo [flags]",
        description="Concurrent streams, prefix-cache hits, retrieval, tools, LoRA adapters, cancellation, figures.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print only the summary, as JSON")
    parser.add_argument("--export-svg", type=Path, metavar="FILE", help="also write what is shown to an SVG picture")
    parser.add_argument("--streams", type=literal, default=64, metavar="N", help="streams in the first scene [64]")
    parser.add_argument("--fleet", type=literal, metavar="N", help="another story: N processes behind one engine")
    _add_engine_flags(parser)


def add_serve(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve", help="serve models over HTTP", allow_abbrev=False, usage="asyncengine serve [flags] MODEL [MODEL ...]",
        description="OpenAI's and Anthropic's APIs on http://127.0.0.1:8000 (needs the extra: serve). Ctrl-C ends it.",
    )  # fmt: skip
    parser.add_argument("models", nargs="*", metavar="MODEL", help="as for the other commands, or NAME=MODEL")
    parser.add_argument("--config", metavar="FILE", help="TOML with [server], [engine], [aliases] and [models.NAME]")
    parser.add_argument(
        "--alias", action="append", type=name_and_path, default=[], metavar="NAME=MODEL",
        help='another name of a model or adapter (repeat the flag); "*=MODEL" answers to every name',
    )  # fmt: skip
    parser.add_argument(
        "--adapter", action="append", type=name_and_path, default=[], metavar="NAME=PATH",
        help="load the LoRA adapter in the folder PATH (repeat the flag)",
    )  # fmt: skip
    names = tuple(ServerSettings.__dataclass_fields__)
    add_flags(parser, "server", ServerSettings, names, field_docs(ServerSettings))
    _add_engine_flags(parser)


def add_chat(commands: Commands) -> None:
    parser = commands.add_parser(
        "chat", help="talk to a model", allow_abbrev=False, usage="asyncengine chat [flags] MODEL",
        description="Multi-turn chat. Ctrl-C stops an answer, Ctrl-D or /exit ends, /help lists the commands.",
    )  # fmt: skip
    _add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    _add_adapter_flags(parser, use="which one answers first [the only one]; MODEL for none")
    _add_sampling_flags(parser)
    _add_engine_flags(parser)


def add_generate(commands: Commands) -> None:
    parser = commands.add_parser(
        "generate", help="answer or complete one prompt", allow_abbrev=False,
        usage="asyncengine generate [flags] MODEL PROMPT",
        description="Stream the answer to PROMPT, or its completion, to stdout.",
    )  # fmt: skip
    _add_model(parser)
    parser.add_argument("prompt", metavar="PROMPT", help='a question, or a text to complete; "-" reads it from stdin')
    parser.add_argument(
        "--chat", action=argparse.BooleanOptionalAction,
        help="send PROMPT as a user's message, or complete it as it is [a message where the model has a chat template]",
    )  # fmt: skip
    parser.add_argument("--system", metavar="TEXT", help="system message (implies --chat)")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE",
        help="picture that PROMPT is about (repeat the flag; implies --chat)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the whole Completion as JSON at the end")
    parser.add_argument("--stats", action="store_true", help="print token counts and times to stderr at the end")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--schema", type=Path, metavar="FILE", help="the output is JSON that this JSON schema allows")
    forms.add_argument("--regex", metavar="PATTERN", help="the output is what this pattern matches")
    forms.add_argument("--choice", action="append", metavar="TEXT", help="the output is one of these (repeat the flag)")
    _add_adapter_flags(parser, use="which one answers [the only one]; MODEL for none")
    _add_sampling_flags(parser, "n", "logprobs", "top_logprobs", "on_budget")
    _add_engine_flags(parser)


def add_embed(commands: Commands) -> None:
    parser = commands.add_parser(
        "embed", help="turn lines of text into vectors", allow_abbrev=False, usage="asyncengine embed [flags] MODEL",
        description="Reads a text from each line of stdin. Any number of lines: only some are in memory at once.",
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help='model folder, Hugging Face hub id, or "demo-embed"')
    parser.add_argument(
        "--output", default="-", metavar="FILE", help='FILE.npy, FILE.jsonl, or "-" for JSON lines on stdout [-]'
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt-name", metavar="NAME", help='one of the model\'s prompts, such as "query"')
    prompts.add_argument("--prompt", metavar="TEXT", help="what goes in front of every text")
    parser.add_argument("--dimensions", type=literal, metavar="N", help="numbers of a vector to keep [all]")
    parser.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, help="make vectors one long [as the model says]"
    )
    parser.add_argument(
        "--truncate", action=argparse.BooleanOptionalAction, default=True,
        help="cut texts that are too long for the model, or refuse them [cut]",
    )  # fmt: skip
    _add_engine_flags(parser)


def add_bench(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench", help="measure throughput and latency", allow_abbrev=False, usage="asyncengine bench [flags] MODEL",
        description="Sweep over numbers of concurrent streams with random prompts of equal length.",
    )  # fmt: skip
    _add_model(parser)
    parser.add_argument(
        "--concurrency", type=literal, default=(1, 4, 16, 64), metavar="N,N,...", help="streams at once [1,4,16,64]"
    )
    parser.add_argument("--input-len", type=literal, default=128, metavar="N", help="prompt tokens [128]")
    parser.add_argument("--output-len", type=literal, default=64, metavar="N", help="output tokens [64]")
    parser.add_argument("--rounds", type=literal, default=2, metavar="N", help="requests of each stream, in turn [2]")
    parser.add_argument("--owned", action="store_true", help="run the engine on the caller's own event loop")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw them (needs the extra: bench)")
    _add_adapter_flags(parser)
    _add_engine_flags(parser)


def add_perplexity(commands: Commands) -> None:
    parser = commands.add_parser(
        "perplexity", help="measure how well a model predicts a text", allow_abbrev=False,
        usage="asyncengine perplexity [flags] MODEL --text FILE",
        description="Lower is better. Figures of the same text, chunks and tokenizer compare.",
    )  # fmt: skip
    _add_model(parser)
    parser.add_argument("--text", required=True, metavar="FILE", help='text in UTF-8; "-" reads it from stdin')
    parser.add_argument("--context", type=literal, metavar="N", help="tokens of a chunk [1024, or all the model reads]")
    overlap = "tokens from one chunk's begin to the next one's; fewer than --context: chunks overlap [--context]"
    parser.add_argument("--stride", type=literal, metavar="N", help=overlap)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    _add_engine_flags(parser)


def add_calibrate(commands: Commands) -> None:
    parser = commands.add_parser(
        "calibrate", help="fit a model's decisions to labelled cases", allow_abbrev=False,
        usage="asyncengine calibrate [flags] MODEL --cases FILE",
        description="Fits a temperature for each type of question, and judges it by cases that it was not fitted to.",
    )  # fmt: skip
    _add_model(parser)
    form = '{"state": ..., "question": {"type": ..., ...}, "answer": ...} a line; "-" reads stdin'
    parser.add_argument("--cases", required=True, metavar="FILE", help=form)
    parser.add_argument("--out", metavar="FOLDER", help="where decision.json is written [the model's folder]")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    _add_engine_flags(parser)


def add_fit(commands: Commands) -> None:
    parser = commands.add_parser(
        "fit", help="say what a model takes and whether it fits here", allow_abbrev=False,
        usage="asyncengine fit [flags] MODEL",
        description="Reads config.json and the headers of the files; loads nothing. Exit status: 0 fits, 1 does not.",
    )  # fmt: skip
    _add_model(parser)
    parser.add_argument(
        "--kv-tokens", type=literal, metavar="N",
        help="tokens that the KV cache is to hold [as --kv-cache-memory says, or one long request's]",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the figures and the claim as JSON")
    _add_engine_flags(parser)


def add_cache(commands: Commands) -> None:
    parser = commands.add_parser(
        "cache", help="show, verify or clear a prefix cache on a disk", allow_abbrev=False,
        usage="asyncengine cache [flags] {show,verify,clear} [FOLDER]",
        description="show: what the folder holds. verify: read every record and look at its checksum; exit status 1 if "
        "one is damaged. clear: remove all, but for what an engine is writing now (exit status 1).",
    )  # fmt: skip
    parser.add_argument("action", metavar="ACTION", choices=("show", "verify", "clear"), help="show, verify or clear")
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help="kv_cache_dir [the one of kv_cache_dir=True]")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help='model folder or file, Hugging Face hub id or address (USER/REPO, USER/REPO:Q4_K_M), or "demo"',
    )


def _add_adapter_flags(parser: argparse.ArgumentParser, use: str | None = None) -> None:
    """`use` None: all of them take part."""
    group = parser.add_argument_group("adapters (LoRA)")
    group.add_argument(
        "--adapter", action="append", type=name_and_path, default=[], metavar="NAME=PATH",
        help="load the PEFT checkpoint in the folder PATH (repeat the flag)" + ("" if use else "; streams take turns"),
    )  # fmt: skip
    if use is not None:
        group.add_argument("--use", metavar="NAME", help=use)


def _add_sampling_flags(parser: argparse.ArgumentParser, *more: str) -> None:
    most = f"Most tokens to generate [{MOST_TOKENS}, for some answers have no end; less where the context is shorter]"
    docs = {**field_docs(SamplingParams), "max_tokens": most}
    add_flags(parser, "sampling", SamplingParams, (*SAMPLING_FIELDS, *more), docs)


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    for title, group in GROUPS.items():
        add_flags(parser, f"engine: {title}", group, ENGINE_FIELDS, field_docs(EngineConfig))


SHOW_CURSOR = "\x1b[?25h"


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is one `--help` away."""

    commands: Collection[str] = ()
    """Names of the commands, of which the first argument is one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but have the parser of a command refuse what is unknown to it."""
        given = takewhile(lambda each: each != "--" and each not in self.commands, args)
        for flag in (each.partition("=")[0] for each in given):
            if flag.startswith("--") and " " not in flag and flag not in self._option_string_actions:
                known = {_plain(each): each for each in self._option_string_actions}
                self._refuse("flag", flag, known.get(nearest(_plain(flag), known) or ""))
            if self.commands and not flag.startswith("-"):
                self._refuse("command", flag, nearest(flag, self.commands))
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def _refuse(self, what: str, name: str, guess: str | None) -> NoReturn:
        self.error(f"unknown {what} {name}" + (f"; did you mean {guess}?" if guess else ""))

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="asyncengine",
        description="An LLM inference engine that lives inside your Python program.",
        epilog="MODEL is a folder or file, a Hugging Face hub id, or bundled: demo, demo-embed, demo-rerank, "
        "demo-vision.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"asyncengine {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=OneLineParser)
    measuring = add_bench, add_perplexity, add_calibrate, add_fit
    for add in (add_demo, add_serve, add_chat, add_generate, add_embed, *measuring, add_cache):
        add(commands)
    parser.commands = commands.choices
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 for a failure, 2 for bad input, 130 after Ctrl-C."""
    if not prepare_streams():
        return _fail("stdout is closed: there is nowhere to print to", FAILED)
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = build_parser()
        args = parser.parse_args(given)
        if args.command is None:
            parser.print_help()
            return USAGE
        command = import_module(f"asyncengine.integrations.cli.{args.command}")
        interruptible()
        code = int(command.run(args))
        sys.stdout.flush()
        _finish_compiling()
        return code
    except KeyboardInterrupt:
        return _interrupted()
    except (CliError, InvalidParameter, ModelNotFound, UnsupportedModel) as error:
        return _fail(_naming_flag(str(error), given), error.code if isinstance(error, CliError) else USAGE)
    except EngineError as error:
        return _fail(error, FAILED)
    except BrokenPipeError:  # the reader of our output has left (`| head`), and knows
        drop_output()
        return FAILED
    except OSError as error:  # a full disk, for one
        drop_output()
        return _fail(error, FAILED)


def _finish_compiling() -> None:
    """Wait for a first start's kernels that its own answer did not call: a command that builds an image wants all."""
    found = sys.modules.get("asyncengine.kernels.elsewhere")
    for others in [] if found is None else list(found.elsewhere):
        if sys.stderr.isatty():
            print("compiling what other requests will call, once on this machine", file=sys.stderr)
        others.wait()


def _naming_flag(message: str, given: Sequence[str]) -> str:
    """The message about a field ("max_num_seqs: must be ..."), with the flag in the field's place if that was given."""
    field = message.partition(":")[0]
    flag = "--" + field.replace("_", "-")
    named = any(each.partition("=")[0] in (flag, f"--no-{flag[2:]}") for each in given)
    return flag + message.removeprefix(field) if named else message


def _fail(error: Exception | str, code: int) -> int:
    print("asyncengine: error: " + " ".join(str(error).split()), file=sys.stderr)
    return code


def _interrupted() -> int:
    """Leave a clean terminal. A thread that imports torch or loads weights cannot be stopped: leave without it."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if threading.active_count() > 1:
        _leave()
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            stream.write(SHOW_CURSOR)
            stream.flush()
    print("interrupted", file=sys.stderr)
    return INTERRUPTED


def _leave() -> NoReturn:
    """At once. Threads that draw bars, and hide the cursor for that, are cut off before it is shown again."""
    screens = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    for screen in screens:
        if os.isatty(screen):
            os.write(screen, SHOW_CURSOR.encode())
    os.write(screens[1], b"interrupted\n")
    os._exit(INTERRUPTED)


def script(argv: Sequence[str] | None = None) -> NoReturn:
    """The command as a process of its own: `main`, then what was registered for the exit, and out.

    To take torch's and numba's modules apart one by one takes up to a fifth of a short command, and the system
    takes back all of a process's memory at once. Where a thread is left that the interpreter would wait for, it does.
    """
    code = main(argv)
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit(code)

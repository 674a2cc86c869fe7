"""The command's entry point: parse, dispatch, and turn every error into one line and an exit code."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import sys
import threading
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module, resources
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from asyncengine import __version__
from asyncengine.checks import Settings
from asyncengine.config import GROUPS
from asyncengine.errors import EngineError, InvalidParameter, ModelNotFound, UnsupportedModel, nearest
from asyncengine.integrations.cli.exits import FAILED, INTERRUPTED, USAGE, CliError, interruptible
from asyncengine.integrations.cli.inputs import name_and_path
from asyncengine.integrations.cli.options import ENGINE_FIELDS, SAMPLING_FIELDS, add_flags, literal
from asyncengine.integrations.cli.text import drop_output, prepare_streams
from asyncengine.integrations.http.settings import ServerSettings
from asyncengine.sampling_params import SamplingParams

_SAMPLES_FIELDS = (*SAMPLING_FIELDS, "n", "logprobs", "top_logprobs", "on_budget")
_SETTINGS: Mapping[str, tuple[tuple[str, type[Settings], Sequence[str]], ...]] = {
    "server": (("server", ServerSettings, tuple(ServerSettings.__dataclass_fields__)),),
    "sampling": (("sampling", SamplingParams, SAMPLING_FIELDS),),
    "sampling and samples": (("sampling", SamplingParams, _SAMPLES_FIELDS),),
    "engine": tuple((f"engine: {title}", group, ENGINE_FIELDS) for title, group in GROUPS.items()),
}
"""Sections of flags (title, class and names of its fields) that a command has, by their word in commands.toml."""
_TYPES: Mapping[str, Callable[[str], Any]] = {"literal": literal, "path": Path, "pair": name_and_path}
_SWITCHES = {"on": "store_true", "both": argparse.BooleanOptionalAction}


def _add_command(commands: Any, name: str, about: dict[str, Any], shared: Mapping[str, Any]) -> None:
    """Add the parser of a command, which `about` describes as commands.toml does. `shared`: arguments of several."""
    usage, settings = f"asyncengine {name} {about.pop('usage')}", about.pop("settings", ())
    words = {word: about.pop(word) for word in ("help", "description")}
    parser = commands.add_parser(name, usage=usage, allow_abbrev=False, **words)
    parsers: dict[str | None, Any] = {None: parser}
    for argument, flag in about.items():
        keywords = {**shared.get(flag.pop("like", ""), {}), **flag}
        section, either = keywords.pop("section", None), keywords.pop("either", None)
        if section not in parsers:
            parsers[section] = parser.add_argument_group(section)
        if either not in parsers:
            parsers[either] = parser.add_mutually_exclusive_group()
        if "type" in keywords:
            keywords["type"] = _TYPES[keywords["type"]]
        if "switch" in keywords:
            keywords["action"] = _SWITCHES[keywords.pop("switch")]
        parsers[either or section].add_argument(argument, **keywords)
    for title, group, names in (each for word in settings for each in _SETTINGS[word]):
        add_flags(parser, title, group, names)


SHOW_CURSOR = "\x1b[?25h"


class OneLineParser(argparse.ArgumentParser):
    """Tells an error in one line, without argparse's usage, which `--help` shows."""

    commands: Collection[str] = ()
    """Names of the commands, of which the first argument is one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but refuse unknown flags and commands here, with a guess at the right one."""
        before = takewhile(lambda text: text != "--" and text not in self.commands, args)
        for flag in (text.partition("=")[0] for text in before):
            if flag.startswith("--") and " " not in flag and flag not in self._option_string_actions:
                flags = {_plain(text): text for text in self._option_string_actions}
                self._refuse("flag", flag, flags.get(nearest(_plain(flag), flags) or ""))
            if self.commands and not flag.startswith("-"):
                self._refuse("command", flag, nearest(flag, self.commands))
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def _refuse(self, noun: str, name: str, guess: str | None) -> NoReturn:
        self.error(f"unknown {noun} {name}" + (f"; did you mean {guess}?" if guess else ""))

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def build_parser() -> argparse.ArgumentParser:
    written = tomllib.loads((resources.files(__package__) / "commands.toml").read_text(encoding="utf-8"))
    shared, words = written.pop("shared"), written.pop("asyncengine")
    parser = OneLineParser(prog="asyncengine", allow_abbrev=False, **words)
    parser.add_argument("--version", action="version", version=f"asyncengine {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=OneLineParser)
    for name, about in written.items():
        _add_command(commands, name, about, shared)
    parser.commands = commands.choices
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 for a failure, 2 for bad input, 130 after Ctrl-C."""
    if not prepare_streams():
        return _fail("stdout is closed: there is nowhere to print to", FAILED)
    argv_list = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = build_parser()
        args = parser.parse_args(argv_list)
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
        return _fail(_naming_flag(str(error), argv_list), error.code if isinstance(error, CliError) else USAGE)
    except EngineError as error:
        return _fail(error, FAILED)
    except BrokenPipeError:  # the reader of our output has left (`| head`): no message is needed
        drop_output()
        return FAILED
    except OSError as error:  # a full disk, for one
        drop_output()
        return _fail(error, FAILED)


def _finish_compiling() -> None:
    """Wait for kernels of a first start that are still compiled in the background: a container image needs all."""
    module = sys.modules.get("asyncengine.kernels.elsewhere")
    for compilation in [] if module is None else list(module.elsewhere):
        if sys.stderr.isatty():
            print("compiling what other requests will call, once on this machine", file=sys.stderr)
        compilation.wait()


def _naming_flag(message: str, arguments: Sequence[str]) -> str:
    """The message about a field ("max_num_seqs: must be ..."), with the flag for the field's name if it was given."""
    field = message.partition(":")[0]
    flag = "--" + field.replace("_", "-")
    is_flag = any(text.partition("=")[0] in (flag, f"--no-{flag[2:]}") for text in arguments)
    return flag + message.removeprefix(field) if is_flag else message


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
    """Exit at once. Threads that draw bars hide the cursor: cut off their output, then show the cursor again."""
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
    """The command as a process of its own: `main`, then the functions registered with `atexit`, then `os._exit`.

    Taking torch's and numba's modules apart one by one takes up to a fifth of a short command, while the system frees a
    process's memory at once. If a thread is left that the interpreter would wait for, it exits as usual.
    """
    code = main(argv)
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or a pipe without a reader
            stream.flush()
    os._exit(code)

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
    found: dict[str | None, Any] = {None: parser}
    for argument, own in about.items():
        how = {**shared.get(own.pop("like", ""), {}), **own}
        section, either = how.pop("section", None), how.pop("either", None)
        if section not in found:
            found[section] = parser.add_argument_group(section)
        if either not in found:
            found[either] = parser.add_mutually_exclusive_group()
        if "type" in how:
            how["type"] = _TYPES[how["type"]]
        if "switch" in how:
            how["action"] = _SWITCHES[how.pop("switch")]
        found[either or section].add_argument(argument, **how)
    for title, group, names in (each for word in settings for each in _SETTINGS[word]):
        add_flags(parser, title, group, names)


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

"""Limits on what a chat template may take. A template is a program, and comes from the maker of the model.

The steps that a rendering may run and the bytes that it may make are in proportion to its chat. Both are paid before
the work is done, wherever one operation can do much of it, so the same chat always ends in the same way, on whatever
thread: no clock is read and nothing has to be killed. (The `fuel` of the minijinja library is the same idea, without
the bytes.)
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any

from jinja2 import Undefined
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import SandboxedFormatter
from jinja2.utils import Namespace

from asyncengine.text.chat_messages import MAX_INTEGER_BITS, NAMES

STEPS, STEPS_PER_CHAR = 500_000, 32
"""Steps of a rendering, and how many more for each character of its chat. A step is about an expression's work. The
largest templates there are take some thousand for a message."""
CHARS_OF_MESSAGE = 512
"""Characters that each message counts for, besides its own."""
BYTES, BYTES_PER_CHAR = 33_554_432, 64
"""Bytes of texts and lists that a rendering may make in all, whether it keeps them or not."""
MAX_CALLS = 100
"""Calls of macros inside each other."""
MAX_NESTING = 100
"""Lists and dicts inside each other; those of a chat have fewer (`chat_messages.MAX_DEPTH`)."""

_ITEM = 128
"""Bytes of an entry of a list or dict, with a small object of its own."""
_REFERENCE = 8
_NUMBER = 400
"""Characters of the longest number that a width does not tell."""
_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: tuple[Any, ...] = (list, tuple, dict, range, Namespace, *_VIEWS)
_SEARCHES = ("in", "notin")
_NEWLINES = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    **{sign: getattr(operator, name) for sign, name in NAMES["operators"].items()},
    "in": lambda item, items: item in items, "notin": lambda item, items: item not in items,
}  # fmt: skip


class OverLimit(Exception):
    """The chat template went over a limit; the message says over which."""


class Format:
    """A text's method `format`, which only `MeteredContext.call` can call."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def indent_length(width: str | int | None) -> int:
    """The length of an indention, given as such or as a number of blanks."""
    return len(width) if isinstance(width, str) else max(int(width or 0), 0)


def _lines(text: str) -> int:
    return 1 + sum(map(text.count, _NEWLINES))


def _pieces(text: str, sep: str | None = None, maxsplit: int = -1) -> int:
    count = len(text) // 2 + 1 if sep is None else text.count(sep) + 1
    return _ITEM * (min(count, maxsplit + 1) if maxsplit >= 0 else count)


GROWTH: Mapping[str, Callable[..., int]] = MappingProxyType(
    {
        **dict.fromkeys(("center", "ljust", "rjust", "zfill"), lambda text, width=80, *_: width),
        "replace": lambda text, old, new, *_, **__: text.count(old) * len(new),
        "indent": lambda text, width=4, *_, **__: _lines(text) * (_ITEM + indent_length(width)),
        **dict.fromkeys(("split", "rsplit"), _pieces),
        "splitlines": lambda text, *_, **__: _ITEM * _lines(text),
        "join": lambda text, parts, *_: len(parts) * len(text),
        **dict.fromkeys(("title", "wordcount"), lambda text: len(text) * _ITEM // 2),
        "truncate": lambda text, length=255, killwords=False, end="...", leeway=None: len(end),
        "int": lambda text, *_, **__: len(text) ** 2,  # what reading a number takes
        "round": lambda value, precision=0, *_, **__: precision**2,
        "batch": lambda items, linecount, *_: linecount * _REFERENCE,
        "slice": lambda items, slices, *_: slices * _ITEM,
    }
)
"""Characters that methods of texts, and filters, make beyond copies of what they are given, by their arguments."""
_COPIES: Mapping[str, int] = NAMES["copies"]
DEEP = frozenset(NAMES["filters"]["deep"])


def checked_key(key: Any) -> Any:
    """A key for a dict. Raises `TypeError` for keys of which many can be made that have one hash."""
    if not (key is None or isinstance(key, (str, float, Undefined)) or (isinstance(key, int) and abs(key) >> 60 == 0)):
        raise TypeError(f"a {type(key).__name__} like this cannot be a key")
    return key


class MeteredContext(Context):
    """The variables of one rendering, and what it may still use. Compiled templates call its methods."""

    def allow(self, chars: int) -> None:
        """Begin a rendering of a chat with `chars` characters."""
        self._most = (STEPS + STEPS_PER_CHAR * chars, BYTES + BYTES_PER_CHAR * chars)
        self._steps, self._bytes = self._most
        self._calls = 0

    def run(self, steps: int) -> bool:
        """Pay for steps. True, so that conditions can pay as well. Raises `OverLimit`, as all methods do."""
        self._steps -= steps
        if self._steps < 0:
            raise OverLimit(f"runs for more than {self._most[0]:,} steps")
        return True

    def hold(self, size: int) -> bool:
        """Pay for bytes. True."""
        self._bytes -= size
        if self._bytes < 0:
            raise OverLimit(f"makes more than {self._most[1]:,} bytes of text and lists")
        return True

    def weigh(self, value: Any, around: int = 0, indent: int = 0) -> int:
        """Pay for traversing all of `value`, each part as often as it occurs, as writing, comparing and sorting do in
        one go. `around`: characters beside each part; `indent`: for each depth. Returns the steps."""
        before = self._steps
        self._weigh((value,), around, indent, 0)
        return before - self._steps

    def _weigh(self, values: Any, around: int, indent: int, depth: int) -> None:
        if depth > MAX_NESTING:
            raise OverLimit(f"nests values deeper than {MAX_NESTING}")
        self.run(len(values))
        self.hold(len(values) * (_ITEM + around + indent * depth))
        for value in values:
            if isinstance(value, str):
                self.run(len(value) >> 6)
                self.hold(len(value) * (6 if value.isascii() else 12))  # as JSON or Python escape it
            elif isinstance(value, dict):
                self._weigh(value.keys(), 0, 0, depth)
                self._weigh(value.values(), around, indent, depth + 1)
            elif isinstance(value, (list, tuple, *_VIEWS)):
                self._weigh(value, around, indent, depth + 1)
            elif isinstance(value, int):
                self._check_bits(value.bit_length())
            elif isinstance(value, Namespace):
                self._weigh(object.__getattribute__(value, "_Namespace__attrs").values(), 0, 0, depth + 1)
            elif isinstance(value, range):
                self.run(len(value))
                self.hold(len(value) * _ITEM)
            elif not (value is None or isinstance(value, (float, complex, Undefined))):
                raise TypeError(f"a {type(value).__name__} is no text, number, list or dict")

    def _check_bits(self, bits: int) -> None:
        if bits > MAX_INTEGER_BITS + 1:
            raise OverLimit(f"makes integers of more than {MAX_INTEGER_BITS} bits")

    # -- what expressions compile to

    def text(self, value: object) -> str:
        """`value` as text, of which a copy is paid for in the widest form."""
        if not isinstance(value, str):
            self.weigh(value)
        text = value if type(value) is str else str(value)
        self._bytes -= 64 + 4 * len(text)
        if self._bytes < 0:
            self.hold(0)
        return text

    def concat(self, *values: Any) -> str:
        """`a ~ b`"""
        return "".join(map(self.text, values))

    def add(self, *values: Any) -> Any:
        """`a + b + c`"""
        if all(type(value) is str for value in values):  # at once, without the texts between
            self.hold(4 * sum(map(len, values)))
            return "".join(values)
        return reduce(lambda left, right: self.binary("+", left, right), values)

    def getitem(self, value: Any, key: Any) -> Any:
        """`value[key]`; a key that is not there may be quoted in an error."""
        if isinstance(key, str):
            self.hold(12 * len(key))
        elif isinstance(key, tuple):
            raise TypeError("a tuple is no key")
        elif type(key) is not int:
            self.weigh(key)
        return self.environment.getitem(value, key)

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """`value[start:stop:step]`"""
        span = slice(start, stop, step)
        if isinstance(value, (str, list, tuple)):
            self.hold(len(range(*span.indices(len(value)))) * (4 if isinstance(value, str) else _REFERENCE))
        return value[span]

    def compare(self, sign: str, left: Any, right: Any) -> Any:
        """`left < right`, and the like."""
        if type(right) is str:
            if type(left) is str:
                self.run(
                    (len(right) if sign in _SEARCHES else min(len(left), len(right))) * (min(len(left), 100) + 8) >> 9
                )
        elif isinstance(right, _CONTAINERS):
            if sign not in _SEARCHES:
                self.weigh(left if isinstance(left, _CONTAINERS) else None)
            elif not isinstance(left, str) or not isinstance(right, (dict, _VIEWS[0])):
                self.run(self.weigh(left) * (1 if isinstance(right, (dict, Namespace)) else len(right)))
        return OPERATORS[sign](left, right)

    def compare_all(self, signs: tuple[str, ...], *values: Any) -> Any:
        """`a < b <= c`, and the like."""
        pairs = zip(signs, values, values[1:], strict=False)
        return reduce(lambda result, pair: result and self.compare(*pair), pairs, True)

    def binary(self, sign: str, left: Any, right: Any) -> Any:
        """`left * right`, and the like. Sizes are known before."""
        if isinstance(left, (int, float, complex)) and isinstance(right, (int, float, complex)):
            if isinstance(left, int) and isinstance(right, int):
                bits, more = left.bit_length(), right.bit_length()
                grown = {"**": bits * max(right, 1), "*": bits + more}.get(sign, max(bits, more) + 1)
                self._check_bits(grown)
        elif sign == "+" and isinstance(left, str) and isinstance(right, str):
            self.hold(_width(left, right) * (len(left) + len(right)))
        elif sign == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            self.hold(_REFERENCE * (len(left) + len(right)))
        elif sign == "%" and isinstance(left, str):
            self._pay_percent(left, right)
        elif sign == "*" and isinstance(left, int) and isinstance(right, (str, list, tuple)):
            return self.binary(sign, right, left)
        elif sign == "*" and isinstance(left, (str, list, tuple)) and isinstance(right, int):
            self.hold(max(right, 0) * len(left) * (_width(left) if isinstance(left, str) else _REFERENCE))
        elif not (isinstance(left, Undefined) or isinstance(right, Undefined)):
            raise TypeError(f"no {sign} of a {type(left).__name__} and a {type(right).__name__}")
        return OPERATORS[sign](left, right)

    def _pay_percent(self, form: str, values: Any) -> None:
        """`'%5s' % values`: texts as often as they may be named, and widths."""
        times = form.count("%")
        before = self._bytes
        self.weigh(values)
        widths = [int(digits) for digits in re.findall("[0-9]+", form)]
        if "*" in form and isinstance(values, tuple):
            widths += [abs(value) for value in values if isinstance(value, int)]
        self.hold(12 * len(form) + 4 * sum(widths) + _NUMBER * times)
        self.hold((before - self._bytes) * times if isinstance(values, dict) else 0)

    # -- calls

    def call(__self, __obj: Any, *args: Any, **options: Any) -> Any:  # noqa: N805 -- as jinja2 declares it
        """`target(*args, **options)`; names of `options` may be any."""
        self, target = __self, __obj
        options.pop("_loop_vars", None)  # the compiler's
        owner, arguments = getattr(target, "__self__", None), args
        if type(owner) is str and len(args) == 1 and type(args[0]) is str and not options:
            copies = _COPIES.get(target.__name__)
            if copies is not None:  # the commonest calls: the same price as `pay_text`'s, without its overhead
                self._steps -= 8 + (len(owner) * (8 + len(args[0])) >> 9)
                self._bytes -= 4 * copies * len(owner)
                return target(*args) if self._steps >= 0 and self.hold(0) else self.run(0)
        self.run(8 + len(args) + len(options))
        if options:
            arguments = (*args, *options.values())
            self.hold(sum(12 * len(name) for name in options))  # one may be quoted in an error
        if isinstance(target, (Macro, LoopContext)):
            if self._calls == MAX_CALLS:
                raise OverLimit(f"nests calls deeper than {MAX_CALLS}")
            self._calls += 1
            try:
                return target(*args, **options)
            finally:
                self._calls -= 1
        for value in arguments:
            if isinstance(value, _CONTAINERS):
                self.weigh(value)
        if isinstance(owner, str):
            self.pay_text(target.__name__, owner, arguments, args, options)
        elif isinstance(target, Format):
            self.hold(12 * len(target.text))
            return _Formatter(self).vformat(target.text, args, options)
        elif isinstance(owner, (list, tuple)):  # `count` and `index`, which quotes what is not there
            self.run(len(owner) * sum(map(self.weigh, arguments)))
        elif isinstance(owner, dict) and target.__name__ == "copy":
            self.hold(_ITEM * len(owner))
        return target(*args, **options)

    def pay_text(
        self, name: str, text: str, arguments: Iterable[Any], args: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        """Pay for a method of a text, or for a filter; `arguments` are its arguments, with and without names."""
        longest, wide, safe = 8, not text.isascii(), type(text) is not str
        for arg in arguments:
            if isinstance(arg, str):
                longest, wide, safe = max(longest, len(arg)), wide or not arg.isascii(), safe or type(arg) is not str
        # looking for a text from behind, and for each of some characters, takes the product of both lengths
        self.run(1 + (len(text) * longest >> 9))
        size = len(text) * _COPIES.get(name, 1)
        if name in GROWTH:
            size += max(int(GROWTH[name](text, *args, **options)), 0)
        self.hold(size * (4 if wide else 1) * (6 if safe else 1))  # what is marked as safe gets the others escaped

    def pay_items(
        self, name: str, items: Any, arguments: Iterable[Any], args: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        """Pay for a filter of many values."""
        steps_each, size = 4, len(items) if hasattr(items, "__len__") else 1
        for value in arguments:
            if isinstance(value, str):  # a path of attributes, a test's name, what to compare with
                self.hold(12 * len(value))
                steps_each += len(value) // 2
            elif isinstance(value, _CONTAINERS):
                steps_each += self.weigh(value)
        if name in DEEP:
            self.run(self.weigh(items) * size.bit_length())
        self.run(size * steps_each)
        self.hold(_ITEM * size)
        if name in GROWTH:
            self.hold(max(int(GROWTH[name](items, *args, **options)), 0))


def _width(*texts: str) -> int:
    """Bytes of a character in the text that `texts` are joined to."""
    return (1 if all(map(str.isascii, texts)) else 4) * (1 if all(type(text) is str for text in texts) else 6)


class _Formatter(SandboxedFormatter):
    """`str.format`"""

    def __init__(self, context: MeteredContext) -> None:
        super().__init__(context.environment)
        self._context = context

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._context.run(8)
        self._context.hold(4 * sum(map(int, re.findall("[0-9]+", format_spec))) + _NUMBER)
        self._context.weigh(value)
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._context.weigh(value)
        return super().convert_field(value, conversion)

"""The sandbox of chat templates: jinja2's, with the names and filters that transformers gives templates, and limits.

The same text comes out as from transformers' `apply_chat_template` (`tests/core/text/test_plain_tokenizer.py` compares
them), without importing it. Features without a use in chats or without a bound are left out: random texts, other files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import reduce
from types import MappingProxyType
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context, utils
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.filters import FILTERS, ignore_case, make_attrgetter
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import test_in

from asyncengine.text import template_limits
from asyncengine.text.chat_messages import MAX_INTEGER_BITS, NAMES, REASONING
from asyncengine.text.template_limits import CHARS_OF_MESSAGE, DEEP, Format, MeteredContext, checked_key, indent_length

MAX_TEMPLATE_CHARS, MAX_TEMPLATE_TOKENS, MAX_TEMPLATE_BRANCHES = 98_304, 10_000, 300_000
"""Characters of a template, its tokens (the largest have some 5,000), and its conditions times its names: what
compiling takes time and memory for."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where the last message ends in what was rendered; it ends in white space, which templates may take away."""
MAX_TIME_FORMAT = 256

_TEXTS, _NUMBERS = frozenset(NAMES["filters"]["texts"]), frozenset(NAMES["filters"]["numbers"])
_DICT = frozenset(dir(dict))
_METHODS = {type_: frozenset(NAMES["methods"][type_.__name__]) for type_ in (str, dict, list, tuple)}
_SIGNS: Mapping[Any, str] = MappingProxyType(
    {test_in: "in"} | {operator: sign for sign, operator in template_limits.OPERATORS.items()}
)
"""Signs of the operators that jinja2's tests are."""
_KEY = "checked_key"
_SANDBOX_TYPES = (LoopContext, Macro, utils.Cycler, utils.Joiner, utils.Namespace)
_REFUSED = (
    nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block, nodes.EvalContextModifier,
    nodes.OverlayScope,
)  # fmt: skip
"""Statements that need other templates, or would change what the limits rest on."""


class _Generation(Extension):
    """`{% generation %}`: marks an assistant's text for training. Here it only makes a scope."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Any) -> Any:
        return caller()

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for count, token in enumerate(stream):
            if count == MAX_TEMPLATE_TOKENS:
                raise TemplateSyntaxError(f"more than {MAX_TEMPLATE_TOKENS:,} tokens", token.lineno)
            yield token


def _checked(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of `dict`, of which each key is checked."""
    if args and not isinstance(args[0], dict):
        args = ([(checked_key(key), value) for key, value in args[0]], *args[1:])
    return args


class _Dict:
    """`dict` for templates: callable, with `fromkeys`, and without any other attribute."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*_checked(args), **values)

    def fromkeys(self, keys: Any, *value: Any) -> dict[Any, Any]:
        if isinstance(keys, str):
            raise TypeError("fromkeys takes a list of keys")
        return dict.fromkeys(map(checked_key, keys), *value)


class _Namespace(utils.Namespace):
    """`namespace`, without names that Python itself gives a meaning to."""

    def __init__(*args: Any, **values: Any) -> None:  # `self` may be one of the values
        namespace, attributes = args[0], dict(*_checked(args[1:]), **values)
        for name in attributes:
            _check_name(name)
        utils.Namespace.__init__(namespace, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}")


class _Compiler(CodeGenerator):
    """Makes templates that pay: expressions whose work depends on sizes become calls of the `MeteredContext`."""

    def enter_frame(self, frame: Frame) -> None:
        super().enter_frame(frame)
        environment = self.environment
        assert isinstance(environment, TemplateEnvironment)
        for how, name in frame.symbols.loads.values():
            if how == "resolve" and name is not None and name not in environment.globals:
                environment.reads.add(name)

    def _emit(self, call: str, values: Sequence[nodes.Node], frame: Frame) -> None:
        self.write(f"context.{call}")
        for value in values:
            self.visit(value, frame)
            self.write(", ")
        self.write(")")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("context.text(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self._emit("concat(", node.nodes, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        sides, signs = [node.expr, *(operand.expr for operand in node.ops)], [operand.op for operand in node.ops]
        last = sides[1].items if isinstance(sides[1], (nodes.List, nodes.Tuple)) else sides[1:]
        small = all(isinstance(side, nodes.Const) for side in last)
        if signs[0] not in ("in", "notin"):
            small = small or isinstance(sides[0], nodes.Const)
        if len(signs) > 1:
            self._emit(f"compare_all({tuple(signs)!r}, ", sides, frame)
        elif small:
            super().visit_Compare(node, frame)  # no more work than the constant is long
        else:
            self._emit(f"compare({signs[0]!r}, ", sides, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            ends = (node.arg.start, node.arg.stop, node.arg.step)
            self._emit("cut(", [node.node, *(end or nodes.Const(None) for end in ends)], frame)
        elif isinstance(node.arg, (nodes.Const, nodes.Neg)):
            super().visit_Getitem(node, frame)
        else:
            self._emit("getitem(", [node.node, node.arg], frame)

    def _binary(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._emit(f"binary({node.operator!r}, ", [node.left, node.right], frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        values: list[nodes.Node] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            values.insert(0, left.right)
            left = left.left
        self._emit("add(", [left, *values], frame)

    visit_Sub = visit_Mul = visit_Div = visit_FloorDiv = visit_Mod = visit_Pow = _binary  # noqa: N815


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of one template, which `from_string` compiles.

    Raises `OverLimit`, or whatever jinja2 and Python's compiler raise for a template that is none.
    """

    code_generator_class = _Compiler
    context_class = MeteredContext
    call = staticmethod(MeteredContext.call)  # type: ignore[assignment]
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)  # none at compile time

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        self.reads: set[str] = set()
        """Names that the template reads from outside."""
        self._names, self._branches = set[str](), 0
        free, items = NAMES["filters"]["free"], NAMES["filters"]["items"]
        metered = {name: _metered(name) for name in (*_TEXTS, *_NUMBERS, *items, *DEEP - {"unique"})}
        replaced = {"format": _format, "sum": _sum, "tojson": _to_json, "unique": _unique, _KEY: checked_key}
        self.filters = {**{name: FILTERS[name] for name in free}, **metered, **replaced}
        self.tests.update({name: _comparing(_SIGNS[test]) for name, test in self.tests.items() if test in _SIGNS})
        self.tests.update(
            odd=pass_context(lambda context, value: context.binary("%", value, 2) == 1),
            even=pass_context(lambda context, value: context.binary("%", value, 2) == 0),
            divisibleby=pass_context(lambda context, value, num: context.binary("%", value, num) == 0),
            lower=pass_context(lambda context, value: context.text(value).islower()),
            upper=pass_context(lambda context, value: context.text(value).isupper()),
        )
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise, strftime_now=_now, dict=_Dict(), namespace=_Namespace)

    def _generate(self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False) -> str:
        self._charge(source)
        if len(self._names) * self._branches > MAX_TEMPLATE_BRANCHES:
            raise TemplateSyntaxError("too many conditions and names", 1)
        return super()._generate(source, name, filename, defer_init)

    def _charge(self, node: nodes.Node) -> int:
        """Make loops and macros pay for their bodies whenever these begin. Gives the steps of `node`."""
        steps = 1
        if isinstance(node, _REFUSED):
            raise TemplateSyntaxError(f"chat templates have no {type(node).__name__}", node.lineno)
        if isinstance(node, nodes.Const):
            if isinstance(node.value, int) and node.value.bit_length() > MAX_INTEGER_BITS:
                raise TemplateSyntaxError(f"a number of more than {MAX_INTEGER_BITS} bits", node.lineno)
            steps += len(node.value) >> 6 if isinstance(node.value, str) else 0
        elif isinstance(node, nodes.TemplateData):
            steps += len(node.data) >> 2
        elif isinstance(node, nodes.Name):
            self._names.add(node.name)
        elif isinstance(node, nodes.If):
            self._branches += 1
        elif isinstance(node, nodes.Pair):
            node.key = self._filtered(node.key, _KEY)
        elif isinstance(node, (nodes.Call, nodes.Filter, nodes.Test)) and node.dyn_args is not None:
            node.dyn_args = self._filtered(node.dyn_args, "list")
        steps += sum(map(self._charge, node.iter_child_nodes()))
        if isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock)):
            node.body.insert(0, nodes.ExprStmt(_pay(steps)))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(_pay(steps), node.test)
        return steps

    def _filtered(self, node: nodes.Expr, name: str) -> nodes.Expr:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=self)

    def getattr(self, obj: Any, attribute: str) -> Any:
        obj_type = type(obj)  # the commonest first, for which jinja2 raises errors inside, and looks up much
        if obj_type is dict and attribute not in _DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (obj_type is str and attribute in _METHODS[str] and attribute != "format") or (
            obj_type in (_Namespace, LoopContext) and hasattr(obj, attribute) and attribute[0] != "_"
        ):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether `_METHODS` names an attribute of a text, list or dict, or it is a public one of the sandbox's own
        objects."""
        plain_type = next((each for each in _METHODS if isinstance(obj, each)), None)
        if plain_type is not None:
            return attr in _METHODS[plain_type]
        return isinstance(obj, (*_SANDBOX_TYPES, _Dict)) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        owner = getattr(value, "__self__", None)
        return Format(owner) if type(owner) is str and value.__name__ == "format" else None


def _pay(steps: int) -> nodes.Expr:
    """Python code in a template's tree, which only jinja2's own names can be."""
    name = object.__new__(nodes.InternalName)
    nodes.Node.__init__(name, f"context.run({steps})")
    return name


_LEADS: Mapping[str, Callable[[MeteredContext], tuple[Any, ...]]] = MappingProxyType(
    {
        "": lambda context: (), "context": lambda context: (context,),
        "eval_context": lambda context: (context.eval_ctx,), "environment": lambda context: (context.environment,),
    }
)  # fmt: skip
"""Arguments that a filter of jinja2's takes before the value."""


def _metered(name: str) -> Callable[..., Any]:
    """One of jinja2's filters, that pays first and gives no generator, which would run unpaid."""
    original = FILTERS[name]
    lead = _LEADS[getattr(getattr(original, "jinja_pass_arg", None), "name", "")]

    @pass_context
    def metered(context: MeteredContext, value: Any, *args: Any, **options: Any) -> Any:
        if name in _TEXTS:
            value = value if isinstance(value, str) else context.text(value)
        textual = isinstance(value, str) and (name in _TEXTS or name in _NUMBERS)
        pay = context.pay_text if textual else context.pay_items
        pay(name, value, (*args, *options.values()) if options else args, args, options)
        result = original(*lead(context), value, *args, **options)
        return list(result) if isinstance(result, Iterator) else result

    return metered


def _comparing(sign: str) -> Callable[..., Any]:
    return pass_context(lambda context, value, other: context.compare(sign, value, other))


@pass_context
def _format(context: MeteredContext, form: Any, *args: Any, **options: Any) -> Any:
    if args and options:
        raise TypeError("format takes values or names, not both")
    return context.binary("%", form if isinstance(form, str) else context.text(form), options or args)


@pass_context
def _sum(context: MeteredContext, items: Any, attribute: Any = None, start: Any = 0) -> Any:
    context.pay_items("sum", items, (attribute,), (), {})
    values = items if attribute is None else map(make_attrgetter(context.environment, attribute), items)
    return reduce(lambda total, value: context.binary("+", total, value), values, start)


@pass_context
def _unique(context: MeteredContext, items: Any, case_sensitive: bool = False, attribute: Any = None) -> list[Any]:
    context.pay_items("unique", items, (attribute,), (), {})
    same = None if case_sensitive else ignore_case
    key = make_attrgetter(context.environment, attribute, postprocess=same)
    first_items: dict[Any, Any] = {}
    for item in items:
        first_items.setdefault(checked_key(key(item)), item)
    return list(first_items.values())


@pass_context
def _to_json(
    context: MeteredContext, value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """JSON as Python writes it: jinja2's own filter writes for HTML."""
    context.weigh(value, sum(map(len, separators or ())), indent_length(indent))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: Any) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    if len(form) > MAX_TIME_FORMAT:  # one character may be a field that is padded to hundreds
        raise TemplateError(f"a time's format has more than {MAX_TIME_FORMAT} characters")
    return datetime.now().strftime(form)


def render(
    template: Template, source: str, chat: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, chars: int,
    continued: bool,
) -> str:  # fmt: skip
    """The text of a chat of plain JSON data. `template`: what the environment made of `source`. `chars`: the size of
    all that it is given, by which its limits are. `continued`: it ends where the last message's content does.

    Raises `OverLimit`, whatever the template raises, and `ValueError` for a last message that cannot be continued.
    """
    messages = [_with_reasoning({key: value for key, value in item.items() if value is not None}) for item in chat]
    if not continued:
        return _run(template, chars, {**variables, "messages": messages})
    final = _mark_end(messages[-1], source)
    text = _run(template, chars, {**variables, "messages": messages})
    if final.strip() not in text or _TAG.strip() not in text:
        raise ValueError("the last message cannot be continued: the template does not write its content as it is")
    end = text.rindex(_TAG.strip())
    return text[:end] if text[end : end + len(_TAG)] == _TAG else text[:end].rstrip()


def _run(template: Template, chars: int, variables: dict[str, Any]) -> str:
    context = template.new_context(variables)
    assert isinstance(context, MeteredContext)
    context.allow(chars + CHARS_OF_MESSAGE * len(variables["messages"]))
    return "".join(template.root_render_func(context))


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under every name by which templates read it."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _mark_end(message: dict[str, Any], source: str) -> str:
    """Put the mark behind the content, or behind its last block of text. Returns that text."""
    content = message.get("content")
    if content is None:
        raise ValueError("the last message has no content to continue")
    if "content" not in source:
        raise ValueError("the template reads no content that could be continued")
    if isinstance(content, str):
        message["content"] = content + _TAG
        return content
    for index in range(len(content) - 1, -1, -1):
        if "text" in content[index]:
            text = str(content[index]["text"])
            block = {**content[index], "text": text + _TAG}
            message["content"] = [*content[:index], block, *content[index + 1 :]]
            return text
    raise ValueError("the last message has no text to continue")

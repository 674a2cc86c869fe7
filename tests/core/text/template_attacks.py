"""Chat templates that take all memory or all time there is, unless something stops them.

Run as a program, it tries them all, with a second of the processor's time for each.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from asyncengine.errors import InvalidParameter
from asyncengine.text.chat_template import ChatTemplate

LOOPS = "{% for a in range(99999) %}"
ENDS = "{% endfor %}"
BIG = "{% set big = 'x' * 4000000 %}"
DOUBLED = "{% set ns = namespace(x='0') %}" + LOOPS + "{% set ns.x = STEP %}" + ENDS + "{{ ns.x }}"
NESTED = "{% set ns = namespace(x=START) %}{% for i in range(COUNT) %}{% set ns.x = STEP %}{% endfor %}"


def doubled(step: str) -> str:
    return DOUBLED.replace("STEP", step)


def nested(start: str, step: str, count: int = 60) -> str:
    return NESTED.replace("START", start).replace("STEP", step).replace("COUNT", str(count))


ATTACKS = {
    # operators
    "text times": "{{ 'x' * 10000000000 }}",
    "times text": "{{ 10000000000 * 'x' }}",
    "emojis": "{% set ns = namespace(x=[]) %}" + LOOPS + "{% set ns.x = ns.x + ['\U0001f600' * 999999] %}" + ENDS,
    "list times": "{{ ([1] * 10000000000) | length }}",
    "tuple times": "{{ ((1,) * 10000000000) | length }}",
    "power": "{{ 7 ** (10 ** 7) }}",
    "power of powers": "{{ 9 ** 9 ** 9 ** 9 ** 9 }}",
    "squared numbers": "{% set ns = namespace(x=3) %}" + LOOPS + "{% set ns.x = ns.x * ns.x %}" + ENDS,
    "plus": doubled("ns.x + ns.x"),
    "tilde": doubled("ns.x ~ ns.x"),
    "tilde of a list": doubled("[ns.x, ns.x] ~ ''"),
    "growing list": "{% set ns = namespace(x=[1]) %}" + LOOPS + "{% set ns.x = ns.x + ns.x %}" + ENDS,
    "slices": BIG + "{% set ns = namespace(x=[]) %}" + LOOPS + "{% set ns.x = ns.x + [big[1:]] %}" + ENDS,
    "steps": BIG + LOOPS + "{% set y = big[::-1] %}" + ENDS,
    # widths
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent precision": "{{ '%.1000000000f' % 1.5 }}",
    "percent names": "{{ ('%(a)s' * 9999) % {'a': 'x' * 999999} }}",
    "percent by a test": "{{ '%1000000000d' is odd }}",
    "percent by divisibleby": "{{ '%1000000000d' is divisibleby(3) }}",
    "format filter": "{{ '%1000000000s' | format('x') }}",
    "format": "{{ '{:>1000000000}'.format('x') }}",
    "format nested": "{{ '{:>{w}}'.format('x', w=1000000000) }}",
    "format precision": "{{ '{:.1000000000f}'.format(1.5) }}",
    "format fields": "{{ ('{0}' * 99999).format('x' * 99999) }}",
    "format repr": nested("''", "[ns.x, ns.x]") + "{{ '{0!r}'.format(ns.x) }}",
    "center": "{{ 'x' | center(10000000000) }}",
    "center method": "{{ 'x'.center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "rjust": "{{ 'x'.rjust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "expandtabs": "{{ ('\t' * 9999).expandtabs(1000000) }}",
    "indent": "{{ ('x\n' * 9999) | indent(1000000) }}",
    "indent by a text": "{{ ('x\x0c' * 9999) | indent('x' * 1000000) }}",
    "tojson indent": "{{ [[1, 2], 3] | tojson(indent=1000000000) }}",
    "tojson separators": "{{ ([1] * 9999) | tojson(separators=('x' * 99999, ':')) }}",
    "wordwrap": "{{ ('x ' * 999999) | wordwrap(1) }}",
    "strftime": "{{ strftime_now('%c' * 99999) }}",
    "strftime width": "{{ strftime_now('%1000000000Y' * 999) }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "round": "{{ 123 | round(-1000000000) }}",
    "round up": "{{ 1 | round(100000000, 'ceil') }}",
    # filters and methods
    "replace": "{{ ('x' * 9999) | replace('x', 'y' * 999999) }}",
    "replace nothing": "{{ ('x' * 9999).replace('', 'y' * 999999) }}",
    "join": "{{ (['x' * 99999] * 99999) | join }}",
    "join by": "{{ range(99999) | join('x' * 99999) }}",
    "join method": "{{ ('x' * 99999).join(['y'] * 99999) }}",
    "join attribute": "{% set n = namespace(a='x' * 999999) %}{{ ([n] * 99999) | join(attribute='a') }}",
    "batch": "{{ [1] | batch(10000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(10000000000) | list }}",
    "list": "{{ ('x' * 9999999) | list | length }}",
    "lists": LOOPS + "{% set y = range(99999) | list %}" + ENDS,
    "split": "{{ ('x y ' * 2000000).split() | length }}",
    "split at": "{{ ('x,' * 2000000).split(',') | length }}",
    "splitlines": "{{ ('\x0c' * 8000000).splitlines() | length }}",
    "title": "{{ ('x y ' * 2000000) | title | length }}",
    "upper": "{{ ('ΐ' * 8000000) | upper | length }}",
    "escape": doubled("(ns.x ~ '<&') | e | replace('&', '&&&&&')"),
    "escape joined": "{% set a = '<' | e %}" + doubled("ns.x ~ (a + ns.x + '&&&&')"),
    "escaped times": "{{ ('<' | e) * 10000000000 }}",
    "escaped percent": "{{ ('%s' | safe) % ('&' * 9999999) }}",
    "map": "{{ range(99999) | map('string') | map('center', 99999) | list | length }}",
    "select": LOOPS + "{% set y = range(99999) | select('odd') | list %}" + ENDS,
    "select by a list": "{{ range(99999) | select('in', range(99999) | list) | list | length }}",
    "attribute path": "{{ (['0'] * 99999) | map(attribute='0.' * 9999 ~ '0') | list | length }}",
    "sort": "{% set a = 'x' * 999999 %}{{ range(99) | map('replace', '1', a) | sort | length }}" * 9,
    "sum of lists": "{{ ([[1] * 999] * 99999) | sum(start=[]) | length }}",
    "unique": "{{ range(0, 2305843009213693951 * 99999, 2305843009213693951) | unique | list | length }}",
    "dict of one hash": "{{ dict.fromkeys(range(0, 2305843009213693951 * 99999, 2305843009213693951)) | length }}",
    "int": "{{ ('f' * 9999999) | int(0, 16) }}",
    "int of digits": "{{ (('9' * 4200) | int) * (('9' * 4200) | int) }}",
    "strip": "{{ ('x' * 999999).strip('y' * 999999 ~ 'x') }}",
    "trim": "{{ ('x' * 999999) | trim('y' * 999999 ~ 'x') }}",
    "rfind": "{{ ('x' * 999999).rfind('y' ~ 'x' * 499999) }}",
    "find": LOOPS + "{{ ('x' * 30000).find('x' * 50 ~ 'y' ~ 'x' * 48) }}" + ENDS,
    "encode": "{{ ('x' * 9999999).encode('utf-32') | list | length }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') | length }}",
    "pprint": nested("''", "[ns.x, ns.x]") + "{{ ns.x | pprint }}",
    "urlize": "{{ ('www.x.org ' * 999999) | urlize | length }}",
    "filter block": "{% filter replace('x', 'y' * 9999999) %}{{ 'x' * 999 }}{% endfilter %}",
    "arguments": "{% macro f() %}{{ varargs | length }}{% endmacro %}{{ f(*('x' * 9999999)) }}",
    "name of an argument": "{% macro f() %}{% endmacro %}{{ f(**{'\x00' * 9999999: 1}) }}",
    "missing key": "{{ {}['\x00' * 9999999].x }}",
    "missing attribute": "{{ ({} | attr('\x00' * 9999999)).x }}",
    # what is in itself twice
    "lists in lists": nested("''", "[ns.x, ns.x]") + "{{ ns.x }}",
    "tojson": nested("''", "[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    "dicts in dicts": nested("''", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x | tojson }}",
    "equal": nested("''", "[ns.x, ns.x]") + "{% set a = ns.x %}" + nested("''", "[ns.x, ns.x]") + "{{ ns.x == a }}",
    "less": nested("''", "[ns.x, ns.x]") + "{% set a = ns.x %}" + nested("''", "[ns.x, ns.x]") + "{{ ns.x < a }}",
    "in": nested("''", "[ns.x, ns.x]") + "{% set a = ns.x %}" + nested("''", "[ns.x, ns.x]") + "{{ ns.x in [a] }}",
    "changed": "{% for y in [1, 2] %}" + nested("''", "[ns.x, ns.x]") + "{{ loop.changed(ns.x) }}{% endfor %}",
    "hash": nested("(1, 2)", "(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
    "hash looked up": nested("(1, 2)", "(ns.x, ns.x)") + "{{ {}[ns.x] }}",
    "hash got": nested("(1, 2)", "(ns.x, ns.x)") + "{{ {}.get(ns.x) }}",
    "hash unique": nested("(1, 2)", "(ns.x, ns.x)") + "{{ [ns.x] | unique | list }}",
    "deep tuple": nested("(1, 2)", "(ns.x,)", 99999) + "{{ {}.get(ns.x) }}",
    "deep list": nested("[]", "[ns.x]", 99999) + "{{ ns.x }}",
    "deep filters": nested("[1]", "ns.x | map('string')", 9999) + "{{ ns.x | list | length }}" + LOOPS * 2 + ENDS * 2,
    "namespaces": "{% set n = namespace() %}{% set n.a = n %}{{ n }}",
    # time
    "loops": LOOPS * 4 + "x" + ENDS * 4,
    "silent loops": LOOPS * 4 + ENDS * 4,
    "filtered loops": LOOPS * 2 + "{% for b in range(99999) if b < 0 %}{% endfor %}" + ENDS * 2,
    "large body": LOOPS + "{{ messages[0].content }}" * 500 + ENDS,
    "output": LOOPS + "x" * 9999 + ENDS,
    "output of a macro": "{% macro f() %}" + LOOPS + "x" * 9999 + ENDS + "\U0001f600{% endmacro %}{{ f() }}",
    "set block": "{% set y %}" + LOOPS + "x" * 9999 + ENDS + "{% endset %}{{ y | length }}",
    "recursion": "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(50) }}",
    "recursion that ends": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
    "recursive loop": "{% for a in [[[]]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "caller": "{% macro f() %}{% call f() %}{% endcall %}{{ caller() }}{% endmacro %}{% call f() %}{% endcall %}",
    "cycler": "{% set c = cycler('x' * 4000000, 'y') %}" + LOOPS + "{{ c.next() }}" + ENDS,
    "joiner": "{% set j = joiner('x' * 4000000) %}" + LOOPS + "{{ j() }}" + ENDS,
    "search": BIG + LOOPS + "{% set y = 'y' in big %}" + ENDS,
    "search in a list": "{% set y = [1] * 999999 %}" + LOOPS * 2 + "{% set z = 2 in y %}" + ENDS * 2,
    "count in a list": "{% set y = [1] * 999999 %}" + LOOPS * 2 + "{% set z = y.count(2) %}" + ENDS * 2,
    "compare": BIG + "{% set b = big ~ '' %}" + LOOPS * 2 + "{% set z = big == b %}" + ENDS * 2,
    "lower": BIG + LOOPS + "{% set z = big is lower %}" + ENDS,
    "nan": "{% set n = 'nan' | float %}{{ [1] | batch(n) | list }}{{ 'x' * 10000000000 }}",
    "blocks": "".join(
        f"{{% block a{i} %}}{{{{ self.a{i + 1}() }}}}{{{{ self.a{i + 1}() }}}}{{% endblock %}}" for i in range(50)
    ),
    "sum of numbers": LOOPS + "{% set y = ([1] * 999999) | sum %}" + ENDS,
    "autoescape": "{% autoescape true %}{{ '&' * 9999999 }}{% endautoescape %}",
    # the template itself
    "brackets": "{{ " + "[" * 90000,
    "closed brackets": "{{ " + "[" * 40000 + "]" * 40000 + " }}",
    "nots": "{{ " + "not " * 24000 + "x }}",
    "signs": "{{ " + "-" * 90000 + "1 }}",
    "dots": "{{ x" + ".x" * 45000 + " }}",
    "sum": "{{ x" + " + x" * 24000 + " }}",
    "pipes": "{{ x" + "|e" * 45000 + " }}",
    "ifs in ifs": "{% if a %}" * 4500 + "{% endif %}" * 4500,
    "elifs": "{% if a %}" + "{% elif b %}" * 8000 + "{% endif %}",
    "loops in loops": "{% for a in b %}" * 3400 + "{% endfor %}" * 3400,
    "a long list": "{{ [" + "x, " * 32000 + "] }}",
    "many expressions": "{{ x }}" * 13000,
    "many macros": "".join(f"{{% macro a{i}() %}}{{% endmacro %}}" for i in range(2500)),
    "names and conditions": "".join(f"{{% set a{i} = 1 %}}" for i in range(900)) + "{% if a %}{% endif %}" * 900,
    "megabytes": "x" * 5000000,
    "megabytes of expressions": "{{ x }}" * 1000000,
    "a long number": "{{ 0x" + "f" * 90000 + " // 3 }}",
    "a long text": "{{ '" + "\\\\" * 45000 + "' * 9999999 }}",
    "one hash": "{{ {" + ", ".join(f"{i * 2305843009213693951}: 1" for i in range(2000)) + "} }}",
}  # fmt: skip


class NoTokenizer:
    """All that a chat template asks of a tokenizer."""

    special_tokens_map: Mapping[str, str] = MappingProxyType({})


def ended(template: str, chat: Sequence[Mapping[str, Any]]) -> str:
    """The end of an attempt: the error's field and text, or nothing."""
    try:
        ChatTemplate(NoTokenizer(), template).render(chat, max_chars=4_000_000, variables={})
    except InvalidParameter as error:
        return f"{error.field}: {error.limit}"
    return ""


def main() -> None:
    """Prints {name: end} and how much larger the process became, in bytes."""
    chat = [{"role": "user", "content": "hi"}]
    ended("{{ [messages[0].content ~ '!', {'a': 1}] | tojson }}", chat)  # with all that this imports
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + len(ATTACKS),) * 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ends = {name: ended(template, chat) for name, template in ATTACKS.items()}
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([ends, grown * (1 if sys.platform == "darwin" else 1024)]))


if __name__ == "__main__":
    main()

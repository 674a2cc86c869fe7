"""Chat templates that take all memory or all time there is, unless something stops them.

Run as a program, it tries them all, with a second of the processor's time for each.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
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


READ = tomllib.loads(Path(__file__).with_name("template_attacks.toml").read_text(encoding="utf-8"))
WORDS = {"LOOPS": LOOPS, "ENDS": ENDS, "BIG": BIG}
ATTACKS = {name: re.sub("LOOPS|ENDS|BIG", lambda word: WORDS[word[0]], template) for name, template in READ.items()} | {
    # made of parts, or too long to be written
    "plus": doubled("ns.x + ns.x"),
    "tilde": doubled("ns.x ~ ns.x"),
    "tilde of a list": doubled("[ns.x, ns.x] ~ ''"),
    "format repr": nested("''", "[ns.x, ns.x]") + "{{ '{0!r}'.format(ns.x) }}",
    "escape": doubled("(ns.x ~ '<&') | e | replace('&', '&&&&&')"),
    "escape joined": "{% set a = '<' | e %}" + doubled("ns.x ~ (a + ns.x + '&&&&')"),
    "sort": "{% set a = 'x' * 999999 %}{{ range(99) | map('replace', '1', a) | sort | length }}" * 9,
    "pprint": nested("''", "[ns.x, ns.x]") + "{{ ns.x | pprint }}",
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
    "large body": LOOPS + "{{ messages[0].content }}" * 500 + ENDS,
    "output": LOOPS + "x" * 9999 + ENDS,
    "output of a macro": "{% macro f() %}" + LOOPS + "x" * 9999 + ENDS + "\U0001f600{% endmacro %}{{ f() }}",
    "set block": "{% set y %}" + LOOPS + "x" * 9999 + ENDS + "{% endset %}{{ y | length }}",
    "blocks": "".join(
        f"{{% block a{i} %}}{{{{ self.a{i + 1}() }}}}{{{{ self.a{i + 1}() }}}}{{% endblock %}}" for i in range(50)
    ),
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

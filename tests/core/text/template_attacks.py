"""Chat templates that take all memory or all time there is, unless something stops them.

Run as a program in the folder of the tests, it tries them all, with a second of the processor's time for each.
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

from support.data import spelled

from asyncengine.errors import InvalidParameter
from asyncengine.text.chat_template import ChatTemplate

WORDS = {
    "LOOPS": "{% for a in range(99999) %}",
    "ENDS": "{% endfor %}",
    "BIG": "{% set big = 'x' * 4000000 %}",
    "LISTS": "{% set ns = namespace(x='') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
    "TUPLES": "{% set ns = namespace(x=(1, 2)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
}
READ = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ATTACKS = {name: re.sub("|".join(WORDS), lambda word: WORDS[word[0]], spelled(parts)) for name, parts in READ.items()}


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

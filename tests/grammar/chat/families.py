"""Today's families of models as they write an answer: turns, reasoning and calls with their real marks, read from
`families.toml`, and every format of calls in one template's turns.

`python -m pytest tests/grammar/chat/test_families.py` says of each which format is recognised, held to and taken apart.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Family:
    """One family's template in parts."""

    form: str
    """The format of its calls."""
    turn: tuple[str, str, str]
    """Text before the user's, text between that and the answer, and text behind the answer."""
    calls: str = ""
    """Writes the calls of the message `m`; empty: the template leaves them out."""
    think: tuple[str, str] | None = None
    """The marks around the reasoning."""
    prompt: str = ""
    """Ends a prompt, behind the beginning of the answer."""
    said: str = ""
    """The template's text about tools."""
    special: tuple[str, ...] = ()
    one: bool = False
    """There is one call at most."""

    @property
    def template(self) -> str:
        before, between, behind = map(nl, self.turn)
        begin, end = map(nl, self.think or ("", ""))
        thought = "{% if m.reasoning_content %}" + f"{begin}{{{{ m.reasoning_content }}}}{end}{{% endif %}}"
        answer = f"{thought if self.think else ''}{{{{ m.content or '' }}}}{{% if m.tool_calls %}}{self.calls}"
        turns = f"{{% if m.role == 'user' %}}{before}{{{{ m.content }}}}{between}{{% else %}}{answer}{{% endif %}}"
        tools = f"{{% if tools %}}{self.said}{{{{ tools | tojson }}}}{{% endif %}}"
        prompt = f"{{% if add_generation_prompt %}}{nl(self.prompt)}{{% endif %}}"
        return f"{tools}{{% for m in messages %}}{turns}{behind}{{% endif %}}{{% endfor %}}{prompt}"


@dataclass(frozen=True)
class Case:
    """A format of calls."""

    calls: str
    special: tuple[str, ...] = ()
    """The names that are special tokens in the tokenizer."""
    raw: bool = False
    """Strings stand as they are."""
    quote: str = ""
    """The text that no string may contain."""
    one: bool = False
    """There is one call at most."""

    @property
    def template(self) -> str:
        return FRAME.replace("CALLS", self.calls)


FRAME = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% if m.tool_calls %}CALLS{% endif %}<|im_end|>
{% endfor %}{% if tools %}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def nl(text: str) -> str:
    """Newlines that the template's own trimming leaves alone."""
    return text.replace("\n", "{{ '\\n' }}")


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the turns and calls it names, lists as tuples."""
    named = {"turn": _READ["turns"].get(row.get("turn")), "calls": nl(_READ["calls"].get(row.get("calls"), ""))}
    row = row | {key: value for key, value in named.items() if value is not None}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


_READ = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
FAMILIES = {name: Family(**_filled(row)) for name, row in _READ["families"].items()}
"""Families by the names that `docs/howto/tools_and_agents.md` has for them."""
CASES = {name: Case(**_filled(row)) for name, row in _READ["cases"].items()}
"""Formats by their names; some keys add a word on the tokenizer."""
TEMPLATES: dict[str, str] = _READ["templates"]
SIGNS: dict[str, tuple[str, list[str]]] = _READ["signs"]
"""Families whose templates may render no calls: what their text says, and which special tokens there are."""

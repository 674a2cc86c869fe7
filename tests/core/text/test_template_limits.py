"""Chat templates from strangers: they end in an error that names them, soon, and cost nobody else anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from core.text.chats import CHATML, TOOL, USER, Chat, refuse, with_template
from core.text.gguf_zoo import published
from core.text.template_attacks import ATTACKS, NoTokenizer, ended
from support.gguf_metadata import byte_level_metadata
from transformers import PreTrainedTokenizerFast

from asyncengine.assembly.gguf_text import load_gguf_tokenizer
from asyncengine.errors import InvalidParameter
from asyncengine.grammar.chat.detect import find_tool_format
from asyncengine.text.chat_template import ChatTemplate

MIB = 2**20
ONLY_WHEN_ASKED = "{% if messages[0].content == 'go' %}ATTACK{% else %}{{ messages[0].content }}{% endif %}"


@pytest.mark.skipif(sys.platform == "win32", reason="limits and peaks of a process are measured as on Unix")
def test_every_attack_ends_in_an_error_within_a_second_and_64_mib() -> None:
    """One process for all of them, which is killed when they take more than a second of CPU time each."""
    program, tests = [sys.executable, "-m", "core.text.template_attacks"], Path(__file__).parents[2]
    run = subprocess.run(program, capture_output=True, text=True, check=False, cwd=tests)
    assert run.returncode == 0, run.stderr[-2000:]
    ends, grown = json.loads(run.stdout)
    assert list(ends) == list(ATTACKS)
    assert [name for name, end in ends.items() if not end] == []
    assert grown <= 64 * MIB, f"{grown / MIB:.0f} MiB"


@pytest.mark.parametrize("name", ["text times", "loops", "lists in lists", "recursion", "power"])
def test_a_template_that_waits_for_its_time_is_stopped_then(name: str) -> None:
    """The error names the template and the limit; the next chat is rendered as ever."""
    template = ChatTemplate(NoTokenizer(), ONLY_WHEN_ASKED.replace("ATTACK", ATTACKS[name]))
    for _ in range(2):
        with pytest.raises(InvalidParameter, match=r"^chat_template: the model's chat template \w+ .* was stopped"):
            template.render([{"role": "user", "content": "go"}], max_chars=1000, variables={})
        assert template.render([USER], max_chars=1000, variables={}) == "hi"


def test_nothing_of_a_stopped_template_stays_with_its_error() -> None:
    template = ChatTemplate(NoTokenizer(), ONLY_WHEN_ASKED.replace("ATTACK", ATTACKS["loops"]))
    with pytest.raises(InvalidParameter) as caught:
        template.render([{"role": "user", "content": "go"}], max_chars=1000, variables={})
    assert caught.value.__context__ is None


def test_a_template_in_a_gguf_file_is_stopped_too() -> None:
    metadata: dict[str, Any] = {
        **byte_level_metadata(published("qwen2"), "qwen2"),
        "tokenizer.chat_template": "{{ 'x' * 10000000000 }}",
    }
    assert refuse(load_gguf_tokenizer(metadata), [USER]).field == "chat_template"


def test_a_tokenizer_of_transformers_renders_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", None)
    assert with_template(CHATML).render_chat([USER]).endswith("<|im_start|>assistant\n")


def test_an_attack_that_waits_for_tools_ends_the_search_for_their_format() -> None:
    """It would take its time again for each of the chats that are tried."""
    tokenizer = with_template("{{ messages[0].content }}{% if tools %}" + ATTACKS["loops"] + "{% endif %}")
    with pytest.raises(InvalidParameter) as caught:
        find_tool_format(tokenizer)
    assert caught.value.field == "chat_template"
    assert tokenizer.render_chat([USER]) == "hi"


def test_long_chats_are_within_the_limits() -> None:
    """Limits grow with the chat: also where a template looks through all messages for each of them."""
    looks_ahead = (
        "{% for m in messages %}{% set ns = namespace(n=0) %}{% for other in messages[loop.index:] %}"
        "{% if other.role == m.role and 'x' in other.content %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
        "{{ m.content | trim }}{{ ns.n }}\n{% endfor %}"
    )
    chat: Chat = [{"role": "user", "content": f"message {i} " * 10} for i in range(1000)]
    assert with_template(looks_ahead).render_chat(chat).count("\n") == 1000
    wide: Chat = [
        {"role": "user", "content": "\u4f60\u597d" * 200_000},
        {"role": "assistant", "content": " \U0001f600" * 100_000},
    ]
    steps = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content.strip().split('</think>')[-1] | trim + '\n' }}"
        "{% endfor %}"
    )
    assert len(with_template(steps).render_chat(wide)) > 600_000
    tiny: Chat = [{"role": "user", "content": ""}] * 20_000
    assert with_template(CHATML).render_chat(tiny, [TOOL]).count("<|im_end|>") == 20_000


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{% include 'x' %}", "no Include"),
        ("{{ x | pprint }}", "No filter named 'pprint'"),
        ("x" * 98_305, "98,305 characters, over 98,304"),
        ("{{ x }}" * 3400, "more than 10,000 tokens"),
    ],
)
def test_what_is_no_template_for_chats_is_named(template: str, complaint: str) -> None:
    end = ended(template, [USER])
    assert end.startswith("chat_template: ")
    assert complaint in end

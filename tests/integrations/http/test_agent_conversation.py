"""An agent's conversation, replayed over HTTP: every turn finds what was said before it, whatever changes around it.

The conversation is of the shape that Claude Code sends to /v1/messages: a long system prompt below a line whose value
changes with every request, a dozen tools, thoughts, calls of tools with long results, now and then a user's word, and
a `cache_control` mark on the newest message alone. Its model's turns are written beforehand, so any model replays it;
here it is a tiny one with random weights. Repeated tokens of a prompt are those up to where it differs from the prompt
before it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from asyncengine import DEMO_MODEL, AsyncEngine
from asyncengine.integrations.http import app
from asyncengine.integrations.http.dialects import anthropic_messages
from asyncengine.integrations.http.fields import Fields

MARK = {"cache_control": {"type": "ephemeral"}}
TEXT = (
    "the test of parser module returns value error when list is empty and file has no line with name in table so call "
    "it again after reading config path from server request state cache token page index limit"
)
WORDS = TEXT.split()
TOOL_NAMES = (
    "Read", "Edit", "Write", "Bash", "Grep", "Glob", "LS", "Task", "WebFetch", "TodoWrite", "NotebookEdit", "KillShell",
)  # fmt: skip


class Turn(NamedTuple):
    """Counts of one request of a replay."""

    prompt: int
    repeated: int
    cached: int


def requests(turns: int, rules: int, lines: int) -> Iterator[dict[str, Any]]:
    """The body of each request. `rules` of the system prompt, and the most `lines` of a tool's result."""
    rng = random.Random("agent/0")

    def said(low: int, high: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    system = "You are an agent for software.\n" + "\n".join(f"{n}. {said(8, 20)}." for n in range(rules))
    path = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
    tools = [{"name": name, "description": said(20, 60), "input_schema": path} for name in TOOL_NAMES]
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": said(10, 30)}]}]
    for turn in range(turns):
        head = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cc_entrypoint=cli; cch={rng.getrandbits(20):05x};"
        newest = {**messages[-1], "content": [*messages[-1]["content"][:-1], messages[-1]["content"][-1] | MARK]}
        yield {
            "model": "any", "max_tokens": 4, "temperature": 0, "tools": tools, "messages": [*messages[:-1], newest],
            "system": [{"type": "text", "text": head}, {"type": "text", "text": system} | MARK],
        }  # fmt: skip
        calls = [
            {
                "type": "tool_use", "id": f"toolu_{turn:04}{number}", "name": rng.choice(TOOL_NAMES),
                "input": {"path": f"src/{rng.choice(WORDS)}.py", "text": said(0, 30)},
            }
            for number in range(rng.choice((0, 1, 1, 1, 1, 2, 3)))
        ]  # fmt: skip
        thought = {"type": "thinking", "thinking": said(5, 60), "signature": "unsigned"}
        answer = [thought, {"type": "text", "text": said(3, 40)}, *calls]
        results = [
            {
                "type": "tool_result", "tool_use_id": call["id"],
                "content": "\n".join(f"{n:>5}\t{said(2, 12)}" for n in range(rng.randint(1, lines))),
            }
            for call in calls
        ]  # fmt: skip
        word = {"type": "text", "text": said(5, 40)}
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": results or [word]})


async def replay(engine: AsyncEngine, bodies: Iterator[dict[str, Any]]) -> list[Turn]:
    """Send the requests one after the other, and count."""
    transport = httpx.ASGITransport(app(engine, aliases={"*": engine.info.name}))
    done, before = list[Turn](), list[int]()
    async with httpx.AsyncClient(transport=transport, base_url="http://agent", timeout=600) as client:
        for body in bodies:
            turn = anthropic_messages.read(Fields(body))
            assert turn.messages is not None
            ids = engine.tokenize(turn.messages, tools=turn.chat["tools"])
            repeated = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ids, before, strict=False))))
            before = ids
            answer = await client.post("/v1/messages", json=body)
            usage = answer.raise_for_status().json()["usage"]
            prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
            assert prompt == len(ids), "counted is not what is computed"
            done.append(Turn(prompt, repeated, usage["cache_read_input_tokens"]))
    return done


def make_model(folder: Path, context: int) -> Path:
    """A llama of one small layer with random weights, and the demo model's tokenizer and template."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"], hidden_size=64,
        intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=context, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((DEMO_MODEL / name).read_bytes())
    return folder


async def test_all_that_is_said_again_is_cached(tmp_path: Path) -> None:
    model = make_model(tmp_path, context=16384)
    async with await AsyncEngine.from_pretrained(model, show_progress=False, num_threads=1) as engine:
        done = await replay(engine, requests(12, rules=20, lines=6))
        computed = engine.stats().computed_tokens
    repeated = sum(turn.repeated for turn in done)
    assert repeated > 10 * done[0].prompt
    assert sum(min(turn.cached, turn.repeated) for turn in done) >= 0.99 * repeated
    assert all(turn.repeated - turn.cached < 16 for turn in done), "pages are whole"
    assert computed < done[-1].prompt + 12 * (16 + 4), "the newest words, and a page's rest in each turn"

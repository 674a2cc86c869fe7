"""Tokenizers of single bytes with the templates of several families, and an oracle for grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llguidance
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncengine.grammar import Grammar
from asyncengine.grammar.chat import ChatPlanner
from asyncengine.grammar.llguidance_backend import with_rules
from asyncengine.text.tokenizer import TextTokenizer

from .families import TEMPLATES

HERMES, LLAMA, MISTRAL, MARKED, JSON, SILENT = (
    TEMPLATES[name] for name in ("hermes", "llama", "mistral", "marked", "json", "silent")
)
THINKING = HERMES.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n{% if enable_thinking is defined "
    "and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}")  # fmt: skip
COMPACT = MISTRAL.replace("[TOOL_CALLS] [", "[TOOL_CALLS][")
LISTED = JSON.replace("{% for c in m.tool_calls -%}", "<|calls|>[{% for c in m.tool_calls -%}").replace(
    "}}}{% endfor %}", "}}}{% if not loop.last %}, {% endif %}{% endfor %}]"
)

TURNS = ("<|im_start|>", "<|im_end|>")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
ADDRESS = {"name": "add_address", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}


def tokenizer(template: str | None, special: Sequence[str] = TURNS, added: Sequence[str] = ()) -> TextTokenizer:
    """One token for each byte, `special` tokens, and `added` ones that are ordinary text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["</s>", *special])
    raw.add_tokens([AddedToken(name, special=False, normalized=False) for name in added])
    hf = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    hf.chat_template = template
    return TextTokenizer(hf)


class Oracle:
    """Tells what a grammar accepts, one token after the other."""

    def __init__(self, text: TextTokenizer) -> None:
        table = text.table
        self._encode = text.encode
        self.eos_token_id = text.eos_token_id
        self.bos_token_id = None
        self.tokens = [table.token_bytes(i) for i in range(table.size)]
        self.special_token_ids = sorted(table.special_ids)
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), eos_token=[text.eos_token_id])
        self._compiled: dict[Grammar, Any] = {}

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError
        return self._encode(text, False)

    def matcher(self, grammar: Grammar) -> Any:
        """A matcher of its own; a grammar is compiled once."""
        if grammar not in self._compiled:
            assert grammar.kind == "lark"
            found = llguidance.LLMatcher(self._tokenizer, with_rules(grammar)[0], log_level=0)
            assert not found.is_error(), f"{found.get_error()}\n{grammar.text}"
            self._compiled[grammar] = found
        return self._compiled[grammar].deep_copy()

    def refused_at(self, grammar: Grammar, text: str) -> str | None:
        """The rest of `text` that is not allowed; "" if only its end is not allowed there; None if it is accepted."""
        matcher = self.matcher(grammar)
        ids = self(text)
        for i, token in enumerate(ids):
            if not matcher.consume_token(token):
                return b"".join(self.tokens[rest] for rest in ids[i:]).decode("utf-8", "replace")
        return None if matcher.is_accepting() else ""

    def accepts(self, grammar: Grammar | None, text: str) -> bool:
        return grammar is None or self.refused_at(grammar, text) is None

    def forced(self, grammar: Grammar, text: str) -> str:
        """The continuation that must follow `text`."""
        matcher = self.matcher(grammar)
        for token in self(text):
            assert matcher.consume_token(token), text
        return bytes(matcher.compute_ff_bytes()).decode("utf-8", "replace")


class Model:
    """A tokenizer with a template: the planner of its chats, and the oracle of their grammars."""

    def __init__(self, template: str, special: Sequence[str] = TURNS) -> None:
        text = tokenizer(template, special)
        self.planner, self.oracle = ChatPlanner(text), Oracle(text)

    def judge(self, grammar: Grammar | None, right: Sequence[str], wrong: Sequence[str]) -> None:
        """Raises `AssertionError` where `grammar` does not accept a `right` text or accepts a `wrong` one."""
        assert grammar is not None
        for text in right:
            assert self.oracle.refused_at(grammar, text) is None, text
        for text in wrong:
            assert self.oracle.refused_at(grammar, text) is not None, text

"""Renders chats with a model's template: sandboxed, with checked inputs, bounded and with typed errors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from asyncengine.errors import InvalidParameter
from asyncengine.text.chat_messages import Budget, TemplateForm, check_messages, check_tools, plain

RESERVED = frozenset(
    {
        "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
        "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs",
    }
)  # fmt: skip
"""Arguments of transformers' `apply_chat_template`: no variables of a template, whoever renders it."""
TOOLS = ("tools", "xml_tools")
"""What templates call them; the second is SmolLM3's name, for functions without a wrapper."""
PROBE = "Xprobe7"
PROBE_CALL = {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": {"probe_key": 1}}}


class ChatTemplate:
    """One template text of a tokenizer.

    Rendering happens in the tokenizer: jinja2's ImmutableSandboxedEnvironment, with the environment's usual filters. On
    top of that, only plain JSON data gets in, only variables the template really reads can be set, and the sizes of
    input and output are bounded. A template comes with the model (or from the host), never from a request: a template
    may loop for long, so callers render off the event loop.

    Which form of contents and tool arguments the template reads is found out by rendering samples, once.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        from asyncengine.text.template_environment import template_environment

        self._tokenizer = tokenizer
        self._template = template
        self.variables = template_variables(template)
        """Names the template reads from outside."""
        reserved = RESERVED | (set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"documents"})
        reserved |= {*tokenizer.special_tokens_map, *template_environment().globals}
        self._tools = next((name for name in TOOLS if name in self.variables), None)
        self.settable = sorted(self.variables - reserved)
        """Those a caller may set by keyword."""
        self.form = self._probe_form()

    def render(
        self, messages: object, tools: object = None, *, max_chars: int, variables: Mapping[str, Any], **flags: bool
    ) -> str:
        """The chat as text. `flags` are `add_generation_prompt` and `continue_final_message`.

        Raises `InvalidParameter` naming the faulty message, tool or variable, or with the template's own complaint.
        """
        budget = Budget(max_chars)
        chat = check_messages(messages, self.form, budget)
        inputs = {name: self._variable(name, value, budget) for name, value in variables.items()}
        if tools is not None and (checked := check_tools(tools, budget)):
            if self._tools is None:
                raise InvalidParameter("tools", "this model's chat template does not read tools")
            usual = self._tools == "tools"
            inputs[self._tools] = checked if usual else [tool.get("function", tool) for tool in checked]
        try:
            text = self._render(chat, **inputs, **flags)
        except Exception as error:  # a template is a program: it can fail in any way, and only this request is affected
            complaint = str(error) or type(error).__name__
            raise InvalidParameter("messages", f"the chat template refused them: {complaint[:500]}") from error
        if len(text) > max_chars:
            raise InvalidParameter("messages", f"rendered to {len(text)} characters, over max_chat_chars={max_chars}")
        return text

    def _render(self, chat: list[dict[str, Any]], **inputs: Any) -> str:
        return str(self._tokenizer.apply_chat_template(chat, chat_template=self._template, tokenize=False, **inputs))

    def _variable(self, name: str, value: object, budget: Budget) -> Any:
        if name not in self.settable:
            known = ", ".join(self.settable) or "none"
            raise InvalidParameter(name, f"this model's chat template has no such variable (it reads: {known})")
        return plain(name, value, budget)

    def _probe_form(self) -> TemplateForm:
        text = self._attempt([{"role": "user", "content": PROBE}])
        listed = self._attempt([{"role": "user", "content": [{"type": "text", "text": PROBE}]}])
        # a template that prints a list as Python would, prints the block's keys as well
        blocks = PROBE in listed and "'type'" not in listed and '"type"' not in listed
        as_dict, needs_content = self._attempt_call(PROBE_CALL["function"])
        as_text, needs_content_too = self._attempt_call({"name": "f", "arguments": '{"probe_key": 1}'})
        reads_dict = "probe_key" in as_dict and "'probe_key'" not in as_dict
        return TemplateForm(
            blocks=blocks,
            strings=PROBE in text or not blocks,
            arguments_as_text=not reads_dict and '{"probe_key": 1}' in as_text,
            needs_content=needs_content or needs_content_too,
        )

    def _attempt_call(self, function: object) -> tuple[str, bool]:
        """A rendering with this function call, and whether the template failed on the message having no content."""
        user = {"role": "user", "content": PROBE}
        call = {"role": "assistant", "tool_calls": [{**PROBE_CALL, "function": function}]}
        answer = {"role": "tool", "name": "f", "tool_call_id": PROBE_CALL["id"], "content": "r"}
        if text := self._attempt([user, call, answer]):
            return text, False
        text = self._attempt([user, {**call, "content": ""}, answer])
        return text, bool(text)

    def _attempt(self, chat: list[dict[str, Any]]) -> str:
        try:
            return self._render(chat)
        except Exception:  # the template cannot read this form: that is the answer
            return ""


def template_variables(template: str) -> frozenset[str]:
    """Names a template reads from outside. Raises `InvalidParameter` if it is not a valid template."""
    from jinja2 import TemplateError, meta

    from asyncengine.text.template_environment import template_environment

    try:
        tree = template_environment().parse(template)
    except TemplateError as error:
        raise InvalidParameter("chat_template", f"is not a valid template: {error}") from error
    return frozenset(meta.find_undeclared_variables(tree))

"""Renders chats with a model's template: sandboxed, with checked inputs, bounded and with typed errors."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from asyncengine.errors import InvalidParameter
from asyncengine.text.chat_messages import NAMES, Budget, TemplateForm, check_messages, check_tools, plain
from asyncengine.text.media import ImageParts

logger = logging.getLogger("asyncengine")

if TYPE_CHECKING:
    from jinja2 import Template

    from asyncengine.text.template_environment import TemplateEnvironment

RESERVED = frozenset(NAMES["reserved"])
Rewrite = Callable[[list[dict[str, Any]], list[Any] | None], tuple[list[dict[str, Any]], list[Any] | None]]
TOOLS = ("tools", "xml_tools")
"""Names of the tools in templates; the second is SmolLM3's, for functions without a wrapper."""
PROBE = "Xprobe7"
PROBE_CHAT = ({"role": "user", "content": PROBE}, {"role": "assistant", "content": "Xanswer7"})
PROBE_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
PROBE_CALL = {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": {"probe_key": 1}}}


class ChatTemplate:
    """One template text of a tokenizer.

    Whatever the tokenizer is, the template runs in `TemplateEnvironment`: sandboxed, and within limits on its work and
    on what it makes. Only plain JSON data gets in, only variables the template really reads do, and the sizes
    of input and output are bounded. A template comes with the model (or from the host), never from a request.

    Which form of contents and tool arguments the template reads is found out by rendering samples, once.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        environment, self._compiled = _compiled(template)
        self._source = template
        self._special = dict(tokenizer.special_tokens_map)
        self.variables = frozenset(environment.reads)
        """Names the template reads from outside."""
        self._reserved = RESERVED | self._special.keys() | environment.globals.keys()
        self._tools = next((name for name in TOOLS if name in self.variables), None)
        self.reads_tools = self._tools is not None
        self._warned = False
        self.settable = sorted(self.variables - self._reserved)
        """Variables that a caller may set by keyword."""
        self.form = self._probe_form()

    def render(
        self, messages: object, tools: object = None, *, max_chars: int, variables: Mapping[str, Any],
        images: ImageParts | None = None, rewrite: Rewrite | None = None, **flags: bool,
    ) -> str:  # fmt: skip
        """The chat as text. `flags` are `add_generation_prompt` and `continue_final_message`. `images`: collects the
        chat's pictures, which are refused without it. `rewrite`: makes of the checked messages and tools those that the
        template gets.

        Raises `InvalidParameter` naming the faulty message, tool or variable, or with the template's own complaint.
        """
        budget = Budget(max_chars, images=images)
        chat = check_messages(messages, self.form, budget)
        inputs = {name: plain(name, value, budget) for name, value in variables.items() if self._reads(name)}
        checked = None if tools is None else check_tools(tools, budget)
        if rewrite is not None:
            chat, checked = rewrite(chat, checked)
        if checked:
            if self._tools is None:
                limit = "this model's chat template does not read tools: tool_format= has the engine describe them, "
                raise InvalidParameter("tools", limit + "and chat_template= sets a template that does")
            usual = self._tools == "tools"
            inputs[self._tools] = checked if usual else [tool.get("function", tool) for tool in checked]
        try:
            text = self._render(chat, budget.used, **inputs, **flags)
        except InvalidParameter:
            raise
        except Exception as error:  # a template is a program: it can fail in any way, and only this request is affected
            complaint = str(error) or type(error).__name__
            raise InvalidParameter("messages", f"the chat template refused them: {complaint[:500]}") from error
        if len(text) > max_chars:
            raise InvalidParameter("messages", f"rendered to {len(text)} characters, over max_chat_chars={max_chars}")
        return text

    def _render(self, chat: list[dict[str, Any]], chars: int = 0, **inputs: Any) -> str:
        """Raises `InvalidParameter` for a template that goes over its limits, or whatever the template raises."""
        from asyncengine.text.template_environment import render
        from asyncengine.text.template_limits import OverLimit

        values = {"tools": None, "documents": None, "add_generation_prompt": False, **self._special, **inputs}
        continued = values.pop("continue_final_message", False)
        documents = values["documents"]
        if documents is not None and not all(isinstance(document, dict) for document in documents):
            raise TypeError("documents must be a list of dicts")
        try:
            return render(self._compiled, self._source, chat, values, chars=chars, continued=continued)
        except OverLimit as error:
            complaint = str(error)
        # outside of `except`: the traceback would keep the template's data alive
        raise InvalidParameter("chat_template", f"the model's chat template {complaint}, and was stopped")

    def _reads(self, name: str) -> bool:
        """Whether the template reads a variable. One that it does not read is a wish, as programs that serve many
        models send it to all of them; the log has the first. Raises `InvalidParameter` for a name of another's."""
        if name in self.settable:
            return True
        names = ", ".join(self.settable) or "none"
        if name in self._reserved:
            raise InvalidParameter(name, f"is no variable of a chat template (this one reads: {names})")
        if not self._warned:
            self._warned = True
            logger.warning("%s does nothing: this model's chat template reads no such variable (but %s)", name, names)
        return False

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
        except InvalidParameter:  # over a limit although there is next to nothing to render: no chat could be rendered
            raise
        except Exception:  # the template cannot read this form: that is the answer
            return ""


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> tuple[TemplateEnvironment, Template]:
    """The sandbox of a template, and the template in it, which any number of threads may render. Raises
    `InvalidParameter` if it is not a valid one."""
    from asyncengine.text.template_environment import MAX_TEMPLATE_CHARS, TemplateEnvironment

    if len(template) > MAX_TEMPLATE_CHARS:
        limit = f"the model's chat template has {len(template):,} characters, over {MAX_TEMPLATE_CHARS:,}"
        raise InvalidParameter("chat_template", limit)
    environment = TemplateEnvironment()
    try:
        return environment, environment.from_string(template)
    except Exception as error:  # the parser's and Python's compiler's complaints, and those of too deep a nesting
        complaint = str(error) or type(error).__name__
    raise InvalidParameter("chat_template", f"is not a valid template: {complaint[:500]}")

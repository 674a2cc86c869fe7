"""A chat template for gpt-oss out of files that have none, as Ollama's own have not: chats in its channels.

Source: OpenAI's description of the format (the harmony response format, 2025).
"""

from __future__ import annotations

from asyncengine.text.gguf.metadata import TokenizerHeader

_MARKS = frozenset(("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"))

TEMPLATE = """\
{%- macro kind(schema) -%}
  {%- if schema["enum"] -%}
    {%- for each in schema["enum"] %}{{ each | tojson }}{% if not loop.last %} | {% endif %}{% endfor -%}
  {%- elif schema["anyOf"] or schema["oneOf"] -%}
    {%- set kinds = schema["anyOf"] or schema["oneOf"] -%}
    {%- for each in kinds %}{{ kind(each) }}{% if not loop.last %} | {% endif %}{% endfor -%}
  {%- elif schema["type"] == "array" -%}
    {{ kind(schema["items"]) if schema["items"] else "any" }}[]
  {%- elif schema["type"] == "object" and schema["properties"] -%}
    {{ members(schema) }}
  {%- elif schema["type"] is string -%}
    {{ "number" if schema["type"] == "integer" else schema["type"] }}
  {%- elif schema["type"] -%}
    {{ schema["type"] | join(" | ") }}
  {%- else -%}any{%- endif -%}
{%- endmacro -%}
{%- macro members(schema) -%}
  {{ "{\\n" }}
  {%- for name, each in schema["properties"].items() -%}
    {%- if each["description"] %}{{ "// " + each["description"] | replace("\\n", "\\n// ") + "\\n" }}{% endif -%}
    {{ name }}{{ "" if name in (schema["required"] or []) else "?" }}: {{ kind(each) }},
    {%- if each["default"] is defined %}{{ " // default: " + each["default"] | tojson }}{% endif -%}
    {{ "\\n" }}
  {%- endfor -%}
  {{ "}" }}
{%- endmacro -%}
{{ "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\\n" }}
{{- "Knowledge cutoff: 2024-06\\n" }}
{%- if strftime_now is defined %}{{ "Current date: " + strftime_now("%Y-%m-%d") + "\\n" }}{% endif -%}
{{ "\\nReasoning: " + (reasoning_effort | default("medium", true)) }}
{{- "\\n\\n# Valid channels: analysis, commentary, final. Channel must be included for every message." }}
{%- if tools %}{{ "\\nCalls to these tools must go to the commentary channel: 'functions'." }}{% endif -%}
<|end|>
{%- set told = messages[0]["role"] in ("system", "developer") -%}
{%- if told or tools -%}
  <|start|>developer<|message|>
  {%- if told %}{{ "# Instructions\\n\\n" + messages[0]["content"] }}{% endif -%}
  {%- if told and tools %}{{ "\\n\\n" }}{% endif -%}
  {%- if tools -%}
    {{ "# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n" }}
    {%- for tool in tools -%}
      {%- set f = tool["function"] -%}
      {{ "// " + (f["description"] or "") | replace("\\n", "\\n// ") + "\\ntype " + f["name"] + " = (" }}
      {%- if f["parameters"] and f["parameters"]["properties"] %}_: {{ members(f["parameters"]) }}{% endif -%}
      {{ ") => any;\\n\\n" }}
    {%- endfor -%}
    } // namespace functions
  {%- endif -%}
  <|end|>
{%- endif -%}
{%- set last = namespace(called="") -%}
{%- set others = messages[1:] if told else messages -%}
{%- for message in others -%}
  {%- set role = message["role"] -%}
  {%- set thoughts = message["reasoning_content"] or message["reasoning"] or message["thinking"] -%}
  {%- if role == "tool" -%}
    {{ "<|start|>functions." + (message["name"] or last.called) + " to=assistant<|channel|>commentary<|message|>" }}
    {{- message["content"] if message["content"] is string else message["content"] | tojson }}<|end|>
  {%- elif role == "assistant" and message["tool_calls"] -%}
    {%- if thoughts %}{{ "<|start|>assistant<|channel|>analysis<|message|>" + thoughts + "<|end|>" }}{% endif -%}
    {%- if message["content"] -%}
      {{ "<|start|>assistant<|channel|>commentary<|message|>" + message["content"] + "<|end|>" }}
    {%- endif -%}
    {%- for call in message["tool_calls"] -%}
      {%- set f = call["function"] or call -%}
      {%- set last.called = f["name"] -%}
      {{ "<|start|>assistant<|channel|>commentary to=functions." + f["name"] + " <|constrain|>json<|message|>" }}
      {{- f["arguments"] if f["arguments"] is string else f["arguments"] | tojson }}<|call|>
    {%- endfor -%}
  {%- elif role == "assistant" -%}
    {{ "<|start|>assistant<|channel|>final<|message|>" + (message["content"] or "") + "<|end|>" }}
  {%- else -%}
    {{ "<|start|>" + role + "<|message|>" + message["content"] + "<|end|>" }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""
"""Of answers before, thoughts stay where a call followed them."""


def channel_template(header: TokenizerHeader) -> str | None:
    """For a vocabulary with the marks of channels; None: it has not all of them."""
    return TEMPLATE if _MARKS.issubset(header.tokens) else None

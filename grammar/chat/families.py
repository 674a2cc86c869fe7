"""Formats in which families of models write tool calls: one record for each. A new format is a new record."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from asyncengine.grammar.chat.formats import ToolFormat
from asyncengine.grammar.marks import NUMBER
from asyncengine.grammar.schema.arguments import Members

_FORMATS = (
    # a JSON object for each call
    ToolFormat("hermes", "<tool_call>", "\n", call_close="}\n</tool_call>", separator="\n", each=True,
        signs=("<tool_call>",)),
    ToolFormat("llama3", "<|python_tag|>", name_close='", "parameters": ', separator="; ", optional_trigger=True),
    ToolFormat("mistral", "[TOOL_CALLS]", " [", closing="]"),
    ToolFormat("json", list_for_several=True),
    ToolFormat("phi4_mini", "<|tool_call|>", "[", closing="]<|/tool_call|>", signs=("<|/tool|>",),
        others=(("functools[", ""),)),
    ToolFormat("granite", "<|tool_call|>", "[", closing="]", signs=("<|tool_call|>",),
        others=(("<tool_call>", "</tool_call>"),)),
    ToolFormat("granite_20b_fc", "<function_call>", " ", separator="\n", each=True, signs=("<function_call>",)),
    ToolFormat("internlm2", "<|action_start|><|plugin|>", "\n", name_close='", "parameters": ',
        call_close="}<|action_end|>", separator="\n", each=True, signs=("<|action_start|>", "<|plugin|>")),
    ToolFormat("longcat", "<longcat_tool_call>", "\n", call_close="}\n</longcat_tool_call>", separator="\n", each=True,
        signs=("<longcat_tool_call>",)),
    ToolFormat("jamba", "<tool_calls>", "[\n    ", separator=",\n    ", closing="\n]</tool_calls>"),
    ToolFormat("hunyuan_a13b", "<tool_calls>", "[", closing="]</tool_calls>"),
    ToolFormat("pangu", "<|tool_call_start|>", "[", closing="]<|tool_call_end|>"),
    ToolFormat("hyperclovax", "-> tool/function_call", "\n[", closing="]"),
    ToolFormat("xlam", opening="[", closing="]",
        others=(("```json", "```"), ("[TOOL_CALLS]", ""), ("<tool_call>", "</tool_call>"))),
    ToolFormat("nemotron", "<TOOLCALL>", "[", closing="]</TOOLCALL>", signs=("<TOOLCALL>",)),
    ToolFormat("gigachat", "<|message_sep|>\n\nfunction call<|role_sep|>\n", single=True),
    # a name, and a JSON object for the arguments
    ToolFormat("apertus", "<|tools_prefix|>", "[", '{"', '": ', closing="]<|tools_suffix|>"),
    ToolFormat("command", "<|START_ACTION|>", "[\n    ", f'{{"tool_call_id": "{NUMBER}", "tool_name": "',
        '", "parameters": ', separator=",\n    ", closing="\n]<|END_ACTION|>"),
    ToolFormat("command_r", "Action:", "\n```json\n[\n    ", '{\n        "tool_name": "',
        '",\n        "parameters": ', "\n    }", ",\n    ", "\n]```"),
    ToolFormat("deepseek_v3", "<｜tool▁calls▁begin｜>", "", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n", "\n```<｜tool▁call▁end｜>", "\n", "<｜tool▁calls▁end｜>",
        signs=("<｜tool▁calls▁begin｜>", "```")),
    ToolFormat("deepseek_v31", "<｜tool▁calls▁begin｜>", "", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>", "", "<｜tool▁calls▁end｜>", signs=("<｜tool▁calls▁begin｜>",)),
    ToolFormat("kimi_k2", "<|tool_calls_section_begin|>", "", "<|tool_call_begin|>functions.",
        f":{NUMBER}<|tool_call_argument_begin|>", "<|tool_call_end|>", "", "<|tool_calls_section_end|>",
        signs=("<|tool_call_argument_begin|>",), others=(("<|tool_call_begin|>", ""),), loose=("functions.",)),
    ToolFormat("plamo3", "<|plamo:begin_tool_requests:plamo|>", "",
        "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",
        "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
        "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>", "",
        "<|plamo:end_tool_requests:plamo|>"),
    ToolFormat("functionary", "<function=", "", "", ">", "</function>", "", each=True),
    ToolFormat("harmony", "<|channel|>commentary to=functions.", "", "", " <|constrain|>json<|message|>", "<|call|>",
        single=True),
    # an element for the function and for each parameter
    ToolFormat("qwen3_coder", "<tool_call>", "\n", "<function=", ">\n", "</function>\n</tool_call>", "\n", each=True,
        members=Members("<parameter=", ">\n", "\n</parameter>\n", "", "raw"), signs=("<tool_call>", "<parameter="),
        others=(("<function=", ""),)),
    ToolFormat("minicpm5", '<function name="', "", "", '">', "</function>", "\n", each=True,
        members=Members('<param name="', '">', "</param>", "", "raw", cdata=True)),
    ToolFormat("seed_oss", "<seed:tool_call>", "\n", "<function=", ">\n", "</function>\n</seed:tool_call>", "\n",
        each=True, members=Members("<parameter=", ">", "</parameter>\n", "", "raw")),
    ToolFormat("minimax_m2", "<minimax:tool_call>", "\n", '<invoke name="', '">\n', "</invoke>", "\n",
        "\n</minimax:tool_call>", members=Members('<parameter name="', '">', "</parameter>\n", "", "raw")),
    ToolFormat("deepseek_v32", "<｜DSML｜function_calls>", "\n", '<｜DSML｜invoke name="', '">\n',
        "</｜DSML｜invoke>", "\n", "\n</｜DSML｜function_calls>",
        members=Members('<｜DSML｜parameter name="', '" string="false">', "</｜DSML｜parameter>\n", "", "raw",
            '" string="true">')),
    ToolFormat("deepseek_v4", "<｜DSML｜tool_calls>", "\n", '<｜DSML｜invoke name="', '">\n',
        "</｜DSML｜invoke>", "\n", "\n</｜DSML｜tool_calls>",
        members=Members('<｜DSML｜parameter name="', '" string="false">', "</｜DSML｜parameter>\n", "", "raw",
            '" string="true">')),
    ToolFormat("step3", "<｜tool_calls_begin｜>", "\n",
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
        '">\n', "</steptml:invoke><｜tool_call_end｜>", "\n", "\n<｜tool_calls_end｜>",
        members=Members('<steptml:parameter name="', '">', "</steptml:parameter>\n", "", "raw"),
        loose=("function<｜tool_sep｜>",)),
    ToolFormat("glm", "<tool_call>", "", "", "\n", "</tool_call>", "\n", each=True,
        members=Members("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "", "raw")),
    ToolFormat("solar_open2", "<|tool_call:start|>", "", "", "\n", "<|tool_call:end|>", "\n", each=True,
        members=Members("<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>\n", "", "raw")),
    ToolFormat("hy3", "<tool_calls:opensource>", "\n", "<tool_call:opensource>", "<tool_sep:opensource>\n",
        "</tool_call:opensource>", "\n", "\n</tool_calls:opensource>",
        members=Members("<arg_key:opensource>", "</arg_key:opensource>\n<arg_value:opensource>",
            "</arg_value:opensource>\n", "", "raw")),
    # an expression
    ToolFormat("lfm2", "<|tool_call_start|>", "[", "", "(", ")", closing="]<|tool_call_end|>", members=Members(),
        signs=("<|tool_call_start|>",)),
    ToolFormat("olmo3", "<function_calls>", "\n", "", "(", ")", "\n", "\n</function_calls>", members=Members(),
        signs=("<function_calls>",)),
    ToolFormat("pythonic", "", "[", "", "(", ")", closing="]", members=Members(),
        others=(("<|python_start|>", "<|python_end|>"),)),
    ToolFormat("gemma4", "<|tool_call>", "", "call:", "{", "}<tool_call|>", "", each=True,
        members=Members("", ":", "", ",", "bare", quote='<|"|>')),
    ToolFormat("functiongemma", "<start_function_call>", "", "call:", "{", "}<end_function_call>", "", each=True,
        members=Members("", ":", "", ",", "bare", quote="<escape>"), signs=("<start_function_call>",)),
)  # fmt: skip

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        **{form.family: form for form in _FORMATS},
        "mistral-compact": ToolFormat("mistral", "[TOOL_CALLS]", "[", closing="]"),
        "mistral-args": ToolFormat(
            "mistral",
            "[TOOL_CALLS]",
            name_open="",
            name_close="[ARGS]",
            call_close="",
            separator="",
            each=True,
            loose=("[ARGS]",),
        ),
    }
)
"""The usual text of each family. What a model's own template writes goes before it: `detect.find_tool_format`."""

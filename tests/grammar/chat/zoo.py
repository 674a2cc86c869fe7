"""Templates of today's families, written anew from how they are documented to write calls; short, and nobody's own."""

from __future__ import annotations

from dataclasses import dataclass

FRAME = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% if m.tool_calls %}CALLS{% endif %}<|im_end|>
{% endfor %}{% if tools %}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
EACH = "{% for c in m.tool_calls %}CALL{% endfor %}"
LIST = "{% for c in m.tool_calls %}CALL{% if not loop.last %}BETWEEN{% endif %}{% endfor %}"
NAME, ARGS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
RAW = "{{ v if v is string else v | tojson }}"
ITEMS = "{% for k, v in c.function.arguments.items() %}ITEM{% endfor %}"
COMMAS = "{% for k, v in c.function.arguments.items() %}ITEM{% if not loop.last %}, {% endif %}{% endfor %}"
BARE = """{% macro w(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is mapping %}{{ '{' }}
{%- for k, x in v.items() %}{{- k }}:{{ w(x) }}{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}
{%- elif v is iterable %}[{% for x in v %}{{ w(x) }}{% if not loop.last %},{% endif %}{% endfor %}]
{%- else %}{{ v | tojson }}{% endif %}{% endmacro %}"""


@dataclass(frozen=True)
class Case:
    """A family: its template and the names that are special tokens in its tokenizer."""

    template: str
    special: tuple[str, ...] = ()
    raw: bool = False
    """Strings stand as they are."""
    quote: str = ""
    """The text that no string may contain."""
    one: bool = False
    """There is one call at most."""


def frame(calls: str) -> str:
    return FRAME.replace("CALLS", calls)


def each(call: str, between: str = "") -> str:
    return frame(LIST.replace("CALL", call).replace("BETWEEN", between))


def listed(begin: str, call: str, between: str, end: str) -> str:
    return frame(begin + LIST.replace("CALL", call).replace("BETWEEN", between) + end)


def nl(text: str) -> str:
    """Newlines that the template's own trimming leaves alone."""
    return text.replace("\n", "{{ '\\n' }}")


def xml(head: str, item: str, end: str) -> str:
    return nl(head + ITEMS.replace("ITEM", item) + end)


DSML_KEY = "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
DSML_CALL = xml(f'<｜DSML｜invoke name="{NAME}">\n', f"{DSML_KEY}{RAW}</｜DSML｜parameter>\n", "</｜DSML｜invoke>")


def dsml(noun: str) -> str:
    return listed(nl(f"\n\n<｜DSML｜{noun}>\n"), DSML_CALL, nl("\n"), nl(f"\n</｜DSML｜{noun}>"))


def gemma(begin: str, end: str, quote: str) -> str:
    items = COMMAS.replace(", ", ",").replace("ITEM", "{{ k }}:{{ w(v) }}")
    return BARE.replace("QUOTE", quote) + each(f"{begin}call:{NAME}{{{{ '{{' }}}}{items}{{{{ '}}' }}}}{end}")


QWEN = xml(f"<tool_call>\n<function={NAME}>\n", f"<parameter={{{{ k }}}}>\n{RAW}\n</parameter>\n",
           "</function>\n</tool_call>")  # fmt: skip
SEED = xml(f"<seed:tool_call>\n<function={NAME}>\n", f"<parameter={{{{ k }}}}>{RAW}</parameter>\n",
           "</function>\n</seed:tool_call>")  # fmt: skip
MINIMAX = xml(f'<invoke name="{NAME}">\n', f'<parameter name="{{{{ k }}}}">{RAW}</parameter>\n', "</invoke>")
STEP = xml(f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{NAME}">\n',
           f'<steptml:parameter name="{{{{ k }}}}">{RAW}</steptml:parameter>\n',
           "</steptml:invoke><｜tool_call_end｜>")  # fmt: skip
GLM = xml(f"<tool_call>{NAME}\n", f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{RAW}</arg_value>\n", "</tool_call>")
CDATA = ("{% set wrap = v is string and ('<' in v or '&' in v or '\\n' in v) %}{{ '<![CDATA[' if wrap else '' }}"
         + RAW + "{{ ']]>' if wrap else '' }}")  # fmt: skip
MINICPM = xml(f'<function name="{NAME}">', f'<param name="{{{{ k }}}}">{CDATA}</param>', "</function>")
CALL = COMMAS.replace("ITEM", "{{ k }}={{ v | tojson }}")
EXPRESSION = f"{NAME}({CALL})"
JSON_CALL = '{"name": "' + NAME + '", "arguments": ' + ARGS + "}"
COMMAND = '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "' + NAME + '", "parameters": ' + ARGS + "}"
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>")  # fmt: skip
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
        "<|tool_call_argument_begin|>")  # fmt: skip

OPEN = ("<tool_calls:opensource>", "</tool_calls:opensource>", "<tool_call:opensource>", "</tool_call:opensource>",
        "<tool_sep:opensource>", "<arg_key:opensource>", "</arg_key:opensource>", "<arg_value:opensource>",
        "</arg_value:opensource>")  # fmt: skip
HY = xml(f"{OPEN[2]}{NAME}{OPEN[4]}\n", f"{OPEN[5]}{{{{ k }}}}{OPEN[6]}\n{OPEN[7]}{RAW}{OPEN[8]}\n", OPEN[3])

CASES = {
    "qwen3_coder": Case(each(QWEN, nl("\n")), ("<tool_call>", "</tool_call>"), raw=True),
    "qwen3_coder text": Case(each(QWEN, nl("\n")), raw=True),
    "minicpm5": Case(each(MINICPM, nl("\n")), raw=True),
    "seed_oss": Case(each(SEED, nl("\n")), ("<seed:tool_call>", "</seed:tool_call>"), raw=True),
    "minimax_m2": Case(
        listed(nl("\n<minimax:tool_call>\n"), MINIMAX, nl("\n"), nl("\n</minimax:tool_call>")),
        ("<minimax:tool_call>", "</minimax:tool_call>"), raw=True,
    ),
    "deepseek_v32": Case(dsml("function_calls"), ("｜DSML｜",), raw=True),
    "deepseek_v32 text": Case(dsml("function_calls"), raw=True),
    "deepseek_v4": Case(dsml("tool_calls"), ("｜DSML｜",), raw=True),
    "step3": Case(
        listed(nl("<｜tool_calls_begin｜>\n"), STEP, nl("\n"), nl("\n<｜tool_calls_end｜>")),
        ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>",
         "<｜tool_calls_end｜>"), raw=True,
    ),
    "glm": Case(
        each(GLM, nl("\n")),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), raw=True,
    ),
    "glm text": Case(each(GLM.replace("{{ '\\n' }}", "")), raw=True),
    "lfm2": Case(
        listed("<|tool_call_start|>[", EXPRESSION, ", ", "]<|tool_call_end|>"),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "olmo3": Case(listed(nl("<function_calls>\n"), EXPRESSION, nl("\n"), nl("\n</function_calls>"))),
    "pythonic": Case(listed("[", EXPRESSION, ", ", "]")),
    "gemma4": Case(
        gemma("<|tool_call>", "<tool_call|>", '<|"|>'), ("<|tool_call>", "<tool_call|>", '<|"|>'), quote='<|"|>'
    ),
    "functiongemma": Case(
        gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        ("<start_function_call>", "<end_function_call>", "<escape>"), quote="<escape>",
    ),
    "apertus": Case(
        listed("<|tools_prefix|>[", '{{ \'{"\' }}' + NAME + '": ' + ARGS + "{{ '}' }}", ", ", "]<|tools_suffix|>"),
        ("<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    "command": Case(
        listed(nl("<|START_ACTION|>[\n    "), COMMAND, nl(",\n    "), nl("\n]<|END_ACTION|>")),
        ("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    "command_r": Case(
        listed(nl("Action:\n```json\n[\n    "),
               nl('{{ "{" }}\n        "tool_name": "' + NAME + '",\n        "parameters": ' + ARGS + "\n    }"),
               nl(",\n    "), nl("\n]```")),
    ),
    "deepseek_v3": Case(
        listed(DEEPSEEK[0], nl(f"{DEEPSEEK[2]}function{DEEPSEEK[4]}{NAME}\n```json\n{ARGS}\n```{DEEPSEEK[3]}"),
               nl("\n"), DEEPSEEK[1]), DEEPSEEK,
    ),
    "deepseek_v31": Case(
        listed(DEEPSEEK[0], f"{DEEPSEEK[2]}{NAME}{DEEPSEEK[4]}{ARGS}{DEEPSEEK[3]}", "", DEEPSEEK[1]), DEEPSEEK
    ),
    "kimi_k2": Case(
        listed(KIMI[0], f"{KIMI[2]}functions.{NAME}:{{{{ loop.index0 }}}}{KIMI[4]}{ARGS}{KIMI[3]}", "", KIMI[1]), KIMI
    ),
    "kimi_k2 text": Case(
        listed(KIMI[0], f"{KIMI[2]}functions.{NAME}:{{{{ loop.index0 }}}}{KIMI[4]}{ARGS}{KIMI[3]}", "", KIMI[1])
    ),
    "kimi_k2 ids": Case(listed(KIMI[0], f"{KIMI[2]}{{{{ c.id }}}}{KIMI[4]}{ARGS}{KIMI[3]}", "", KIMI[1]), KIMI),
    "functionary": Case(each(f"<function={NAME}>{ARGS}</function>")),
    "hy3": Case(listed(nl(f"{OPEN[0]}\n"), HY, nl("\n"), nl(f"\n{OPEN[1]}")), OPEN, raw=True),
    "json between tags": Case(listed(nl("<tool_calls>\n"), JSON_CALL, nl("\n"), nl("\n</tool_calls>"))),
    "nemotron": Case(listed("<TOOLCALL>[", JSON_CALL, ", ", "]</TOOLCALL>")),
    "phi4_mini": Case(
        listed("<|tool_call|>[", JSON_CALL, ", ", "]<|/tool_call|>"), ("<|tool_call|>", "<|/tool_call|>")
    ),
    "gigachat": Case(
        each(nl("<|message_sep|>\n\nfunction call<|role_sep|>\n") + JSON_CALL), ("<|message_sep|>", "<|role_sep|>"),
        one=True,
    ),
}  # fmt: skip
"""Cases by family; some keys add a word on the tokenizer."""
DROPS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n"
DROPS += "{% endfor %}{% if tools %}SIGN{% endif %}"
SIGNS = {
    "granite": ("begin with <|tool_call|>", ()),
    "hermes": ("between <tool_call> and </tool_call>", ()),
    "qwen3_coder": ("<tool_call><function=f><parameter=k>", ()),
    "lfm2": ("List of tools", ("<|tool_call_start|>", "<|tool_call_end|>")),
    "phi4_mini": ("<|tool|>{{ tools }}<|/tool|>", ()),
    "kimi_k2": ("<|tool_call_argument_begin|>", ()),
    "olmo3": ("<function_calls>", ()),
}
"""Families whose templates may render no calls: what their text says, and which special tokens there are."""

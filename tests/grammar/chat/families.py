"""Today's families of models as they write an answer: turns, reasoning and calls with their real marks, templates our
own.

`python -m pytest tests/grammar/chat/test_families.py` says of each which format is recognised, held to and taken apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from .zoo import (
    ARGS,
    BARE,
    COMMAND,
    COMMAS,
    DEEPSEEK,
    DSML_CALL,
    EXPRESSION,
    GLM,
    HY,
    JSON_CALL,
    KIMI,
    LIST,
    MINICPM,
    MINIMAX,
    NAME,
    OPEN,
    QWEN,
    RAW,
    SEED,
    STEP,
    nl,
    xml,
)

Turn = tuple[str, str, str]
"""Text before the user's, text between that and the answer, and text behind the answer."""
CHATML: Turn = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n")
HEADERS: Turn = (
    "<|start_header_id|>user<|end_header_id|>\n\n",
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|eot_id|>",
)
ROLES: Turn = (
    "<|start_of_role|>user<|end_of_role|>",
    "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    "<|end_of_text|>\n",
)
INST: Turn = ("[INST]", "[/INST]", "</s>")
BARS: Turn = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
COHERE: Turn = (
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
    "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
)
GIGA: Turn = (
    "user<|role_sep|>\n", "<|message_sep|>\n\nassistant<|role_sep|>\n", "<|message_sep|>\n\n",
)  # fmt: skip
ZHIPU: Turn = ("<|user|>\n", "<|assistant|>", "<|observation|>")
GEMMA: Turn = ("<|turn>user\n", "<turn|>\n<|turn>model\n", "<turn|>\n")

Think = tuple[str, str]
LINES: Think = ("<think>\n", "\n</think>\n\n")
TIGHT: Think = ("<think>", "</think>")
THINKING: Think = ("<|START_THINKING|>", "<|END_THINKING|>")
OPEN_THINK: Think = ("<think:opensource>", "</think:opensource>")


@dataclass(frozen=True)
class Family:
    """One family's template in parts."""

    form: str
    """The format of its calls."""
    turn: Turn
    calls: str
    """Writes the calls of the message `m`; empty: the template leaves them out."""
    think: Think | None = None
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


def each(call: str, between: str = "", begin: str = "", end: str = "") -> str:
    """One call after the other."""
    return nl(begin) + LIST.replace("CALL", nl(call)).replace("BETWEEN", nl(between)) + nl(end)


HERMES = each(f"<tool_call>\n{JSON_CALL}\n</tool_call>", "\n")
NO_NEWLINES = each(f"<tool_call>{JSON_CALL}</tool_call>", "\n")
LLAMA = '{"name": "' + NAME + '", "parameters": ' + ARGS + "}"
WITH_ID = '{"name": "' + NAME + '", "arguments": ' + ARGS + ', "id": "{{ c.id }}"}'
MARKED = each(f"[TOOL_CALLS]{NAME}[ARGS]{ARGS}")
CALL_ID = each(f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{ARGS}")
APRIEL = each(WITH_ID, ", ", "<tool_calls>[", "]</tool_calls>")
ACTION = each(COMMAND, ",\n    ", "<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>")
PLUS = each('{{ "{" }}\n        "tool_name": "' + NAME + '",\n        "parameters": ' + ARGS + "\n    }",
            ",\n    ", "Action:\n```json\n[\n    ", "\n]```")  # fmt: skip
R1 = each(
    f"{DEEPSEEK[2]}function{DEEPSEEK[4]}{NAME}\n```json\n{ARGS}\n```{DEEPSEEK[3]}", "\n", DEEPSEEK[0], DEEPSEEK[1]
)
V31 = each(f"{DEEPSEEK[2]}{NAME}{DEEPSEEK[4]}{ARGS}{DEEPSEEK[3]}", "", DEEPSEEK[0], DEEPSEEK[1])
K2 = each(f"{KIMI[2]}functions.{NAME}:{{{{ loop.index0 }}}}{KIMI[4]}{ARGS}{KIMI[3]}", "", KIMI[0], KIMI[1])
CODER = each(QWEN, "\n")
CODER_TIGHT = each(QWEN)
GLM_LINES = each(GLM, "\n")
GLM_TIGHT = each(GLM.replace("{{ '\\n' }}", ""))
GEMMA_ITEMS = COMMAS.replace(", ", ",").replace("ITEM", "{{ k }}:{{ w(v) }}")
PYTHONIC = each(EXPRESSION, ", ", "[", "]")
PLAMO = ("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>",
         "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",
         "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
         "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>")  # fmt: skip
SOLAR = xml(f"<|tool_call:start|>{NAME}\n", f"<|tool_arg:start|>{{{{ k }}}}<|tool_arg:value|>{RAW}<|tool_arg:end|>\n",
            "<|tool_call:end|>")  # fmt: skip
APERTUS = each("{{ '{\"' }}" + NAME + '": ' + ARGS + "{{ '}' }}", ", ", "<|tools_prefix|>[", "]<|tools_suffix|>")


def gemma(begin: str, end: str, quote: str) -> str:
    return BARE.replace("QUOTE", quote) + each(f"{begin}call:{NAME}{{{{ '{{' }}}}{GEMMA_ITEMS}{{{{ '}}' }}}}{end}")


def dsml(noun: str) -> str:
    return each(DSML_CALL, "\n", f"\n\n<｜DSML｜{noun}>\n", f"\n</｜DSML｜{noun}>")


TAGS = ("<tool_call>", "</tool_call>")
THOUGHTS = ("<think>", "</think>")
MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
CHANNELS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>")

FAMILIES = {
    # JSON between <tool_call> marks
    "Qwen 2.5": Family("hermes", CHATML, HERMES, special=TAGS),
    "Qwen 3": Family("hermes", CHATML, HERMES, LINES, special=(*TAGS, *THOUGHTS)),
    "Qwen 3 Thinking": Family("hermes", CHATML, HERMES, LINES, "<think>\n", special=(*TAGS, *THOUGHTS)),
    "QwQ": Family("hermes", CHATML, HERMES, LINES, "<think>\n"),
    "Hermes 2 Pro": Family("hermes", CHATML, HERMES),
    "Hermes 3": Family("hermes", CHATML, HERMES, special=TAGS),
    "Granite 4": Family("hermes", ROLES, HERMES, special=TAGS),
    "ERNIE 4.5": Family("hermes", CHATML, HERMES, LINES, "<think>\n"),
    "EXAONE 4": Family(
        "hermes", ("[|user|]\n", "[|endofturn|]\n[|assistant|]\n", "[|endofturn|]\n"), NO_NEWLINES, LINES, "<think>\n"
    ),
    "SmolLM3": Family("hermes", CHATML, "", LINES, said="in <tool_call> and </tool_call> marks"),
    "MiMo": Family("hermes", CHATML, HERMES),
    "Reka Edge": Family(
        "hermes", ("human: ", "<sep>assistant:", "\n\n<sep>"), each(f"<tool_call>\n{JSON_CALL}\n</tool_call>"),
        (" <think>\n", "\n</think>\n\n"),
    ),
    "Bielik 3": Family("hermes", CHATML, HERMES, LINES),
    # JSON
    "Llama 3.1": Family("llama3", HEADERS, each(LLAMA), special=("<|python_tag|>",), one=True),
    "Llama 3.2": Family("llama3", HEADERS, each(LLAMA), special=("<|python_tag|>",), one=True),
    "Llama 3.3": Family("llama3", HEADERS, each(LLAMA), special=("<|python_tag|>",), one=True),
    "Mistral Nemo": Family("mistral", INST, each(WITH_ID, ", ", "[TOOL_CALLS][", "]"), special=MARKS[:1]),
    "Mistral Small 3.2": Family("mistral", INST, CALL_ID, special=MARKS),
    "Ministral 3": Family("mistral", INST, MARKED, ("[THINK]", "[/THINK]"), special=(*MARKS, "[THINK]", "[/THINK]")),
    "Magistral": Family("mistral", INST, MARKED, ("[THINK]", "[/THINK]"), special=MARKS),
    "Devstral": Family("mistral", INST, MARKED, special=MARKS),
    "Apriel 1.5": Family(
        "json", ("<|user|>\n", "\n<|end|>\n<|assistant|>\n", "\n<|end|>\n"), APRIEL,
        ("<thinking>\n", "\n</thinking>\n"),
    ),
    "Apriel 1.6": Family(
        "json", ("<|begin_user|>\n", "\n<|begin_assistant|>\n", "\n<|end|>\n"), APRIEL,
        ("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n"), "Here are my reasoning steps:\n",
    ),
    "MiniMax M1": Family(
        "json", ("user\n", "<end_of_sentence>\nai\n", "<end_of_sentence>\n"),
        each(JSON_CALL, "\n", "<tool_calls>\n", "\n</tool_calls>"), TIGHT,
    ),
    "GigaChat 3.1": Family("json", GIGA, each(f"<|function_call|>{JSON_CALL}"), one=True),
    "GigaChat 3": Family(
        "gigachat", GIGA, each(f"<|message_sep|>\n\nfunction call<|role_sep|>\n{JSON_CALL}"), one=True,
        special=("<|message_sep|>", "<|role_sep|>"),
    ),
    "Granite 3": Family("granite", ROLES, "", TIGHT, said="begin with <|tool_call|>", special=("<|tool_call|>",)),
    "Phi-4 mini": Family("phi4_mini", ("<|user|>", "<|end|><|assistant|>", "<|end|>"), "", said="<|tool|><|/tool|>"),
    "Nemotron Nano 2": Family(
        "nemotron", ("<SPECIAL_11>User\n", "\n<SPECIAL_11>Assistant\n", "\n<SPECIAL_12>\n"),
        each(JSON_CALL, ", ", "<TOOLCALL>[", "]</TOOLCALL>"), ("<think>\n", "</think>\n\n"), "<think>\n",
    ),
    "Granite 20B FC": Family("granite_20b_fc", CHATML, each(f"<function_call> {JSON_CALL}", "\n")),
    "InternLM 2.5": Family("internlm2", CHATML, "", special=("<|action_start|>", "<|plugin|>", "<|action_end|>")),
    "LongCat": Family("longcat", CHATML, each(f"<longcat_tool_call>\n{JSON_CALL}\n</longcat_tool_call>", "\n"), LINES),
    "Pangu": Family("pangu", CHATML, each(JSON_CALL, ", ", "<|tool_call_start|>[", "]<|tool_call_end|>"),
                    special=("<|tool_call_start|>", "<|tool_call_end|>")),
    "HyperCLOVA X": Family(
        "hyperclovax", ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant", "<|im_end|>\n"),
        each(JSON_CALL, ", ", " -> tool/function_call\n[", "]"),
    ),
    "Hunyuan A13B": Family("json", CHATML, each(JSON_CALL, ", ", "<tool_calls>[", "]</tool_calls>"), TIGHT),
    "Jamba": Family("json", CHATML, each(JSON_CALL, ",\n    ", "<tool_calls>[\n    ", "\n]</tool_calls>")),
    "xLAM 2": Family("json", HEADERS, each(JSON_CALL, ", ", "[", "]")),
    # a name, and JSON for the arguments
    "PLaMo 3": Family("plamo3", CHATML, each(
        f"{PLAMO[2]}{NAME}{PLAMO[3]}{ARGS}{PLAMO[4]}", "", PLAMO[0], PLAMO[1])),
    "Command A": Family("command", COHERE, ACTION, THINKING, special=(*THINKING, "<|START_ACTION|>", "<|END_ACTION|>")),
    "Command R7B": Family("command", COHERE, ACTION, THINKING, "<|START_THINKING|><|END_THINKING|>"),
    "North Code": Family("command", COHERE, ACTION, THINKING, "<|START_THINKING|>"),
    "Command R+": Family("command_r", COHERE, PLUS),
    "Apertus": Family(
        "apertus", ("<|user_start|>", "<|user_end|><|assistant_start|>", "<|assistant_end|>"), APERTUS,
        ("<|inner_prefix|>", "<|inner_suffix|>"), special=("<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    "DeepSeek V3": Family("deepseek_v3", BARS, R1, special=DEEPSEEK),
    "DeepSeek R1": Family("deepseek_v3", BARS, R1, ("<think>\n", "\n</think>\n\n"), "<think>\n", special=DEEPSEEK),
    "DeepSeek V3.1": Family("deepseek_v31", BARS, V31, TIGHT, "<think></think>", special=DEEPSEEK),
    "Kimi K2": Family("kimi_k2", ("user<|im_middle|>", "<|im_end|>assistant<|im_middle|>", "<|im_end|>"), K2,
                      special=KIMI),
    "Kimi K2 Thinking": Family("kimi_k2", ("user<|im_middle|>", "<|im_end|>assistant<|im_middle|>", "<|im_end|>"), K2,
                               TIGHT, special=KIMI),
    "Functionary 3.1": Family("functionary", HEADERS, each(f"<function={NAME}>{ARGS}</function>")),
    "gpt-oss": Family(
        "harmony", ("<|start|>user<|message|>", "<|end|><|start|>assistant", "<|call|>"),
        each(f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>{ARGS}"),
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"), one=True, special=CHANNELS,
    ),
    # an element for the function and for each parameter
    "Qwen3-Coder": Family("qwen3_coder", CHATML, CODER, special=TAGS),
    "Qwen3.5": Family("qwen3_coder", CHATML, CODER, LINES, "<think>\n", special=(*TAGS, *THOUGHTS)),
    "Qwen3.6": Family("qwen3_coder", CHATML, CODER, LINES, "<think>\n\n</think>\n\n", special=(*TAGS, *THOUGHTS)),
    "Nemotron 3": Family("qwen3_coder", CHATML, CODER, ("<think>\n", "\n</think>\n"), "<think>\n", special=TAGS),
    "Step 3.5": Family("qwen3_coder", CHATML, CODER_TIGHT, ("<think>\n", "\n</think>\n"), "<think>\n"),
    "Seed-OSS": Family(
        "seed_oss", ("<seed:bos>user\n", "<seed:eos><seed:bos>assistant\n", "<seed:eos>"), each(SEED, "\n"),
        ("<seed:think>", "</seed:think>\n"), special=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    "MiniMax M2": Family(
        "minimax_m2", ("]~b]user\n", "[e~[\n]~b]ai\n", "[e~[\n"),
        each(MINIMAX, "\n", "\n<minimax:tool_call>\n", "\n</minimax:tool_call>"), LINES, "<think>\n",
    ),
    "MiniCPM5": Family("minicpm5", CHATML, each(MINICPM, "\n"), LINES),
    "Solar Open 2": Family("solar_open2", CHATML, each(SOLAR, "\n"), ("<|think:start|>", "<|think:end|>")),
    "Step 3": Family(
        "step3", ("<|BOT|>user\n", "<|EOT|><|BOT|>assistant\n", "<|EOT|>"),
        each(STEP, "\n", "<｜tool_calls_begin｜>\n", "\n<｜tool_calls_end｜>"),
        ("<think>\n", "\n</think>\n"), "<think>\n",
        special=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>"),
    ),
    "Hunyuan 3": Family(
        "hy3", ("<｜hy_User:opensource｜>", "<｜hy_Assistant:opensource｜>", "<｜hy_eos:opensource｜>"),
        each(HY, "\n", f"{OPEN[0]}\n", f"\n{OPEN[1]}"), OPEN_THINK, "".join(OPEN_THINK), special=OPEN,
    ),
    "DeepSeek V3.2": Family("deepseek_v32", BARS, dsml("function_calls"), TIGHT, "<think>", special=("｜DSML｜",)),
    "DeepSeek V4": Family("deepseek_v4", BARS, dsml("tool_calls"), TIGHT, "</think>", special=("｜DSML｜",)),
    "GLM 4.6": Family("glm", ZHIPU, GLM_LINES, ("\n<think>", "</think>\n"), special=TAGS),
    "GLM 4.7": Family("glm", ZHIPU, GLM_TIGHT, TIGHT, "<think>", special=TAGS),
    "Ling 3": Family(
        "glm", ("<role>HUMAN</role>", "<|role_end|><role>ASSISTANT</role>\n", "<|role_end|>"), GLM_LINES, TIGHT,
        "<think>",
    ),
    "Laguna": Family("glm", ("<user>", "</user>\n<assistant>", "</assistant>\n"), GLM_TIGHT, TIGHT, "<think>"),
    "Spark 2.5": Family("glm", ("<|User|>", "<|Bot|>", "<｜end▁of▁sentence｜>"), GLM_TIGHT, TIGHT, "<think>"),
    # an expression
    "LFM2": Family("lfm2", CHATML, "", said="List of tools: ", special=("<|tool_call_start|>", "<|tool_call_end|>")),
    "LFM2.5": Family(
        "lfm2", CHATML, each(EXPRESSION, ", ", "<|tool_call_start|>[", "]<|tool_call_end|>"), TIGHT,
        special=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "OLMo 3": Family("olmo3", CHATML, each(EXPRESSION, "\n", "<function_calls>\n", "\n</function_calls>"), LINES),
    "Gemma 3": Family("pythonic", ("<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>\n"),
                      PYTHONIC),
    "Llama 4": Family("pythonic", ("<|header_start|>user<|header_end|>\n\n",
                                   "<|eot|><|header_start|>assistant<|header_end|>\n\n", "<|eot|>"), PYTHONIC),
    "Gemma 4": Family(
        "gemma4", GEMMA, gemma("<|tool_call>", "<tool_call|>", '<|"|>'), ("<|channel>thought\n", "\n<channel|>"),
        "<|channel>thought\n<channel|>", special=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    ),
    "FunctionGemma": Family(
        "functiongemma", ("<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>\n"),
        gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        special=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
}  # fmt: skip
"""Families by the names that `docs/howto/tools_and_agents.md` has for them."""

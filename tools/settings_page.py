"""docs/settings.md: every setting of an engine and every option of a request, from their own descriptions.

    python -m tools.settings_page                writes the page

Names, defaults and descriptions are read off the dataclasses; what a setting takes is asked of it, by giving it what it
must refuse. So nothing here repeats a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from asyncengine.config import GROUPS, EngineConfig
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.cli.options import ENGINE_FIELDS, SAMPLING_FIELDS, field_docs
from asyncengine.options import ChatRequest, RequestOptions
from asyncengine.sampling_params import SamplingParams

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
REFUSED: tuple[Any, Any] = (-(10**40), "nonsense")
"""Nothing is as small, and no text, switch or list is a number; the second is for numbers that may be texts as well."""
OTHER_FLAGS = {"adapters": "`--adapter`"}
"""Flags that are not named after their field."""
ELSEWHERE = {"n", "logprobs", "top_logprobs", "on_budget"}
"""Fields of `SamplingParams` that only `asyncengine generate` has flags for."""


Accepts = Callable[[str, Any], object]
"""Gives a field a value: raises `InvalidParameter` if it does not take it."""


class Setting(NamedTuple):
    """One field: a row of the page."""

    name: str
    flag: str
    default: str
    takes: str
    does: str

    def __str__(self) -> str:
        cells = (f"`{self.name}`", self.flag, self.default, self.takes, self.does)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def settings(kind: type, flags: Sequence[str], accepts: Accepts | None) -> dict[str, Setting]:
    """A row for each field of a dataclass, by name; `accepts` None: values are checked later, against the engine."""
    docs, hints = field_docs(kind), get_type_hints(kind)
    return {
        one.name: Setting(
            one.name,
            flag_of(one, flags),
            default_of(one),
            "" if accepts is None else limit_of(one.name, accepts, {int, str} <= {*get_args(hints[one.name])}),
            docs.get(one.name, ""),
        )
        for one in fields(kind)
    }


def flag_of(one: Field[Any], flags: Sequence[str]) -> str:
    """The command's flag, as code; empty where it has none."""
    if one.name not in flags:
        return OTHER_FLAGS.get(one.name, "")
    flag = one.name.replace("_", "-")
    return f"`--{flag}`, `--no-{flag}`" if str(one.type).startswith(("bool", "Annotated[bool")) else f"`--{flag}`"


def default_of(one: Field[Any]) -> str:
    """The default, as Python writes it; "needed" where there is none."""
    if one.default is not MISSING:
        return f"`{one.default!r}`"
    return "needed" if one.default_factory is MISSING else f"`{one.default_factory()!r}`"


def limit_of(name: str, accepts: Accepts, may_be_text: bool = False) -> str:
    """The words with which a field refuses a value; empty: it takes anything here, and is checked where it is used."""
    try:
        accepts(name, REFUSED[may_be_text])
    except InvalidParameter as error:
        words = error.limit.removeprefix("must be ").removeprefix("must ")
        return words if "None" in words or not takes_none(name, accepts) else f"{words}, or None"
    return ""


def takes_none(name: str, accepts: Accepts) -> bool:
    try:
        accepts(name, None)
    except InvalidParameter:
        return False
    return True


def engine_accepts(name: str, value: Any) -> object:
    return EngineConfig(**{name: value})


def sampling_accepts(name: str, value: Any) -> object:
    return SamplingParams(**{name: value})


def request_accepts(name: str, value: Any) -> object:
    return RequestOptions(**{name: value}).checked()


def table(rows: Sequence[Setting], name: str = "setting") -> str:
    columns = f"| {name} | flag | default | takes | |\n|---|---|---|---|---|"
    return "\n".join([columns, *map(str, rows)])


def page() -> str:
    """The whole file."""
    engine = settings(EngineConfig, ENGINE_FIELDS, engine_accepts)
    sampling = settings(SamplingParams, (*SAMPLING_FIELDS, *ELSEWHERE), sampling_accepts)
    request = settings(RequestOptions, (), request_accepts)
    chat = settings(ChatRequest, (), None)
    sections = [f"## {title}\n\n{table([engine[one.name] for one in fields(group)])}"
                for title, group in GROUPS.items()]  # fmt: skip
    return f"""# Settings

Every setting, every option of a request and every sampling parameter. Written by `python -m tools.settings_page` from
the descriptions below the fields (`asyncengine/config.py` and others); `tests/tools/test_settings_page.py`
fails when this page does not say what they say. Not to be edited by hand.

Settings of an engine are keywords of `from_pretrained`, entries of `engine_config` in the LangChain and LlamaIndex
classes, and flags of the command. What is out of range is refused when the engine is built, naming the setting and its
limit. Sampling parameters go into `SamplingParams`; options of a request are keywords of the call itself.

```python
from asyncengine import Engine, SamplingParams

with Engine.from_pretrained("demo", max_num_seqs=32, kv_cache_memory="256MiB") as engine:  # settings
    params = SamplingParams(temperature=0, max_tokens=16)  # sampling parameters
    chat = [{{"role": "user", "content": "What is the capital of Norway?"}}]
    print(engine.chat(chat, params, timeout=30.0).text)  # an option of the request
```

{chr(10).join(f"{section}{chr(10)}" for section in sections)}
## Options of a request

Keywords of `generate`, `stream`, `chat` and `stream_chat`; all but the last three also of `embed`,
`rerank` and `classify`.

{table(list(request.values()), "option")}

## Options of a chat

Keywords of `chat` and `stream_chat` beside those above.

{table(list(chat.values()), "option")}

## Sampling parameters

Fields of `SamplingParams`; in LangChain and LlamaIndex they are keywords of a call, and the usual ones fields of the
model. `n`, `logprobs`, `top_logprobs` and `on_budget` are flags of `asyncengine generate` only, the others also of
`chat`.

{table(list(sampling.values()), "parameter")}
"""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The engine over HTTP: an ASGI app that clients of OpenAI's and Anthropic's APIs use unmodified.

`app` mounts into any Starlette or FastAPI program; `asyncengine serve MODEL` runs it. From the outside in: `asgi` says
which path is served by what, `generating` runs a request, `answer` sends what comes of it, and `dialects` hold what
differs between APIs, in functions without I/O: a body becomes a `Turn`, an engine's chunks `events`, events frames.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncengine.async_engine import AsyncEngine
from asyncengine.engine_group import EngineGroup

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["app"]


def app(
    engines: AsyncEngine | EngineGroup | Mapping[str, AsyncEngine], *, api_keys: Sequence[str] = (),
    aliases: Mapping[str, str] | None = None, strict: bool = False, max_body: int = 32 << 20,
    response_memory: int = 64 << 20, allow_adapters: bool = False, hosts: Collection[str] | None = None,
    cors: Sequence[str] = (), telemetry: bool = False, keys: Mapping[str, Mapping[str, Any]] | None = None,
    batch_dir: str | None = None,
) -> Starlette:  # fmt: skip
    """An ASGI app over engines that run, or a group that loads them. The app does not close them.

    `api_keys`: a request must show one of them, or one of the named `keys` (NAME: fields of `http.keys.KeySettings`);
    none: everybody is served. `aliases`: other names for models and
    adapters; "*" stands for every unknown name, "" for none. `strict`: fields that would be passed over are refused.
    `max_body`: bytes of the longest request. `response_memory`: bytes of responses that clients may come back to.
    `allow_adapters`: requests may load adapters without a key. `hosts`: names in the Host header that are answered
    without a key; None: all. `cors`: origins of web pages that may ask. `telemetry`: spans of OpenTelemetry
    (`asyncengine.integrations.opentelemetry`) for every request, below the caller's. `batch_dir`: folder of
    /v1/files and /v1/batches; None: these are refused.

    Raises `ImportError` naming the extra where starlette is not installed.
    """
    try:
        from asyncengine.integrations.http.asgi import make_app
        from asyncengine.integrations.http.keys import keys_of
        from asyncengine.integrations.http.models import Models, Serving
    except ImportError as error:
        raise ImportError('serving over HTTP needs starlette: pip install "asyncengine[serve]"') from error
    models_by_name = {engines.info.name: engines} if isinstance(engines, AsyncEngine) else engines
    models, key_list = Models(models_by_name, aliases), keys_of(api_keys, keys or {})
    rest = max_body, response_memory, allow_adapters, hosts, cors, telemetry, batch_dir
    return make_app(Serving(models, key_list, strict, *rest))

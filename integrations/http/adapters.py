"""LoRA adapters loaded and unloaded by requests, in vLLM's form: /v1/load_lora_adapter, /v1/unload_lora_adapter."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from asyncengine.integrations.http.fields import TABLES
from asyncengine.integrations.http.generating import read_fields
from asyncengine.integrations.http.models import Serving
from asyncengine.integrations.http.problems import Problem


def routes(serving: Serving) -> list[Route]:
    """Both paths. They read folders of this machine, so they are served to holders of a key, or where it is allowed."""

    async def read(request: Request, table: str) -> dict[str, Any]:
        if not (serving.api_keys or serving.allow_adapters):
            why = "adapters are loaded where requests need a key, or with allow_adapters"
            raise Problem(403, why, code="forbidden")
        return (await read_fields(request, serving)).read(TABLES[table])["own"]

    async def load(request: Request) -> Response:
        own = await read(request, "load_lora_adapter")
        name, again = own["lora_name"], own.get("load_inplace", False)
        await serving.models.load_adapter(name, own["lora_path"], own.get("model"), again=again)
        return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")

    async def unload(request: Request) -> Response:
        own = await read(request, "unload_lora_adapter")
        await serving.models.unload_adapter(own["lora_name"], own.get("model"))
        return PlainTextResponse(f"Success: LoRA adapter {own['lora_name']!r} removed successfully.")

    served = {"/v1/load_lora_adapter": load, "/v1/unload_lora_adapter": unload}
    return [Route(path, endpoint, methods=["POST"]) for path, endpoint in served.items()]

"""LoRA adapters loaded and unloaded by requests, in vLLM's form: /v1/load_lora_adapter, /v1/unload_lora_adapter."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from asyncengine.errors import InvalidParameter
from asyncengine.serve.fields import Fields
from asyncengine.serve.generating import read_fields
from asyncengine.serve.models import Serving
from asyncengine.serve.problems import Problem


def routes(serving: Serving) -> list[Route]:
    """Both paths. They read folders of this machine, so they are served to holders of a key, or where it is allowed."""

    async def read(request: Request) -> tuple[Fields, str, str | None]:
        if not (serving.api_keys or serving.allow_adapters):
            why = "adapters are loaded where requests need a key, or with allow_adapters"
            raise Problem(403, why, code="forbidden")
        fields = await read_fields(request, serving)
        return fields, _needed(fields, "lora_name", "the name"), fields.text("model")

    async def load(request: Request) -> Response:
        fields, name, model = await read(request)
        path, again = _needed(fields, "lora_path", "the folder"), fields.switch("load_inplace")
        fields.ignore("base_model_name", "is_3d_lora_weight")
        fields.end(known=True)
        await serving.models.load_adapter(name, path, model, again=again)
        return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")

    async def unload(request: Request) -> Response:
        fields, name, model = await read(request)
        fields.ignore("lora_int_id")
        fields.end(known=True)
        await serving.models.unload_adapter(name, model)
        return PlainTextResponse(f"Success: LoRA adapter {name!r} removed successfully.")

    served = {"/v1/load_lora_adapter": load, "/v1/unload_lora_adapter": unload}
    return [Route(path, endpoint, methods=["POST"]) for path, endpoint in served.items()]


def _needed(fields: Fields, name: str, what: str) -> str:
    if text := fields.text(name):
        return text
    raise InvalidParameter(name, f"is missing: {what} of the adapter")

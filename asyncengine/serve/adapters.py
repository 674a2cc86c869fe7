"""LoRA adapters loaded and unloaded by requests, in vLLM's form: /v1/load_lora_adapter, /v1/unload_lora_adapter."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from asyncengine.errors import InvalidParameter
from asyncengine.serve.dialects import openai_chat
from asyncengine.serve.fields import Fields
from asyncengine.serve.generating import read_fields, reporting
from asyncengine.serve.problems import Problem
from asyncengine.serve.state import Serving


def routes(serving: Serving) -> list[Route]:
    """Both paths. They read folders of this machine, so they are served to holders of a key, or where it is allowed."""

    async def read(request: Request) -> tuple[Fields, str, str | None]:
        if not (serving.api_keys or serving.allow_adapters):
            raise Problem(
                403, "adapters are loaded where requests need a key, or with allow_adapters", code="forbidden"
            )
        fields = await read_fields(request, serving)
        name = fields.text("lora_name")
        if not name:
            raise InvalidParameter("lora_name", "is missing: the name of the adapter")
        return fields, name, fields.text("model")

    async def load(request: Request) -> Response:
        fields, name, model = await read(request)
        path, again = fields.text("lora_path"), fields.switch("load_inplace")
        fields.ignore("base_model_name", "is_3d_lora_weight")
        fields.end()
        if not path:
            raise InvalidParameter("lora_path", "is missing: the folder of the adapter")
        await serving.models.load_adapter(name, path, model, again=again)
        return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")

    async def unload(request: Request) -> Response:
        fields, name, model = await read(request)
        fields.ignore("lora_int_id")
        fields.end()
        await serving.models.unload_adapter(name, model)
        return PlainTextResponse(f"Success: LoRA adapter {name!r} removed successfully.")

    return [
        Route("/v1/load_lora_adapter", reporting(load, openai_chat.error), methods=["POST"]),
        Route("/v1/unload_lora_adapter", reporting(unload, openai_chat.error), methods=["POST"]),
    ]

"""The page at `/`: a chat with any model, and what the engine does now. It asks no other host for anything."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILES = {"index.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def routes() -> list[Route]:
    """The page's files; addresses in them are relative, so that the app may be mounted anywhere."""
    return [_route(name, kind) for name, kind in FILES.items()]


def _route(name: str, kind: str) -> Route:
    content = (resources.files("asyncengine.serve") / "page" / name).read_bytes()

    async def page(_request: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return Route("/" if name == "index.html" else f"/{name}", page, methods=["GET"])

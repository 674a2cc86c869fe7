"""A FastAPI application with the engine inside: streaming answers, and clients that leave cost nothing.

uvicorn examples.fastapi_app:app       (one worker: each worker process loads its own model)
curl -N localhost:8000/chat -H 'content-type: application/json' -d '{"message": "Count from 1 to 9."}'
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import fastapi
import httpx
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

from asyncengine import AsyncEngine, SamplingParams, TokenStream
from asyncengine.errors import InvalidParameter, QueueFull

MODEL = os.environ.get("ASYNCENGINE_MODEL", "demo")


@contextlib.asynccontextmanager
async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
    """Load before the first request, close after the last."""
    async with await AsyncEngine.from_pretrained(MODEL, max_queued_requests=64) as engine:
        app.state.engine = engine
        yield


app = fastapi.FastAPI(lifespan=lifespan)


class Question(BaseModel):
    message: str
    max_tokens: int = Field(default=60, ge=1)
    temperature: float = 0.0


def ask(question: Question) -> TokenStream:
    engine: AsyncEngine = app.state.engine
    params = SamplingParams(temperature=question.temperature, max_tokens=question.max_tokens)
    return engine.stream_chat([{"role": "user", "content": question.message}], params)


@app.post("/chat")
async def chat(question: Question) -> StreamingResponse:
    """The answer as plain text, token by token."""
    stream = ask(question)
    first = await anext(stream)  # refusals and a full queue raise here, before the response has started

    async def text() -> AsyncIterator[str]:
        # A client that disconnects cancels this generator; leaving the stream frees its compute and memory at once.
        async with stream:
            yield first.text
            async for chunk in stream:
                yield chunk.text

    return StreamingResponse(text(), media_type="text/plain")


@app.post("/answer")
async def answer(question: Question) -> dict[str, object]:
    """The whole answer. Disconnecting does not cancel this handler in FastAPI; use /chat for long answers."""
    async with ask(question) as stream:
        completion = await stream.result()
    return {"text": completion.text, "finish_reason": completion.finish_reason}


@app.exception_handler(InvalidParameter)
async def refused(request: fastapi.Request, error: InvalidParameter) -> JSONResponse:
    return JSONResponse({"error": str(error), "field": error.field}, status_code=400)


@app.exception_handler(QueueFull)
async def full(request: fastapi.Request, error: QueueFull) -> JSONResponse:
    return JSONResponse({"error": str(error)}, status_code=429, headers={"retry-after": "1"})


async def main() -> list[str]:
    """Ask the application from inside this process, several clients at once."""
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://demo", timeout=60) as client,
    ):
        questions = ["Hello!", "Who are you?", "Count from 1 to 5."]
        replies = await asyncio.gather(*(client.post("/chat", json={"message": text}) for text in questions))
        for text, reply in zip(questions, replies, strict=True):
            print(f"{text}  {reply.text}")
        return [reply.text for reply in replies]


if __name__ == "__main__":
    asyncio.run(main())

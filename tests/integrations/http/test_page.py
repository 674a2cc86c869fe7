"""The page at `/`, as a browser has it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from support.fake_engine import make_engine
from support.held_steps import HeldSteps
from support.http_server import serving_thread

from asyncengine import AsyncEngine
from asyncengine.integrations.http import app

KEY = "a key of the test's"
FOLDER = Path(__file__).parents[3] / "integrations" / "http" / "page"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
HOSTILE = '<img src=x onerror="window.hacked = true"><script>window.hacked = true</script>'
ENGINES: list[AsyncEngine] = []


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Address of an app that asks for a key, with a slash at its end."""

    @asynccontextmanager
    async def demo() -> AsyncIterator[Starlette]:
        async with await AsyncEngine.from_pretrained("demo", show_progress=False, kv_cache_memory="8MiB") as engine:
            ENGINES[:] = [engine]
            yield app(engine, api_keys=[KEY])

    with serving_thread(demo) as found:
        yield f"{found}/"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    with api.sync_playwright() as playwright:
        if path is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("needs a Chromium: apt install chromium, or playwright install chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """The page, opened. Nothing in it may fail, and it may ask no other host for anything."""
    context = browser.new_context(viewport={"width": 1100, "height": 700})
    page, wrong = context.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if "Security Policy" in said.text else None)
    page.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith((url, "data:")) else None)
    page.goto(url)
    yield page
    context.close()
    assert not wrong


def enter(page: Any) -> None:
    """Give the key, as a user would who has read that one is needed."""
    page.wait_for_selector("#state:has-text('API key')")
    page.fill("#key", KEY)
    page.wait_for_selector("#model option", state="attached")


def send(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def figure(page: Any, name: str) -> str:
    return str(page.locator(f"dt:text-is('{name}') + dd").inner_text())


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_whoever_looks_whether_somebody_is_there_finds_it(url: str, method: str) -> None:
    answer = httpx.request(method, url)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert bool(answer.text) == (method == "GET")


async def test_it_may_be_mounted_anywhere_and_its_files_need_no_key() -> None:
    async with make_engine() as engine:
        client = TestClient(Starlette(routes=[Mount("/llm", app(engine, api_keys=[KEY]))]))
        page = client.get("/llm/")
        files = re.findall(r'(?:href|src)="([\w.]+)"', page.text)
        assert files == ["page.css", "page.js"]
        assert [client.get(f"/llm/{name}").status_code for name in (*files, "stats", "v1/models")] == [
            200,
            200,
            401,
            401,
        ]
        client.headers["x-api-key"] = KEY
        assert [client.get(f"/llm/{name}").status_code for name in ("stats", "v1/models")] == [200, 200]


def test_it_names_no_other_host_and_makes_no_html() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"https?:|//\w", text), path.name
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), path.name


def test_a_chat_with_a_key_and_what_the_engine_does(page: Any, url: str) -> None:
    enter(page)
    for number, question in enumerate(["hello", "And what else?"]):
        page.fill("#temperature", "0")
        send(page, question)
        page.wait_for_selector(f"article:nth-of-type({2 * number + 2}) .note")
    body = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    asked = httpx.post(f"{url}v1/chat/completions", json=body, headers={"x-api-key": KEY}).json()
    articles = page.locator("article")
    assert articles.count() == 4
    assert articles.nth(0).inner_text() == "hello"
    assert articles.nth(1).locator("div").inner_text() == asked["choices"][0]["message"]["content"]
    tokens = asked["usage"]["prompt_tokens"]
    assert articles.nth(1).locator(".note").inner_text().startswith(f"{tokens} tokens read")
    page.wait_for_selector("dt:text-is('Pages cached') + dd:not(:text-is('0'))")
    pages = [int(figure(page, f"Pages {name}")) for name in ("in use", "cached", "free")]
    assert sum(pages) == ENGINES[0].stats().pages.total
    assert figure(page, "Prefix hits").endswith("%")
    assert figure(page, "Step, median").endswith("ms")
    page.reload()
    page.wait_for_selector("#model option", state="attached")  # the key is kept for the tab


def test_stop_ends_the_request(page: Any) -> None:
    enter(page)
    aborted = ENGINES[0].stats().finished.get("abort", 0)
    with HeldSteps(ENGINES[0], after=4):
        send(page, "Tell me a story.")
        page.wait_for_selector("article.assistant div")
        page.wait_for_selector("dt:text-is('Running') + dd:text-is('1')")
        page.click("#send")
        page.wait_for_selector(".note:text-is('Stopped')")
    page.wait_for_selector("dt:text-is('Running') + dd:text-is('0')")
    assert ENGINES[0].stats().finished["abort"] == aborted + 1
    assert page.locator("#send").inner_text() == "Send"


def test_what_a_model_says_is_text_whatever_it_says(page: Any) -> None:
    """Thoughts are folded, calls are shown, a call's result is typed in and goes back under its id."""
    enter(page)
    call = {"index": 0, "id": "call-7", "type": "function", "function": {"name": HOSTILE, "arguments": ""}}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""}, {"reasoning_content": f"hm {HOSTILE}"}, {"content": f"so {HOSTILE}"},
        {"tool_calls": [call]}, {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": "<b>'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '1</b>"}'}}]},
    ]  # fmt: skip
    frames = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    stream = "".join(f"data: {frame}\n\n" for frame in frames) + ": still there\n\ndata: [DONE]\n\n"
    posted: list[Any] = []

    def answer(route: Any) -> None:
        posted.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=stream)

    page.route("**/v1/chat/completions", answer)
    page.click("#options summary") if not page.locator("#tools").is_visible() else None
    page.fill("#tools", '[{"type": "function", "function": {"name": "f"}}]')
    page.fill("#system", "Be brief.")
    send(page, HOSTILE)
    page.wait_for_selector(".call code:has-text('1</b>')")
    assert page.locator(".assistant > div:not(.call)").inner_text() == f"so {HOSTILE}"
    assert page.locator(".call b").inner_text() == HOSTILE
    assert page.locator(".call code").inner_text() == '{"a": "<b>1</b>"}'
    thoughts = page.locator(".thinking div")
    assert not thoughts.is_visible()
    page.click(".thinking summary")
    assert thoughts.inner_text() == f"hm {HOSTILE}"
    assert "Result of" in (page.get_attribute("#text", "placeholder") or "")
    send(page, "42")
    page.wait_for_selector(".call >> nth=1")
    assert page.evaluate("window.hacked") is None
    assert page.locator("#log img, #log script, #log b b").count() == 0
    assert [body["tools"][0]["function"]["name"] for body in posted] == ["f", "f"]
    sent = posted[1]["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool"]
    assert sent[2]["tool_calls"][0]["function"]["arguments"] == '{"a": "<b>1</b>"}'
    assert sent[3] == {"role": "tool", "content": "42", "tool_call_id": "call-7"}
    page.click("#fresh")
    assert page.locator("article").count() == 0


def test_an_error_is_said_and_the_message_may_be_sent_again(page: Any) -> None:
    enter(page)
    page.fill("#max_tokens", "100000000")
    send(page, "hello")
    page.wait_for_selector(".error:has-text('max_tokens')")
    assert page.input_value("#text") == "hello"
    page.fill("#max_tokens", "3")
    page.press("#text", "Enter")
    page.wait_for_selector(".note:has-text('3 written')")


def test_on_a_phone_nothing_hangs_over(browser: Any, url: str) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(url)
    enter(page)
    page.fill("#max_tokens", "5")
    send(page, "hello " * 40)
    page.wait_for_selector(".note, .error")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for place in ("#text", "#send", "#model"):
        box = page.locator(place).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        assert box["y"] + box["height"] <= 640
    context.close()

"""The page at `/`, as a browser has it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from support.fake_engine import PATIENCE, make_engine
from support.held_steps import HeldSteps
from support.http_server import serving_models

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

    with serving_models({"demo": "demo"}, {"kv_cache_memory": "8MiB"}, api_keys=[KEY]) as (found, engines):
        ENGINES[:] = engines.values()
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
        files += re.findall(r'from "[.]/([\w.]+)"', client.get("/llm/page.js").text)
        assert sorted(files) == sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".css", ".js"))
        found = [client.get(f"/llm/{name}") for name in files]
        assert {(each.status_code, each.headers["x-content-type-options"]) for each in found} == {(200, "nosniff")}
        kept = ("stats", "v1/models", "requests", "prefix_tree")
        assert {client.get(f"/llm/{name}").status_code for name in kept} == {401}
        client.headers["x-api-key"] = KEY
        assert {client.get(f"/llm/{name}").status_code for name in kept} == {200}


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
    assert articles.nth(0).locator("div").inner_text() == "hello"
    assert articles.nth(1).locator(".markdown").inner_text() == asked["choices"][0]["message"]["content"]
    tokens = asked["usage"]["prompt_tokens"]
    assert articles.nth(1).locator(".note").inner_text().startswith(f"{tokens} tokens read")
    page.wait_for_selector("dt:text-is('Pages cached') + dd:not(:text-is('0'))")
    shown = page.locator("#figures").inner_text()  # at once: the next figures come each second
    pages = [int(re.search(rf"Pages {name}\s+(\d+)", shown)[1]) for name in ("in use", "cached", "free")]  # type: ignore[index]
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
        page.wait_for_selector("article.assistant .markdown p")
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
    assert page.locator(".assistant > .markdown").inner_text() == f"so {HOSTILE}"
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
    page.wait_for_selector("article .note, article .error")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for place in ("#text", "#send", "#model"):
        box = page.locator(place).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        assert box["y"] + box["height"] <= 640
    context.close()


# ---------------------------------------------------------------- Markdown


def streamed(page: Any, text: str) -> None:
    """Have the next answers be `text`, three letters at a time."""
    pieces = [{"content": text[at : at + 3]} for at in range(0, len(text), 3)]
    frames = "".join(f"data: {json.dumps({'choices': [{'index': 0, 'delta': piece}]})}\n\n" for piece in pieces)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=f"{frames}data: [DONE]\n\n"),
    )


MARKDOWN = (Path(__file__).parent / "answer.md").read_text(encoding="utf-8")
"""An answer with every form of Markdown that the page knows, and with HTML and links that it must not make."""


def test_markdown_becomes_nodes_of_the_pages_own(page: Any) -> None:
    enter(page)
    streamed(page, MARKDOWN)
    send(page, "hello")
    page.wait_for_selector(".assistant .tools button")
    said = page.locator(".markdown")
    kinds = said.evaluate("node => [...node.children].map(each => each.tagName)")
    assert kinds == ["H2", "P", "OL", "BLOCKQUOTE", "DIV", "FIGURE", "P", "HR", "P"]
    first = said.locator("p").first
    assert first.inner_text().endswith(f"2 * 3 * 4 and snake_case_name.\nSecond line {HOSTILE}")
    assert [first.locator(tag).inner_text() for tag in ("strong", "code", "s")] == ["bold", "co<b>de", "struck"]
    assert said.locator("h2 em").inner_text() == "title"
    assert [each.strip() for each in said.locator("ol > li").all_inner_texts()] == [
        "first",
        "second\ninner\nx",
        "third",
    ]
    assert said.locator("td").all_inner_texts()[0] == "1"
    assert said.locator("pre code").inner_text() == (
        'print("<script>window.hacked = true</script>")\n\n# # not a heading'
    )
    assert said.locator("a").all_inner_texts() == ["safe"]
    link = said.locator("a")
    assert link.get_attribute("href") == "https://example.org/a_b_c"
    assert "noopener" in link.get_attribute("rel")
    assert "[unsafe](javascript:window.hacked=true)" in said.inner_text()
    assert page.evaluate("window.hacked") is None
    assert page.locator("#log script, #log img").count() == 0
    page.evaluate("navigator.clipboard.writeText = async text => { window.copied = text }")
    page.click("figcaption button")
    page.wait_for_selector("figcaption button:text-is('Copied')")
    assert page.evaluate("window.copied").startswith('print("<script>')
    page.click(".assistant .tools button:text-is('Copy')")
    assert page.evaluate("window.copied") == MARKDOWN


@pytest.mark.parametrize("seed", range(3))
def test_markdown_that_grows_is_that_of_the_whole(page: Any, seed: int) -> None:
    """Text drawn while it comes, in whatever pieces and frames, ends as all of it drawn at once."""
    draw = """async ([text, seed]) => {
        const { Markdown } = await import("./markdown.js");
        const whole = new Markdown(document.createElement("div"));
        whole.append(text);
        whole.draw(true);
        const grown = new Markdown(document.createElement("div"));
        for (let at = 0, state = seed + 1; at < text.length; ) {
            state = (state * 48271) % 2147483647;
            grown.append(text.slice(at, at + 1 + state % 9));
            at += 1 + state % 9;
            if (state % 3 === 0) grown.draw();
        }
        grown.draw(true);
        return [whole.node.isEqualNode(grown.node), whole.node.childElementCount];
    }"""
    same, blocks = page.evaluate(draw, [MARKDOWN * 2, seed])
    assert blocks > 15
    assert same


# ---------------------------------------------------------------- chats that stay


def test_chats_are_kept_edited_and_written_again(page: Any) -> None:
    enter(page)
    page.fill("#temperature", "0")
    for number, text in enumerate(["What is the capital of Norway?", "Count from 3 to 6."]):
        send(page, text)
        page.wait_for_selector(f"article:nth-of-type({2 * number + 2}) .note")
    answers = page.locator(".assistant .markdown").all_inner_texts()
    assert answers[0] == "The capital of Norway is Oslo."
    page.wait_for_selector("#context:not([hidden])")
    most = ENGINES[0].info.max_model_len
    assert page.locator("#left").inner_text().endswith(f"of {most:,} tokens of context")
    used = int(page.evaluate("document.getElementById('fill').value"))
    assert 0 < used < most

    page.reload()
    page.wait_for_selector("#model option", state="attached")
    assert page.locator("#chats .title").all_inner_texts() == ["What is the capital of Norway?"]
    page.click("#chats .title")
    assert page.locator(".assistant .markdown").all_inner_texts() == answers
    page.wait_for_selector("#context:not([hidden])")

    page.click("#options summary")
    page.fill("#temperature", "0")
    page.click("article:nth-of-type(2) button:text-is('Regenerate')")  # and what was behind it goes
    page.wait_for_selector("article:nth-of-type(2) .note")
    assert page.locator(".assistant .markdown").all_inner_texts() == answers[:1]
    page.click("article:nth-of-type(1) button:text-is('Edit')")
    assert page.input_value("#text") == "What is the capital of Norway?"
    assert page.locator("article").count() == 0
    send(page, "What is the capital of Peru?")
    page.wait_for_selector(".markdown:has-text('Lima')")

    page.click("#fresh")
    assert page.locator("article").count() == 0
    page.click("#chats li button:last-child")
    assert page.locator("#chats li").count() == 0
    assert page.evaluate("localStorage.getItem('asyncengine.chats')") == "[]"


def test_a_full_storage_loses_the_oldest_chats_and_nothing_else(page: Any) -> None:
    enter(page)
    streamed(page, "x" * 1000)
    page.evaluate("""() => {
        const set = Storage.prototype.setItem;
        Storage.prototype.setItem = function (name, value) {
            if (value.length > 3800) throw new DOMException("full", "QuotaExceededError");
            set.call(this, name, value);
        };
    }""")
    for number in range(5):
        page.click("#fresh")
        send(page, f"question {number}")
        page.wait_for_selector(".assistant .tools button")
    kept = [chat["title"] for chat in json.loads(page.evaluate("localStorage.getItem('asyncengine.chats')"))]
    assert kept == ["question 4", "question 3", "question 2"]


# ---------------------------------------------------------------- what the engine does


def test_every_request_is_shown_with_its_reason_and_may_be_stopped(page: Any, url: str) -> None:
    enter(page)
    engine = ENGINES[0]
    asked = {"model": "demo", "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 300}
    asked |= {"ignore_eos": True, "stream": True}
    with (
        HeldSteps(engine, after=6) as held,
        httpx.stream("POST", f"{url}v1/chat/completions", json=asked, headers={"x-api-key": KEY}) as answer,
    ):
        assert held.reached.wait(PATIENCE)  # nothing changes from here on
        page.click("#running > summary")
        card = page.locator("#requests li")
        page.wait_for_selector("#requests .state.running")
        assert card.count() == 1
        request_id = answer.headers["x-request-id"]
        assert card.locator("b").get_attribute("title") == request_id
        info = engine.requests()[0]
        assert (info.request_id, info.state, info.max_tokens) == (request_id, "running", 300)
        facts = card.locator(".facts").inner_text()
        assert f"prompt {info.prompt_tokens} (" in facts
        assert f"{info.output_tokens} of 300 written" in facts
        card.locator("button").click()
        # the step that is held still names it: it goes with that
    page.wait_for_selector("#requests li", state="detached")
    assert engine.requests() == ()
    page.click("#computed > summary")
    page.wait_for_selector("#steps g", state="attached")
    step = page.locator("#steps g title").last.text_content()
    assert re.fullmatch(r"step \d+: \d+ requests?, \d+ tokens?, [\d.]+ ms", step)
    page.click("#prefixes > summary")
    page.wait_for_selector("#tree rect", state="attached")
    titles = page.locator("#tree rect title").all_text_contents()
    assert sum(int(title.split()[0]) for title in titles) == engine.stats().pages.cached
    assert page.locator("#treesize").inner_text().startswith(f"{engine.stats().pages.cached} page")


def test_pictures_go_where_a_model_reads_them(browser: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs pillow")
    image.new("RGB", (64, 64), (200, 30, 30)).save(tmp_path / "red.png")
    (tmp_path / "none.png").write_bytes(b"no picture")

    with serving_models({"eyes": "demo-vision"}, {"kv_cache_memory": "8MiB"}) as (url, _):
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{url}/")
        page.wait_for_selector("#attach:not([hidden])")
        page.set_input_files("#files", [tmp_path / "red.png", tmp_path / "none.png"])
        page.wait_for_selector(".error:has-text('none.png')")
        assert page.locator("#pictures li").count() == 1
        with page.expect_request("**/v1/chat/completions") as sent:
            send(page, "What is in the picture?")
        content = sent.value.post_data_json["messages"][0]["content"]
        assert [part["type"] for part in content] == ["image_url", "text"]
        assert content[0]["image_url"]["url"].startswith("data:image/png;base64,")
        page.wait_for_selector(".assistant .note:has-text('tokens read')")
        assert page.locator(".user img").count() == 1
        page.reload()
        page.click("#chats .title")
        assert page.locator(".user img").count() == 1
        context.close()

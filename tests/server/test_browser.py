"""The page in a real browser, Chromium without a window, against a server with the demo model."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.running import Running, running

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[browser]'")
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("chromium is not installed", allow_module_level=True)
if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize

expect = playwright.expect
ARGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync")
SERVER = ("-c", 8192, "-ub", 64, "--kv-stream-arena-mib", 4, "--spec-type", "draft-mtp")
"""The demo model, with so little memory that a few thousand tokens are streamed."""
LONG = "import numpy as np\nfor line in open(path): print(line)\n" * 130
SOME_TEXT = re.compile(r"[\s\S]{40}")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(*SERVER) as up:
        yield up


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser that has never been here."""
    with browser.new_context() as made:
        made.set_default_timeout(20_000)
        expect.set_options(timeout=20_000)
        yield made


def opened(
    context: BrowserContext, url: str, *, size: ViewportSize | None = None, scheme: str = "light"
) -> tuple[Page, list[str]]:
    """The page, with the model known; and what went wrong in it, to be looked at in the end: errors in its console,
    requests to elsewhere."""
    page, wrong = context.new_page(), []
    page.set_viewport_size(size or {"width": 1280, "height": 800})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if line.type in ("error", "warning") else None)
    page.on("request", lambda request: None if request.url.startswith(url) else wrong.append(request.url))
    page.goto(url)
    expect(page.locator("#model")).not_to_be_empty()
    return page, wrong


def limit(page: Page, tokens: int) -> None:
    """Answers of that many tokens at most, the likeliest ones, by the settings dialog."""
    page.click("#open-settings")
    page.fill("[name=n_predict]", str(tokens))
    page.fill("[name=temperature]", "0")
    page.click("#settings .main")


def test_a_conversation(context: BrowserContext, server: Running, tmp_path: Path) -> None:
    """By the keyboard alone: a message is sent, its answer streams, is there after a reload, is written anew, and is
    gone with a new chat, from which it comes back."""
    page, wrong = opened(context, server.url)
    expect(page.locator("#prompt")).to_be_focused()
    limit(page, 60)
    page.focus("#prompt")
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    page.keyboard.press("Enter")
    expect(page.locator(".message.user .body")).to_have_text("first line\nsecond line", use_inner_text=True)
    answer = page.locator(".message.assistant")
    expect(answer.locator(".note")).to_contain_text("reached the limit of tokens")
    expect(answer.locator(".note")).to_contain_text("60 tokens")
    text = answer.locator(".body").last.inner_text()
    assert text.strip()
    page.screenshot(path=tmp_path / "wide.png")
    page.reload()
    expect(answer.locator(".body").last).to_have_text(text, use_inner_text=True)
    # From the box backwards through the page: Regenerate is the first that comes, and is pressed by a key.
    page.focus("#prompt")
    page.keyboard.press("Shift+Tab")
    expect(page.locator("#again")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator("#again")).to_be_visible()
    expect(answer).to_have_count(1)
    expect(answer.locator(".body").last).to_have_text(text, use_inner_text=True)   # the likeliest tokens, as before
    page.click("#new-chat")
    expect(page.locator(".message")).to_have_count(0)
    page.click("#notice-action")
    expect(page.locator(".message")).to_have_count(2)
    assert wrong == []


def test_stop_and_live_view(context: BrowserContext, server: Running, tmp_path: Path) -> None:
    """A long answer over streamed pages: the panel shows rates, places of pages and drafts while it is written; Escape
    ends it, on the server too, and what was written stays."""
    page, wrong = opened(context, server.url)
    page.fill("#prompt", LONG)
    page.keyboard.press("Enter")
    expect(page.locator("#speed-note")).to_contain_text("reading")
    body = page.locator(".message.assistant .body").last
    expect(body).to_have_text(SOME_TEXT)
    expect(page.locator("#speed-note")).to_contain_text("writing")
    expect(page.locator("#speed")).to_have_text(re.compile(r"^[\d.,]+ tokens/s$"))
    expect(page.locator("#link")).to_have_text(re.compile(r"^[\d.,]+ GB/s$"))
    expect(page.locator("#strip")).to_contain_text("B/s")
    for name in ("resident", "host"):
        expect(page.locator(f"#count-{name}")).not_to_have_text("0")
    expect(page.locator("#map")).to_have_attribute("aria-label", re.compile("3 layers, .* host only"))
    expect(page.locator("#drafter-list")).to_contain_text("draft-mtp")
    page.focus("#map")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#map-detail")).to_contain_text("layer 7, page 0, tokens 0 to 255")
    page.screenshot(path=tmp_path / "live.png")
    page.keyboard.press("Escape")
    expect(page.locator("#again")).to_be_visible()
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator(".message.assistant .note")).to_contain_text("stopped")
    assert server.idle()
    text = body.inner_text()
    expect(page.locator("#speed-note")).to_have_text("idle")
    assert body.inner_text() == text
    assert wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_window(context: BrowserContext, server: Running, tmp_path: Path, scheme: str) -> None:
    """At 360 pixels nothing is cut off at the side, the panel opens on demand and leaves room for the answer."""
    page, wrong = opened(context, server.url, size={"width": 360, "height": 640}, scheme=scheme)
    expect(page.locator("#live")).to_be_hidden()
    limit(page, 40)
    page.fill("#prompt", "x" * 200)
    page.click("#send")
    expect(page.locator("#again")).to_be_visible()
    page.click("#toggle-live")
    expect(page.locator("#map")).to_be_visible()
    expect(page.locator("#again")).to_be_in_viewport()
    expect(page.locator("#prompt")).to_be_in_viewport(ratio=1)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("document.querySelector('#scroll').scrollWidth <= 360")
    page.click("#open-settings")
    box = page.locator("#settings").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    page.screenshot(path=tmp_path / f"narrow-{scheme}.png")
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    assert wrong == []


HOSTILE = """<img src=x onerror="alert(1)"><script>alert(2)</script> **bold** and `code <b>`

```html
<iframe src="https://example.com"></iframe>
```
"""


def test_text_of_a_model_is_text(context: BrowserContext, server: Running) -> None:
    """Markup in an answer is shown as it was written; code blocks, emphasis and folded thoughts are the only elements
    that text makes. Tampered storage is no answer either."""
    page, wrong = opened(context, server.url)
    message = {"role": "assistant", "content": HOSTILE, "thoughts": "<b>hm</b>"}
    page.evaluate("held => localStorage.setItem('kvs.chat', JSON.stringify(held))",
                  [{"role": "user", "content": "<u>x</u>"}, message, 7, {"role": "assistant", "content": 1}])
    page.reload()
    expect(page.locator(".message")).to_have_count(2)
    answer = page.locator(".message.assistant")
    expect(answer.locator("> .body")).to_contain_text('<img src=x onerror="alert(1)"><script>alert(2)</script>')
    expect(answer.locator("pre")).to_have_text('<iframe src="https://example.com"></iframe>')
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("p code")).to_have_text("code <b>")
    assert page.locator("#messages").locator("img, script, iframe, b, u").count() == 0
    expect(answer.locator(".thoughts .body")).to_be_hidden()
    answer.locator("summary").click()
    expect(answer.locator(".thoughts .body")).to_have_text("<b>hm</b>")
    assert wrong == []


def test_keys_and_errors(context: BrowserContext, llama_path: Path) -> None:
    """Without its key the page says what it wants; with the key it works. An error of the server is one line, and the
    text that was sent is in the box again."""
    with running("-m", llama_path, "-c", 128, "--api-key", "secret", "--api-prefix", "/api") as server:
        page = context.new_page()
        page.goto(f"{server.url}/api")
        expect(page.locator("#notice-text")).to_have_text("This server wants an API key")
        page.click("#notice-action")
        expect(page.locator("[name=key]")).to_be_focused()
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).not_to_be_empty()
        expect(page.locator("#notice")).to_be_hidden()
        page.fill("#prompt", "word " * 300)
        page.keyboard.press("Enter")
        expect(page.locator("#notice-text")).to_contain_text("context")
        assert "\n" not in page.locator("#notice-text").inner_text()
        expect(page.locator("#prompt")).to_have_value(re.compile("^word word"))
        expect(page.locator(".message")).to_have_count(0)
        assert page.evaluate("Object.values(localStorage).join().includes('secret')") is False


def test_thinking(context: BrowserContext, qwen: Running) -> None:
    """Where the template has a switch, the dialog has one: switched on, thoughts come folded; off, there are none. The
    system prompt goes along, and so do the thoughts of the turn before."""
    page, wrong = opened(context, qwen.url)
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    for at, switch in enumerate(("on", "off")):
        limit(page, 12)
        page.click("#open-settings")
        page.select_option("[name=thinking]", switch)
        page.fill("[name=system]", "Be brief.")
        page.keyboard.press("Escape")
        page.fill("#prompt", "x")
        page.keyboard.press("Enter")
        expect(page.locator(".message.assistant")).to_have_count(at + 1)
        expect(page.locator("#again")).to_be_visible()
    thoughts = page.locator(".message.assistant .thoughts")
    expect(thoughts.nth(0).locator("summary")).to_have_text("Thoughts")
    expect(thoughts.nth(0).locator(".body")).to_be_hidden()
    assert (thoughts.nth(0).locator(".body").text_content() or "").strip()
    expect(thoughts.nth(1)).to_be_hidden()
    assert [body["chat_template_kwargs"]["enable_thinking"] for body in sent] == [True, False]
    assert [[message["role"] for message in body["messages"]] for body in sent] == [
        ["system", "user"], ["system", "user", "assistant", "user"]]
    assert sent[1]["messages"][2]["reasoning_content"]
    assert wrong == []

"""The page at /: its files, what they refer to, and who may have them. How it works is in test_browser.py."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

import kvs_cli.server.page
from kvs_cli.commands import serve
from kvs_cli.open_model import OpenModel, open_model
from kvs_cli.render import Screen
from kvs_core.settings import ModelSettings, RopeSettings
from tests.server.running import Running, running

FOLDER = Path(kvs_cli.server.page.__file__).with_name("web")
FILES = {path.name: path.read_text() for path in FOLDER.iterdir()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8",
         "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}


def test_every_file_is_served_with_its_type_and_rules(llama: Running) -> None:
    """Type, policy and a tag; asked again with the tag, it is not sent again. HEAD is GET without the body."""
    for name, text in FILES.items():
        path = "/" if name == "index.html" else f"/web/{name}"
        reply = llama.http.get(path)
        assert (reply.status_code, reply.text) == (200, text), path
        assert reply.headers["content-type"] == TYPES[name.rpartition(".")[2]]
        assert "default-src 'self'" in reply.headers["content-security-policy"]
        assert "unsafe" not in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        tag = reply.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}'):
            again = llama.http.get(path, headers={"If-None-Match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert llama.http.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
        head = llama.http.head(path)
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", tag)
    for path in ("/web/", "/web/index.html", "/web/none.js", "/web/../page.py", "/web/..%2fpage.py"):
        assert llama.http.get(path).status_code == 404, path
    assert llama.http.post("/", json={}).status_code == 404
    assert llama.get("/props")["ui"] is True


def test_nothing_comes_from_elsewhere_and_model_text_never_becomes_markup() -> None:
    """No address of another host, nothing inline that the policy would refuse, and no way from text to HTML or code."""
    for name, text in FILES.items():
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, (name, addresses)
    dangerous = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc"
    for name, text in SCRIPTS.items():
        assert not re.search(dangerous, text), name
    html = FILES["index.html"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", html)


def test_what_the_files_name_is_there() -> None:
    """Every file that the page or a module asks for is served, every imported name is exported, every element that a
    module looks up by its id is in the page, and every label has its element."""
    html = FILES["index.html"]
    for name in re.findall(r"(?:src|href)=\"web/([^\"]+)\"", html):
        assert name in FILES, name
    for text in SCRIPTS.values():
        for names, source in re.findall(r"import \{([^}]+)\} from \"\./([^\"]+)\"", text):
            for name in names.replace(",", " ").split():
                exported = rf"export (?:async )?(?:function\*?|const|class) {re.escape(name)}(?![\w$])"
                assert re.search(exported, SCRIPTS[source]), name
    ids = re.findall(r"\bid=\"([^\"]+)\"", html)
    assert len(ids) == len(set(ids))
    for text in SCRIPTS.values():
        assert set(re.findall(r"\$\(\"([^\"]+)\"\)", text)) <= set(ids)
    for attribute in ("for", "aria-controls", "aria-labelledby", "aria-describedby"):
        assert set(re.findall(rf"\b{attribute}=\"([^\"]+)\"", html)) <= set(ids), attribute


def test_the_page_needs_no_key_and_what_it_shows_does(llama_path: Path) -> None:
    """With keys and a prefix: the page and its files are open, below the prefix alone; the live view is not."""
    with running("-m", llama_path, "-c", 256, "--api-key", "k", "--api-prefix", "/api") as server:
        http = server.http
        for path in ("/api/", "/api/web/app.js", "/api/web/style.css"):
            assert http.get(path).status_code == 200
        moved = http.get("/api")
        assert (moved.status_code, moved.headers["location"]) == (307, "/api/")
        assert http.get("/").status_code == 404
        assert http.get("/web/app.js").status_code == 404
        assert http.get("/api/kvs/live").status_code == 401
        assert http.get("/api/kvs/live", headers={"Authorization": "Bearer k"}).status_code == 200


@pytest.mark.parametrize("flag", ["--no-webui", "--no-ui"])
def test_it_can_be_switched_off(llama_path: Path, flag: str) -> None:
    """Then there is nothing at /, nor its files; the rest is there."""
    with running("-m", llama_path, "-c", 256, flag) as server:
        assert server.http.get("/").status_code == 404
        assert server.http.get("/web/app.js").status_code == 404
        assert server.get("/health") == {"status": "ok"}
        assert server.get("/props")["ui"] is False


def test_the_page_is_there_before_the_model(llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model loads the page comes, and what it asks for says 503."""
    go = threading.Event()

    def slowly(settings: ModelSettings, screen: Screen, rope: RopeSettings) -> OpenModel:
        go.wait(10)
        return open_model(settings, screen, rope)

    monkeypatch.setattr(serve, "open_model", slowly)
    with running("-m", llama_path, "-c", 256, wait=False) as server:
        assert server.http.get("/").status_code == 200
        assert server.http.get("/kvs/live").status_code == 503
        go.set()

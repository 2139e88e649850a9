"""Fetching models: which file a name stands for, and that the network is asked only for what is not there.

The hub is a server on this machine that answers as much of the hub's protocol as is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from kvs_core.errors import ModelFileError, SettingsError
from kvs_core.formats.hub import CachedModel, cache_dir, cached_models, fetch_url, resolve_hf

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secretsecretsecret"


class FakeHub(ThreadingHTTPServer):
    """Repositories as {name: {file: content}}; plain addresses are /plain/NAME and /short/NAME (breaks off)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.plain: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        self.server.tokens.add(self.headers["Authorization"])
        match path.strip("/").split("/"):
            case ["plain", name] if name in self.server.plain:
                self.reply(200, self.server.plain[name], with_body=with_body)
            case ["short", name]:
                self.reply(200, self.server.plain[name], with_body=with_body, missing=3)
            case ["api", "models", "gated", _]:
                self.reply(403, b"", {"X-Error-Code": "GatedRepo"}, with_body=with_body)
            case ["api", "models", user, model] if files := self.server.repos.get(f"{user}/{model}"):
                siblings = [{"rfilename": name, "size": len(body)} for name, body in files.items()]
                info = {"id": f"{user}/{model}", "sha": COMMIT, "siblings": siblings}
                self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, with_body=with_body)
            case [user, model, "resolve", _, *file] if (
                body := self.server.repos.get(f"{user}/{model}", {}).get("/".join(file))
            ) is not None:
                etag = hashlib.sha256(body).hexdigest()
                self.reply(200, body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, with_body=with_body)
            case _:
                self.reply(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body=with_body)

    def reply(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, with_body: bool, missing: int = 0
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body[: len(body) - missing])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own, and no token or proxy from outside."""
    for name in [name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("MODEL_ENDPOINT", raising=False)
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    return tmp_path / "cache"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
        server.shutdown()
        thread.join()


def resolve(repo: str, *, file: str | None = None, token: str | None = None, offline: bool = False) -> Path:
    return resolve_hf(repo, file=file, token=token, offline=offline, progress=None)


def put(cache: Path, repo: str, *names: str, commit: str = COMMIT) -> Path:
    """Files in the cache as the hub's client leaves them; their folder."""
    folder = cache / f"models--{repo.replace('/', '--')}" / "snapshots" / commit
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"GGUF" + name.encode())
    return folder


def files(*names: str) -> dict[str, bytes]:
    return {name: b"GGUF" + name.encode() for name in names}


MODELS = files(
    "README.md", "imatrix.gguf", "m-BF16.gguf", "m-F16.gguf", "m-IQ4_XS.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf",
    "mmproj-F16.gguf", "mtp-m-Q4_K_M.gguf", "UD/m-q6_k-00001-of-00002.gguf", "UD/m-q6_k-00002-of-00002.gguf",
)  # fmt: skip


@pytest.mark.parametrize(
    ("repo", "file", "expected"),
    [
        ("u/m", None, "m-Q4_K_M.gguf"),
        ("u/m:Q8_0", None, "m-Q8_0.gguf"),
        ("u/m:iq4_xs", None, "m-IQ4_XS.gguf"),
        ("u/m:F16", None, "m-F16.gguf"),
        ("u/m:Q6_K", None, "UD/m-q6_k-00001-of-00002.gguf"),
        ("u/m", "m-BF16.gguf", "m-BF16.gguf"),
        ("u/m:Q8_0", "mmproj-F16.gguf", "mmproj-F16.gguf"),
    ],
)
def test_a_name_means_the_same_file_online_and_offline(
    hub: FakeHub, cache: Path, repo: str, file: str | None, expected: str
) -> None:
    """The rules for quant and file choose alike from the hub's list and, later, from the cache without any request."""
    hub.repos["u/m"] = MODELS
    path = resolve(repo, file=file)
    assert path.relative_to(cache / "models--u--m" / "snapshots" / COMMIT).as_posix() == expected
    assert path.read_bytes() == MODELS[expected]
    hub.requests.clear()
    assert resolve(repo, file=file) == path
    assert resolve(repo, file=file, offline=True) == path
    assert hub.requests == []


def test_what_is_broken_in_the_cache_is_not_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that lead nowhere, files in a folder's place and files that go away meanwhile hide no other model."""
    folder = put(cache, "u/m", "m-Q4_K_M.gguf", "going-Q8_0.gguf")
    (folder.parent / "dangling").symlink_to("nowhere")
    (folder.parent / "file").write_bytes(b"")
    (folder / "n-Q4_K_M.gguf").symlink_to("nowhere")
    (cache / "models--u--dangling").symlink_to("nowhere")
    (cache / "models--u--file").write_bytes(b"")
    stat = Path.stat

    def gone(path: Path, **options: Any) -> os.stat_result:
        if path.name.startswith("going"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", gone)
    assert [(model.source, model.file) for model in cached_models()] == [("u/m", "m-Q4_K_M.gguf")]
    assert resolve("u/m", offline=True) == folder / "m-Q4_K_M.gguf"
    for repo in ("u/dangling", "u/file"):
        with pytest.raises(ModelFileError, match="not in the cache"):
            resolve(repo, offline=True)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["b-Q8_0.gguf", "a-Q5_K_M.gguf"], "b-Q8_0.gguf"),
        (["b-Q5_K_M.gguf", "a-Q5_0.gguf", "mmproj-a.gguf"], "a-Q5_0.gguf"),
        (["Q4_K_M/x.gguf", "y.q4_k_m.gguf"], "y.q4_k_m.gguf"),
        (["m-Q4_K_M-00002-of-00002.gguf", "m-Q4_K_M-00001-of-00002.gguf"], "m-Q4_K_M-00001-of-00002.gguf"),
    ],
)
def test_without_a_quant(hub: FakeHub, names: list[str], expected: str) -> None:
    """Q4_K_M, else Q8_0, else the first model file; quants are read in file names alone."""
    hub.repos["u/m"] = files(*names)
    assert resolve("u/m").name == expected


def test_split_model_is_fetched_whole(hub: FakeHub) -> None:
    """All parts arrive beside the first, and progress counts the bytes of all."""
    parts = [f"m-Q4_K_M-0000{no}-of-00003.gguf" for no in (1, 2, 3)]
    hub.repos["u/m"] = files(*parts)
    seen: list[tuple[int, int]] = []
    path = resolve_hf("u/m", file=None, token=None, offline=False, progress=lambda done, of: seen.append((done, of)))
    assert path.name == parts[0]
    assert sorted(other.name for other in path.parent.iterdir()) == parts
    total = sum(map(len, hub.repos["u/m"].values()))
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {of for _, of in seen} == {total}


def test_split_model_with_a_part_missing(hub: FakeHub, cache: Path) -> None:
    """Missing on the hub it is refused; missing in the cache it is fetched again, or refused offline."""
    first, second = "m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf"
    hub.repos["u/m"] = files(first)
    with pytest.raises(ModelFileError, match=f"lacks {second}"):
        resolve("u/m")
    put(cache, "u/m", first)
    with pytest.raises(ModelFileError, match="not in the cache"):
        resolve("u/m", offline=True)
    hub.repos["u/m"] = files(first, second)
    assert resolve("u/m").with_name(second).is_file()


def test_cached_file_of_another_quant_does_not_hide_the_default(hub: FakeHub, cache: Path) -> None:
    """Online the hub decides what a bare name means; offline the cache does."""
    put(cache, "u/m", "m-Q8_0.gguf")
    hub.repos["u/m"] = MODELS
    assert resolve("u/m", offline=True).name == "m-Q8_0.gguf"
    assert resolve("u/m").name == "m-Q4_K_M.gguf"


def test_unfinished_download_is_no_model(cache: Path) -> None:
    """A link to a blob that is not there counts as absent."""
    folder = put(cache, "u/m", "m-Q8_0.gguf")
    (folder / "m-Q4_K_M.gguf").symlink_to("../../blobs/gone")
    assert resolve("u/m", offline=True).name == "m-Q8_0.gguf"
    assert [model.file for model in cached_models()] == ["m-Q8_0.gguf"]


def refused(repo: str, **options: Any) -> str:
    with pytest.raises(ModelFileError) as error:
        resolve(repo, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_the_hub_does_not_have(hub: FakeHub) -> None:
    """Unknown and gated repositories, quants and files: each says what to do."""
    hub.repos["u/m"] = MODELS
    hub.repos["u/none"] = files("README.md")
    assert "or is private: check the name" in refused("u/unknown")
    assert "accept its terms" in refused("gated/m")
    message = refused("u/m:Q2_K")
    assert "has no GGUF model Q2_K; its model files: UD/m-q6_k-00001-of-00002.gguf, m-BF16.gguf" in message
    assert "has no x.gguf" in refused("u/m", file="x.gguf")
    assert "has no GGUF model; its model files: none" in refused("u/none")


def test_offline_and_without_network(cache: Path) -> None:
    """Neither a flag nor a dead network leads to more than one line; the line names the cache or the address."""
    assert f"is not in the cache {cache}; run once without --offline" in refused("u/m", offline=True)
    message = refused("u/m")
    assert "cannot be fetched from http://127.0.0.1:9: " in message
    assert "--offline" in message


def test_token_is_sent_and_never_said(hub: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    """The token reaches the hub and no message or log."""
    hub.repos["u/m"] = MODELS
    resolve("u/m", token=TOKEN)
    assert f"Bearer {TOKEN}" in hub.tokens
    assert TOKEN not in refused("u/unknown", token=TOKEN)
    with pytest.raises(SettingsError) as error:
        resolve("u/m:Q8_0", token=f"{TOKEN}\n")
    assert TOKEN not in str(error.value)
    captured = capfd.readouterr()
    assert TOKEN not in captured.out + captured.err


@pytest.mark.parametrize("repo", ["", "m", "/m", "u/m/x", "u/m:", "../m", "u/a--b", "u/m:Q K", "u/m:../x", "ü/m"])
def test_malformed_repository_is_refused(repo: str) -> None:
    """Only user/model and user/model:quant are names."""
    with pytest.raises(SettingsError, match="write user/model"):
        resolve(repo)


def test_cache_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """LLAMA_CACHE, HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME and the home folder, in this order."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LLAMA_CACHE")
    assert cache_dir() == tmp_path / "home/.cache/huggingface/hub"
    places = {"XDG_CACHE_HOME": "huggingface/hub", "HF_HOME": "hub", "HF_HUB_CACHE": "", "LLAMA_CACHE": ""}
    for name, below in places.items():
        monkeypatch.setenv(name, str(tmp_path / name))
        assert cache_dir() == tmp_path / name / below


def test_plain_address(hub: FakeHub, cache: Path) -> None:
    """A file is fetched once, with progress; then it is there without a request. Queries keep files apart."""
    hub.plain["a b.gguf"] = b"GGUF" + bytes(3 << 20)
    url = f"{hub.url}/plain/a%20b.gguf"
    seen: list[tuple[int, int]] = []
    path = fetch_url(url, offline=False, progress=lambda done, of: seen.append((done, of)))
    assert path.read_bytes() == hub.plain["a b.gguf"]
    assert path.is_relative_to(cache)
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
    hub.requests.clear()
    assert fetch_url(url, offline=False, progress=None) == path
    assert fetch_url(url, offline=True, progress=None) == path
    assert hub.requests == []
    assert fetch_url(f"{url}?v=2", offline=False, progress=None) != path
    assert [model.file for model in cached_models()] == ["a b.gguf"] * 2


def test_plain_address_of_a_split_model(hub: FakeHub) -> None:
    """The address of a part brings all parts."""
    parts = [f"m-0000{no}-of-00002.gguf" for no in (1, 2)]
    hub.plain.update(files(*parts))
    path = fetch_url(f"{hub.url}/plain/{parts[0]}?key=1", offline=False, progress=None)
    assert [path.name, path.with_name(parts[1]).read_bytes()] == [parts[0], hub.plain[parts[1]]]


def test_plain_address_that_fails(hub: FakeHub, cache: Path) -> None:
    """Absent, cut short, unreachable, offline, unwritable: one line each, nothing kept, no secret of an address."""
    hub.plain["m.gguf"] = b"GGUF123456"

    def message(url: str, *, offline: bool = False) -> str:
        with pytest.raises(ModelFileError) as error:
            fetch_url(url, offline=offline, progress=None)
        assert "\n" not in str(error.value)
        assert "secret" not in str(error.value)
        return str(error.value)

    assert "the server answers 404" in message(f"{hub.url}/plain/x.gguf?secret")
    assert "broke off after 7 of 10 bytes" in message(f"{hub.url}/short/m.gguf?secret")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert "cannot be fetched" in message(f"http://user:secret@127.0.0.1:{port}/m.gguf")
    assert "cannot be kept" in message(f"{hub.url}/plain/{'m' * 300}.gguf")
    assert "without --offline" in message(f"{hub.url}/plain/m.gguf?secret", offline=True)
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    shutil.rmtree(cache / "urls")
    (cache / "urls").write_bytes(b"in the way")
    assert "cannot be kept" in message(f"{hub.url}/plain/m.gguf")


@pytest.mark.parametrize(
    "url", ["", "m.gguf", "file:///etc/passwd", "ftp://h/m.gguf", "http://", "http://h", "http://h/", "http://h:x/m.gguf",
            "http://h/%2e%2e", "http://h/../m.gguf", "http://h/a%2Fb/..%2Fm.gguf", "http://[::1/m.gguf"],
)  # fmt: skip
def test_malformed_address_is_refused(url: str) -> None:
    """Only http and https addresses that end in a file name are fetched, and nothing leaves the cache folder."""
    with pytest.raises(SettingsError):
        fetch_url(url, offline=False, progress=None)


def test_cached_models(cache: Path) -> None:
    """The list has each complete model once: of split ones the first part with all bytes, of two states the newer."""
    assert cached_models() == []
    one, two = "s-00001-of-00002.gguf", "s-00002-of-00002.gguf"
    old = put(cache, "u/m", "a.gguf", one, two, "mmproj.gguf", commit="a" * 40)
    new = put(cache, "u/m", "a.gguf", "half-00001-of-00002.gguf", commit="b" * 40)
    os.utime(old, (1, 1))
    other = put(cache, "another/model-GGUF", "sub/x.gguf")
    assert cached_models() == [
        CachedModel("another/model-GGUF", "sub/x.gguf", len("GGUFsub/x.gguf"), other / "sub/x.gguf"),
        CachedModel("u/m", "a.gguf", len("GGUFa.gguf"), new / "a.gguf"),
        CachedModel("u/m", one, 2 * len(f"GGUF{one}"), old / one),
    ]

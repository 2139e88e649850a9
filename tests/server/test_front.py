"""What every request passes: keys, CORS, loading, prefixes; the small endpoints; TLS and sockets."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_cli.commands import serve
from kvs_cli.open_model import OpenModel, open_model
from kvs_cli.render import Screen
from kvs_core.errors import SettingsError
from kvs_core.settings import ModelSettings, RopeSettings
from tests.server.running import Running, running
from tests.server.scrapes import scrape

ORIGIN = "https://page.example"


def test_small_endpoints(llama: Running) -> None:
    """Health, models, props, slots and metrics have llama-server's names and shapes."""
    assert llama.get("/health") == llama.get("/v1/health") == {"status": "ok"}
    models = llama.get("/v1/models")
    assert models == llama.get("/models")
    assert models["data"][0]["id"] == models["models"][0]["name"] == "tiny"
    assert models["data"][0]["meta"]["n_ctx"] == 1024
    props = llama.get("/props")
    assert props["total_slots"] == 1
    assert props["default_generation_settings"]["params"]["top_k"] == 40
    assert props["chat_template_caps"]["supports_system_role"]
    assert not props["chat_template_caps"]["supports_tools"]
    assert props["bos_token"] == "<|begin_of_text|>"
    assert llama.post("/props") == {"success": True}
    llama.post("/completion", prompt="x", n_predict=2)
    [slot] = llama.get("/slots")
    assert (slot["id"], slot["n_ctx"], slot["is_processing"]) == (0, 1024, False)
    assert slot["next_token"][0]["n_decoded"] == 2
    assert llama.get("/lora-adapters") == []


def test_metrics_count(llama: Running) -> None:
    """Counters rise by what a request did; averages are since the last scrape."""
    before = scrape(llama.http)
    reply = llama.post("/completion", prompt="The sea is wide", n_predict=7, ignore_eos=True, cache_prompt=False)
    after = scrape(llama.http)
    gained = {name: after[name] - before[name] for name in after}
    assert gained["llamacpp:tokens_predicted_total"] == 7
    assert gained["llamacpp:prompt_tokens_total"] == reply["tokens_evaluated"]
    assert gained["llamacpp:prompt_seconds_total"] > 0
    assert after["llamacpp:predicted_tokens_seconds"] > 0
    assert after["llamacpp:prompt_tokens_seconds"] == pytest.approx(
        gained["llamacpp:prompt_tokens_total"] / gained["llamacpp:prompt_seconds_total"])
    idle = scrape(llama.http)
    assert idle["llamacpp:predicted_tokens_seconds"] == idle["llamacpp:prompt_tokens_seconds"] == 0
    assert after["kvs:arena_bytes"] > 0


@pytest.mark.parametrize(("method", "path", "status", "kind"), [
    ("GET", "/nope", 404, "not_found_error"),
    ("GET", "/completion", 404, "not_found_error"),
    ("DELETE", "/v1/models", 404, "not_found_error"),
    ("POST", "/v1/embeddings", 501, "not_supported_error"),
    ("POST", "/rerank", 501, "not_supported_error"),
    ("POST", "/infill", 501, "not_supported_error"),
    ("GET", "/tools", 403, "feature_disabled"),
])  # fmt: skip
def test_what_is_not_there(llama: Running, method: str, path: str, status: int, kind: str) -> None:
    """An error object with the status that llama-server gives."""
    reply = llama.http.request(method, path)
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)


def test_keys_prefix_and_switches(llama_path: Path, tmp_path: Path) -> None:
    """Keys of flags and of a file open what the health check alone is open without; the prefix stands before every
    route; what is switched off says so."""
    file = tmp_path / "keys"
    file.write_text("# ours\n\nfrom-file\n")
    with running("-m", llama_path, "-c", 256, "--api-key", "a,b", "--api-key-file", file, "--api-prefix", "/api",
                 "--no-slots") as server:
        http = server.http
        assert http.get("/api/health").status_code == 200
        assert http.get("/health").status_code == 404
        assert http.get("/api/v1/models").status_code == 401
        for headers in ({"Authorization": "Bearer b"}, {"Authorization": "a"}, {"X-Api-Key": "from-file"}):
            assert http.get("/api/v1/models", headers=headers).status_code == 200
        for headers in ({"Authorization": "Bearer"}, {"X-Api-Key": "# ours"}, {"X-Api-Key": "ab"}):
            assert http.get("/api/v1/models", headers=headers).status_code == 401
        for path in ("/api/metrics", "/api/slots"):
            assert http.get(path, headers={"X-Api-Key": "a"}).status_code == 501


def test_cors(llama: Running, llama_path: Path) -> None:
    """By default the origin is echoed, with credentials; preflight needs no key; local origins alone where asked."""
    reply = llama.http.get("/health", headers={"Origin": ORIGIN})
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    reply = llama.http.options("/v1/chat/completions", headers={"Origin": ORIGIN})
    assert (reply.status_code, reply.content) == (200, b"")
    assert reply.headers["access-control-allow-credentials"] == "true"
    assert "POST" in reply.headers["access-control-allow-methods"]
    with running("-m", llama_path, "-c", 256, "--cors-origins", "localhost", "--api-key", "k") as server:
        assert "access-control-allow-origin" not in server.http.get("/health", headers={"Origin": ORIGIN}).headers
        reply = server.http.options("/props", headers={"Origin": "http://localhost:3000"})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "http://localhost:3000")


def test_the_port_is_open_before_the_model_is_there(llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then every route says 503, also to those without a key."""
    go = threading.Event()

    def slowly(settings: ModelSettings, screen: Screen, rope: RopeSettings) -> OpenModel:
        go.wait(10)
        return open_model(settings, screen, rope)

    monkeypatch.setattr(serve, "open_model", slowly)
    with running("-m", llama_path, "-c", 256, "--api-key", "k", wait=False) as server:
        for path in ("/health", "/v1/models", "/nope"):
            reply = server.http.get(path)
            assert (reply.status_code, reply.json()["error"]["message"]) == (503, "Loading model")
        go.set()
        while server.http.get("/health").status_code == 503:
            pass
        assert server.http.get("/health").json() == {"status": "ok"}


def test_tls_and_unix_sockets(llama_path: Path, tmp_path: Path) -> None:
    """Both at once; a certificate without its key, or one that is none, is refused before anything listens."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not there to make a certificate")
    key, cert, sock = tmp_path / "key.pem", tmp_path / "cert.pem", tmp_path / "kvs.sock"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    argv = ("-m", llama_path, "-c", 256, "--ssl-key-file", key, "--ssl-cert-file", cert)
    with running(*argv) as server:
        with httpx.Client(verify=ssl.create_default_context(cafile=str(cert)), trust_env=False) as http:
            assert http.get(f"{server.url}/health").json() == {"status": "ok"}
        with pytest.raises(httpx.ConnectError):
            server.http.get("/health")   # which does not know the certificate
    with running("-m", llama_path, "-c", 256, "--host", f"127.0.0.1,{sock}") as server:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(sock))) as http:
            assert http.get("http://kvs/health").json() == {"status": "ok"}
        assert server.get("/health") == {"status": "ok"}
    assert not sock.exists()
    with pytest.raises(SettingsError, match="--ssl-key-file needs --ssl-cert-file"), running("--ssl-key-file", key):
        pass
    with pytest.raises(SettingsError, match="give a certificate and its key"), running(
        "--ssl-key-file", cert, "--ssl-cert-file", key
    ):
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6,
)
FIELDS = (
    "prompt", "messages", "input", "system", "max_tokens", "n_predict", "temperature", "top_k", "seed", "stop",
    "stream", "stream_options", "logit_bias", "samplers", "n_probs", "logprobs", "top_logprobs", "grammar",
    "json_schema", "tools", "tool_choice", "response_format", "chat_template_kwargs", "reasoning_effort",
    "cache_prompt", "id_slot", "content", "tokens", "response_fields", "lora", "n", "dry_sequence_breakers",
    "mirostat", "thinking", "stop_sequences", "sse_ping_interval", "repeat_penalty", "continue_final_message",
    "text", "instructions", "return_progress",
)
PATHS = ("/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize",
         "/detokenize", "/apply-template")


@settings(max_examples=80)
@given(
    path=st.sampled_from(PATHS), body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5), sound=st.booleans()
)
def test_no_request_makes_the_server_fail(llama: Running, path: str, body: dict[str, object], sound: bool) -> None:
    """Whatever the fields hold, the answer is a reply or a 400 of one line; the next request is answered too."""
    sound_part: dict[str, object] = {
        "prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x", "n_predict": 2, "max_tokens": 2,
    }  # fmt: skip
    body = (sound_part | body if sound else body) | {"n_predict": 2}
    if isinstance(body.get("max_tokens"), int | float):
        body["max_tokens"] = 2
    reply = llama.http.post(path, json=body)
    assert reply.status_code in (200, 400), (body, reply.text)
    if reply.status_code == 400:
        assert "\n" not in reply.json()["error"]["message"]

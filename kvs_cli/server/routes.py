"""The routes: which function answers what, and the functions. Bare ``/completions`` is llama-server's own API."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from kvs_cli.server import anthropic, responses
from kvs_cli.server.about import models_json, props_json, slots_json
from kvs_cli.server.anthropic import AnthropicFormat
from kvs_cli.server.chat import Chat, chat_task, read_chat
from kvs_cli.server.chat_replies import ChatFormat
from kvs_cli.server.errors import ApiError, bad_request
from kvs_cli.server.fields import Fields
from kvs_cli.server.front import Endpoint, not_found
from kvs_cli.server.generation import Task
from kvs_cli.server.http import Client, JsonReply, read_body
from kvs_cli.server.infill import check_infill, infill_prompt
from kvs_cli.server.options import Options
from kvs_cli.server.replies import Format, NativeFormat, TextFormat
from kvs_cli.server.responses import ResponsesFormat
from kvs_cli.server.service import Service
from kvs_cli.server.slot import is_plain_name

Handler = Callable[[Service, Request], Awaitable[Response]]

_SLOT = re.compile(r"/slots/([^/]+)")


class Routes:
    """Endpoints by method and path, for the service that ``current`` gives."""

    def __init__(self, current: Callable[[], Service]) -> None:
        self._current = current

    def find(self, method: str, path: str) -> Endpoint:
        """The endpoint; ApiError 404 if there is none."""
        handler = _HANDLERS.get((method, path))
        if handler is None and method == "POST" and (slot := _SLOT.fullmatch(path)):
            handler = partial(_slot_action, slot=slot[1])
        if handler is None:
            raise not_found()
        return partial(handler, self._current())


async def _health(service: Service, request: Request) -> Response:
    return JsonReply({"status": "ok"})


async def _models(service: Service, request: Request) -> Response:
    return JsonReply(models_json(service))


async def _props(service: Service, request: Request) -> Response:
    return JsonReply(await service.off_loop(props_json, service))   # it asks the template what it can do


async def _set_props(service: Service, request: Request) -> Response:
    if not service.settings.props:
        raise _not_supported("start the server with --props for POST /props")
    return JsonReply({"success": True})


async def _slots(service: Service, request: Request) -> Response:
    if not service.settings.slots:
        raise _not_supported("GET /slots is switched off; start the server without --no-slots")
    if request.query_params.get("fail_on_no_slot") and (service.room.view.processing or service.queue.waiting):
        raise ApiError("unavailable_error", "no slot available")
    return JsonReply(slots_json(service))


async def _metrics(service: Service, request: Request) -> Response:
    if not service.settings.metrics:
        raise _not_supported("start the server with --metrics for GET /metrics")
    headers = {"Process-Start-Time-Unix": str(service.created)}
    return Response(generate_latest(service.registry), headers=headers, media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def _live(service: Service, request: Request) -> Response:
    service.room.live.polled()
    return JsonReply(service.room.live.as_json(service.queue.waiting))


async def _native(service: Service, request: Request) -> Response:
    return await _completion(service, request, NativeFormat)


async def _text(service: Service, request: Request) -> Response:
    return await _completion(service, request, TextFormat)


async def _completion(
    service: Service, request: Request, kind: type[NativeFormat] | type[TextFormat]
) -> Response:
    body = await read_body(request, service.settings.listen.timeout_s)

    def prepare() -> list[Task]:
        options = Options.read(body, service.defaults, service.model.tokenizer)
        prompts = service.prompts.prompts(body.get("prompt"))
        return [service.task(prompt, options, constraint=service.constraint(options)) for prompt in prompts]

    async with _client(request) as client:
        tasks = await client.or_gone(service.off_loop(prepare))
        return await service.reply(client, tasks, kind(tasks, service.names, service.model.tokenizer))


async def _chat(service: Service, request: Request) -> Response:
    return await _chat_reply(service, request, lambda body: body, lambda chat, task: ChatFormat(
        chat, task, service.names, service.model.tokenizer))


async def _messages(service: Service, request: Request) -> Response:
    return await _chat_reply(service, request, anthropic.to_openai, lambda chat, task: AnthropicFormat(
        chat, task, service.names))


async def _responses(service: Service, request: Request) -> Response:
    return await _chat_reply(service, request, responses.to_openai, lambda chat, task: ResponsesFormat(
        chat, task, service.names))


async def _chat_reply(
    service: Service, request: Request, convert: Callable[[Fields], Fields], build: Callable[[Chat, Task], Format]
) -> Response:
    body = await read_body(request, service.settings.listen.timeout_s)

    def prepare() -> tuple[Chat, Task]:
        chat = read_chat(convert(body), service)
        return chat, chat_task(chat, service)

    async with _client(request) as client:
        chat, task = await client.or_gone(service.off_loop(prepare))
        return await service.reply(client, [task], build(chat, task))


async def _count(
    service: Service, request: Request, convert: Callable[[Fields], Fields], shown: dict[str, Any]
) -> Response:
    body = await read_body(request, service.settings.listen.timeout_s)

    def count() -> int:
        return len(service.prompts.encode(read_chat(convert(body), service).text))

    return JsonReply({"input_tokens": await service.off_loop(count)} | shown)


async def _apply_template(service: Service, request: Request) -> Response:
    body = await read_body(request, service.settings.listen.timeout_s)
    chat = await service.off_loop(read_chat, body, service)
    return JsonReply({"prompt": chat.text})


async def _tokenize(service: Service, request: Request) -> Response:
    body = await read_body(request, service.settings.listen.timeout_s)

    def tokenize() -> list[Any]:
        if "content" not in body:
            return []
        tokens = service.prompts.tokens(
            body["content"], add_special=body.flag("add_special", False), parse_special=body.flag("parse_special", True)
        )
        if not body.flag("with_pieces", False):
            return list(tokens)
        return [{"id": token, "piece": _piece(service.model.tokenizer.token_bytes(token, special=True))}
                for token in tokens]

    return JsonReply({"tokens": await service.off_loop(tokenize)})


async def _detokenize(service: Service, request: Request) -> Response:
    body = await read_body(request, service.settings.listen.timeout_s)

    def detokenize() -> str:
        tokens = service.prompts.tokens(body.array("tokens"), add_special=False)
        return service.model.tokenizer.decode(tokens, special=True)

    return JsonReply({"content": await service.off_loop(detokenize)})


async def _slot_action(service: Service, request: Request, *, slot: str) -> Response:
    if slot != "0":
        raise bad_request("Invalid slot ID")
    action = request.query_params.get("action")
    conversation = service.room.conversation
    if action in ("save", "restore"):
        if not conversation.can_save:
            raise _not_supported("start the server with --slot-save-path to save and restore slots")
        body = await read_body(request, service.settings.listen.timeout_s)
        name = body.text("filename")
        if not is_plain_name(name):
            raise bad_request("Invalid filename")
        async with _client(request) as client:
            start_s = time.perf_counter()
            work = conversation.save if action == "save" else conversation.restore
            saved = await service.call(client, partial(work, name))
        took_ms = (time.perf_counter() - start_s) * 1e3
        words = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
        return JsonReply({
            "id_slot": 0, "filename": name, words[0]: saved.tokens, words[1]: saved.size_bytes,
            "timings": {f"{action}_ms": took_ms},
        })
    if action != "erase":
        raise bad_request("Invalid action")
    async with _client(request) as client:
        erased = await service.call(client, conversation.erase)
    return JsonReply({"id_slot": 0, "n_erased": erased})


async def _infill(service: Service, request: Request) -> Response:
    check_infill(service.model.tokenizer)
    body = await read_body(request, service.settings.listen.timeout_s)

    def prepare() -> list[Task]:
        prompt = infill_prompt(
            body, service.prompts, service.model.tokenizer, service.context, n_predict=service.defaults.n_predict,
            spm=service.settings.spm_infill,
        )
        options = Options.read(body, service.defaults, service.model.tokenizer)
        return [service.task(prompt, options, constraint=service.constraint(options))]

    async with _client(request) as client:
        tasks = await client.or_gone(service.off_loop(prepare))
        return await service.reply(client, tasks, NativeFormat(tasks, service.names, service.model.tokenizer))


async def _unsupported(service: Service, request: Request, *, what: str) -> Response:
    raise _not_supported(f"kvs makes text alone: this server does not support {what}")


async def _disabled(service: Service, request: Request) -> Response:
    error = {"message": "this feature is disabled", "type": "feature_disabled"}
    return JsonReply({"error": error}, 403)


async def _adapters(service: Service, request: Request) -> Response:
    return JsonReply([])


@asynccontextmanager
async def _client(request: Request) -> AsyncIterator[Client]:
    """The client of a request that was read. If the block fails it is let go; else the response listens on, or ends."""
    client = Client(request.receive)
    try:
        yield client
    except BaseException:
        client.close()
        raise


def _not_supported(message: str) -> ApiError:
    return ApiError("not_supported_error", message)


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


_HANDLERS: dict[tuple[str, str], Handler] = {
    **{("GET", path): _health for path in ("/health", "/v1/health")},
    **{("GET", path): _models for path in ("/models", "/v1/models")},
    ("GET", "/props"): _props,
    ("POST", "/props"): _set_props,
    ("GET", "/slots"): _slots,
    ("GET", "/metrics"): _metrics,
    ("GET", "/kvs/live"): _live,
    **{("POST", path): _native for path in ("/completion", "/completions")},
    ("POST", "/v1/completions"): _text,
    **{("POST", path): _chat for path in ("/chat/completions", "/v1/chat/completions")},
    ("POST", "/v1/messages"): _messages,
    **{("POST", path): _responses for path in ("/responses", "/v1/responses")},
    **{("POST", f"{path}/input_tokens"): partial(
        _count, convert=lambda body: body, shown={"object": "response.input_tokens"})
       for path in ("/chat/completions", "/v1/chat/completions")},
    **{("POST", f"{path}/input_tokens"): partial(
        _count, convert=responses.to_openai, shown={"object": "response.input_tokens"})
       for path in ("/responses", "/v1/responses")},
    ("POST", "/v1/messages/count_tokens"): partial(_count, convert=anthropic.to_openai, shown={}),
    ("POST", "/tokenize"): _tokenize,
    ("POST", "/detokenize"): _detokenize,
    ("POST", "/apply-template"): _apply_template,
    ("GET", "/lora-adapters"): _adapters,
    ("POST", "/infill"): _infill,
    **{("POST", path): partial(_unsupported, what=what) for what, paths in {
        "embeddings": ("/embedding", "/embeddings", "/v1/embeddings"),
        "reranking": ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"),
        "adapters": ("/lora-adapters",),
        "audio": ("/audio/transcriptions", "/v1/audio/transcriptions"),
    }.items() for path in paths},
    **{(method, path): _disabled for method in ("GET", "POST") for path in ("/tools", "/cors-proxy")},
}

"""``kvs serve``: the model behind llama-server's API. Listens first, loads then, serves until a signal.

    main thread     sockets ─ event loop: requests, replies, signals
    engine thread   file, tokenizer, weights ─ jobs, one after the other ─ memory given back
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kvs_cli.constraint import compile_constraint, read_constraint
from kvs_cli.open_model import OpenModel, open_engine, open_model, plan_context
from kvs_cli.prompt import read_template, with_template
from kvs_cli.render import Screen
from kvs_cli.server.about import build_info, model_name
from kvs_cli.server.front import Front, read_keys
from kvs_cli.server.generation import Room
from kvs_cli.server.jobs import JobQueue
from kvs_cli.server.listen import Listener
from kvs_cli.server.metrics import Metrics
from kvs_cli.server.options import Defaults
from kvs_cli.server.page import Page
from kvs_cli.server.prompts import PromptReader
from kvs_cli.server.replies import Names
from kvs_cli.server.routes import Routes
from kvs_cli.server.service import Service
from kvs_cli.server.slot import Conversation
from kvs_core.device.choose import begin_opening
from kvs_core.engine.context_shift import most_kept
from kvs_core.engine.engine import Engine
from kvs_core.engine.parked import ParkedSessions
from kvs_core.engine.session import Session
from kvs_core.engine.session_file import model_key
from kvs_core.errors import SettingsError
from kvs_core.formats.grammar import GrammarCompiler
from kvs_core.models.rope import divisors_name
from kvs_core.sampling.params import SamplingParams
from kvs_core.settings import ContextPlan, ServeSettings
from kvs_core.units import MIB

LOGGER = logging.getLogger(__name__)

_ENGINE_END_S = 30   # to give memory back, once the last step is done
_SMALLEST_POOL = 4


def execute(settings: ServeSettings) -> int:
    """Serve; the exit code. Raises ``KvsError`` for what keeps it from serving."""
    server = Server(settings)
    server.run()
    return 0


class Server:
    """One server. ``run`` in the thread that is to hold the event loop; ``stop`` from any other."""

    def __init__(self, settings: ServeSettings) -> None:
        """Opens the port. Raises SettingsError."""
        folder = settings.cache.folder
        if folder is not None and not folder.is_dir():
            raise SettingsError(f"--slot-save-path {folder}: is no folder; make it first")
        # What is in files is read now: who gave a wrong one is not to wait for the model to hear of it.
        self._settings = replace(
            settings, chat=with_template(settings.chat), constraint=read_constraint(settings.constraint))
        self._screen = Screen.of(settings.logging)
        self._service: Service | None = None
        self._failure: BaseException | None = None
        self._queue = JobQueue()
        self._threads = ThreadPoolExecutor(
            settings.listen.threads or max(_SMALLEST_POOL, os.cpu_count() or 1), thread_name_prefix="request"
        )
        self._engine_thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)
        keys = read_keys(settings.access)
        routes = Routes(lambda: _there(self._service))
        self._front = Front(
            routes.find, settings.access, keys, prefix=settings.listen.prefix, is_ready=lambda: self.ready,
            page=Page(settings.listen.prefix) if settings.page else None,
        )
        self._listener = Listener(settings.listen)

    @property
    def urls(self) -> list[str]:
        """Where it listens."""
        return self._listener.urls

    @property
    def ready(self) -> bool:
        """Whether the model is there."""
        return self._service is not None

    def run(self) -> None:
        """Load, serve, end. Raises what kept the model from being loaded, or ended the engine."""
        asyncio.run(self._listener.serve(self._front, self._engine_thread.start, self._queue.close))
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._engine_thread.join(_ENGINE_END_S)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Let ``run`` come to its end."""
        self._listener.stop()

    def _run_engine(self) -> None:
        settings = self._settings
        try:
            begin_opening(settings.engine.device)
            model = open_model(settings.engine.model, self._screen, settings.engine.rope)
            context = plan_context(model, settings.engine)
            _say_what_is_kept(settings, context, bos=model.tokenizer.add_bos)
            template = read_template(model, settings.chat)
            grammars = GrammarCompiler(model.tokenizer, model.spec.n_vocab)
            defaults = _defaults(settings, model, grammars)
            with open_engine(model, settings.engine, self._screen) as engine:
                self._service = Service(
                    settings=settings,
                    model=model,
                    context=context,
                    template=template,
                    defaults=defaults,
                    grammars=grammars,
                    prompts=PromptReader(model.tokenizer, context),
                    room=_room(settings, model, engine),
                    names=Names(model_name(settings, model.file), build_info()),
                    queue=self._queue,
                    threads=self._threads,
                )
                LOGGER.info("the model is loaded: %d tokens of context", context.context_tokens)
                self._queue.run()
        except BaseException as error:
            self._failure = error
        finally:
            self._queue.close()
            self._listener.stop()


def _say_what_is_kept(settings: ServeSettings, context: ContextPlan, *, bos: bool) -> None:
    """Where that is less than ``--keep``, which stands for the ``n_keep`` of requests and is cut down as they are."""
    keep, most = settings.engine.context.keep, most_kept(context.context_tokens, bos=bos)
    if settings.engine.context.shift and keep > most:
        LOGGER.warning(
            "--keep %d: context shifts of a context of %d tokens keep %d at most", keep, context.context_tokens, most
        )


def _room(settings: ServeSettings, model: OpenModel, engine: Engine) -> Room:
    cache = settings.cache
    # Where nothing may be set aside, the conversation in hand still has its checkpoints.
    limit_bytes = cache.ram_mib * MIB if cache.ram_mib > 0 else sys.maxsize
    checkpoints = engine.make_checkpoints(cache.checkpoints, limit_bytes) if cache.checkpoints else None
    session = Session(engine, checkpoints, checkpoint_tokens=cache.checkpoint_tokens)
    parked = ParkedSessions(
        cache.ram_mib * MIB if cache.ram_mib >= 0 else sys.maxsize,
        short_tokens=engine.context.ubatch_tokens,   # read again in less than one step
    )
    divisors = divisors_name(model.spec.rope, engine.context.context_tokens)
    key = model_key(model.file, settings.engine.rope, divisors)
    return Room(
        Conversation(session, key, cache.folder, parked),
        model.tokenizer, Metrics(), speculative=settings.engine.speculative, special=settings.replies.special,
        shifts=settings.engine.context.shift,
    )


def _defaults(settings: ServeSettings, model: OpenModel, grammars: GrammarCompiler) -> Defaults:
    replies = settings.replies
    constraint = settings.constraint
    compile_constraint(constraint, grammars)   # what is none is refused now, not with every request
    return Defaults(
        sampling=SamplingParams.resolve(model.file.metadata, settings.sampling),
        n_predict=settings.engine.context.n_predict,
        stop=replies.stop,
        grammar=constraint.grammar or "",
        json_schema=constraint.schema,
        cache_prompt=settings.cache.reuse,
        n_keep=settings.engine.context.keep,
        ping_s=settings.listen.ping_s,
        thought_limit=replies.thought_limit,
        thought_message=replies.thought_message,
        verbose=replies.verbose,
    )


def _there(service: Service | None) -> Service:
    assert service is not None, "a request passed the front before the model was loaded"
    return service

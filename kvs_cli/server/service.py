"""The loaded model as the routes see it: requests become tasks, tasks become replies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry
from starlette.responses import Response

from kvs_cli.open_model import OpenModel
from kvs_cli.server.errors import ApiError, ClientGone, api_error
from kvs_cli.server.generation import Event, Failed, Finished, Generation, Piece, Room, Task
from kvs_cli.server.http import Client, EventStream, JsonReply
from kvs_cli.server.jobs import BY_CLIENT, WITH_OTHERS, Cancelled, Job, JobQueue
from kvs_cli.server.metrics import MetricsCollector, Present
from kvs_cli.server.options import Defaults, Options
from kvs_cli.server.prompts import PromptReader
from kvs_cli.server.replies import Format, Names, Whole
from kvs_core.errors import SettingsError
from kvs_core.formats.chat import ChatTemplate
from kvs_core.formats.grammar import GrammarCompiler
from kvs_core.sampling.constrained import Constraint
from kvs_core.settings import ContextPlan, ServeSettings

T = TypeVar("T")

LOGGER = logging.getLogger(__name__)

_SCRAPED_S = 90.0   # between two scrapes of /metrics, at most: Prometheus's own default is 60


@dataclass(slots=True)
class Service:
    """All that a route needs, once the model is there."""

    settings: ServeSettings
    model: OpenModel
    context: ContextPlan
    template: ChatTemplate
    defaults: Defaults
    grammars: GrammarCompiler
    prompts: PromptReader
    room: Room
    names: Names
    queue: JobQueue
    threads: ThreadPoolExecutor
    created: int = field(default_factory=lambda: int(time.time()))
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)   # not the global one: one per server
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.registry.register(MetricsCollector(self.room.metrics, self._present))

    async def off_loop(self, work: Callable[..., T], *args: object) -> T:
        """The outcome of ``work``, done in a thread: what takes long must not keep other requests waiting."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, partial(work, *args))

    def task(
        self, prompt: tuple[int, ...], options: Options, *, border: int = 0, constraint: Constraint | None = None,
        visible: frozenset[int] = frozenset(), **settings: object,
    ) -> Task:
        """A task under the next number. ``settings``: what its reply shows besides the options."""
        shown = options.as_json() | {
            "chat_format": "Content-only", "reasoning_format": "none", "reasoning_in_content": False,
            "generation_prompt": "", "speculative.types": ",".join(self.room.speculative.types) or "none", **settings,
        }  # fmt: skip
        return Task(next(self._ids), prompt, options, shown, border, constraint, visible)

    def constraint(self, options: Options, *, after_thoughts: bool = False) -> Constraint | None:
        """The grammar or schema that a request names; a grammar wins. ``after_thoughts``: white space may come before
        the JSON."""
        try:
            if options.grammar:
                return self.grammars.from_gbnf(options.grammar)
            if options.json_schema is not None:
                return self.grammars.from_schema(options.json_schema, after_thoughts=after_thoughts)
        except SettingsError as error:
            raise ApiError("invalid_request_error", f"Failed to initialize samplers: {error}") from None
        return None

    async def reply(self, client: Client, tasks: Sequence[Task], fmt: Format) -> Response:
        """Run ``tasks``, in order, and reply in a format: at their end, or as they go."""
        options = tasks[0].options
        jobs: list[Job[Event]] = []
        try:
            for task in tasks:
                jobs.append(Job(Generation(self.room, task), str(task.id)))
                self.queue.submit(jobs[-1])
            if options.stream:
                first = await client.or_gone(jobs[0].next())
                if isinstance(first, Failed):
                    raise first.error
                frames = self._frames(jobs, fmt, first)
                return EventStream(client, frames, ping_s=options.ping_s, timeout_s=self.settings.listen.timeout_s)
            return JsonReply(fmt.whole([await self._whole(client, job) for job in jobs]))
        except BaseException as error:
            self._cancel(jobs, BY_CLIENT if isinstance(error, ClientGone) else WITH_OTHERS)
            raise

    async def call(self, client: Client, work: Callable[[], T]) -> T:
        """The outcome of ``work``, done by the engine's thread in its turn."""

        def run(job: Job[T | Failed]) -> None:
            try:
                job.check()
                outcome: T | Failed = work()
                self.room.live.look(always=True)
            except Cancelled:
                outcome = Failed(ApiError("unavailable_error", "the request was cancelled"))
            except Exception as error:
                outcome = Failed(api_error(error))
            job.emit(outcome)

        job: Job[T | Failed] = Job(run)
        self.queue.submit(job)
        try:
            outcome = await client.or_gone(job.next())
        except BaseException:
            self.queue.cancel(job, BY_CLIENT)
            raise
        if isinstance(outcome, Failed):
            raise outcome.error
        return outcome

    def _present(self) -> Present:
        """For a scrape, on the event loop: of the engine it takes the last snapshot, and has it kept fresh."""
        live = self.room.live
        live.polled(_SCRAPED_S)
        return Present(
            processing=self.room.view.processing,
            waiting=self.queue.waiting,
            kv=live.snapshot.report,
            link_bytes_per_s=live.link_bytes_per_s,
            parked=self.room.conversation.parked_totals,
        )

    async def _whole(self, client: Client, job: Job[Event]) -> Whole:
        pieces: list[Piece] = []
        while True:
            match await client.or_gone(job.next()):
                case Failed(error):
                    raise error
                case Piece() as piece:
                    pieces.append(piece)
                case Finished() as end:
                    return Whole.of(pieces, end)

    async def _frames(self, jobs: Sequence[Job[Event]], fmt: Format, first: Event) -> AsyncGenerator[bytes, None]:
        """Frames of all jobs, one job after the other. Closed early, the jobs are not wanted any more."""
        event: Event = first
        try:
            for index, job in enumerate(jobs):
                if index:
                    event = await job.next()
                while not isinstance(event, Finished | Failed):
                    for data in fmt.frames(index, event):
                        yield data
                    event = await job.next()
                if isinstance(event, Failed):
                    for data in fmt.failed(event.error):
                        yield data
                    return
                for data in fmt.frames(index, event):
                    yield data
            for data in fmt.end():
                yield data
        except (GeneratorExit, asyncio.CancelledError):
            self._cancel(jobs, BY_CLIENT)
            raise
        finally:
            self._cancel(jobs, WITH_OTHERS)

    def _cancel(self, jobs: Sequence[Job[Event]], why: str) -> None:
        """Those that run say so themselves when they end."""
        waited = [job.name for job in jobs if self.queue.cancel(job, why)]
        if waited:
            LOGGER.info("request %s: waited; 0 prompt tokens read; 0 tokens; %s", ", ".join(waited), why)

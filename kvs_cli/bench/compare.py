"""kvs against other engines on one model: all are up, and are asked in turn, so that none is measured alone.

    kvs serve ─┐
    command   ─┼─ a warm-up each ─ round 1: kvs, B, C ─ round 2: kvs, B, C ─ ... ─ medians, and ratios of the same round
    address   ─┘

Every round has a text of its own, the same for all: no engine can have it in a cache.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from statistics import median
from typing import Any

from kvs_cli.bench.endpoints import Endpoint, EngineError, Timed, command_of, free_port, started
from kvs_cli.bench.machine import host_facts
from kvs_cli.bench.measure import CHARS_PER_TOKEN
from kvs_cli.bench.store import write_text
from kvs_core.errors import ContextError, SettingsError
from kvs_core.formats.tokenizer import Tokenizer

LOGGER = logging.getLogger(__name__)

_KVS = "import sys; from kvs_cli.app import main; sys.exit(main())"
_OURS = "kvs"
_WARM_TOKENS = 64
_WARM_DECODED = 4
_CONTEXT_STEP = 256
_END_S = 30

Ask = Callable[[str, int], Timed]
"""A prompt and the tokens to generate."""


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """One comparison.

    arguments   flags of ``kvs serve``, without context and port
    model       the file that ``{model}`` in commands and the offloaded cache get; None: the model has none
    text        of at least ``prompt_tokens`` tokens
    addresses, commands, offloaded  the others; ``api_key`` is for the addresses
    """

    arguments: Sequence[str]
    model: Path | None
    tokenizer: Tokenizer
    text: str
    prompt_tokens: int
    decode_tokens: int
    rounds: int
    output: Path
    addresses: Sequence[str] = ()
    commands: Sequence[str] = ()
    offloaded: bool = False
    api_key: str = ""

    @property
    def context_tokens(self) -> int:
        """What every engine has to hold; the round's number stands before the text."""
        return -(-(self.prompt_tokens + self.decode_tokens + 32) // _CONTEXT_STEP) * _CONTEXT_STEP


@dataclass(slots=True)
class Measured:
    """An engine's rounds, in order; ``error`` ends them."""

    name: str
    rounds: list[Timed] = field(default_factory=list)
    error: str = ""

    def median(self, quantity: str) -> float | None:
        """Of a field of its rounds."""
        return median(getattr(timed, quantity) for timed in self.rounds) if self.rounds else None

    def ratio(self, ours: Measured, quantity: str) -> float | None:
        """How many times as much kvs has, as a median over the rounds that both have."""
        pairs = list(zip(ours.rounds, self.rounds, strict=False))
        return median(getattr(our, quantity) / getattr(other, quantity) for our, other in pairs) if pairs else None


def run_compare(settings: CompareSettings) -> list[Measured]:
    """Run it and write ``compare.csv``, ``compare.json`` and ``compare.md``. Raises ``KvsError``.

    An engine that fails is left out from then on, with its error; where none but kvs is left, that is the end.
    ``KeyboardInterrupt`` passes on when what there is is written.
    """
    text = _prompt(settings)
    prompts = [f"{number}. {text}" for number in range(1 + settings.rounds)]
    for address in settings.addresses:
        Endpoint(address)   # what is no address is said before anything is started
    for command in settings.commands:
        command_of(command, model=settings.model, port=1, context=settings.context_tokens)
    logs = settings.output / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--output {settings.output}: {error.strerror or error}; give a folder that can be written"
                            ) from None
    machine = host_facts(["kvs", *sys.argv[1:]])
    engines: list[tuple[Measured, Ask | None]] = []
    with ExitStack() as running:
        try:
            for name, start in _engines(settings, logs):
                measured, ask = Measured(name), None
                engines.append((measured, ask))
                with _noted(measured):
                    ask = running.enter_context(start())
                    warm = settings.tokenizer.decode(settings.tokenizer.encode(prompts[0])[:_WARM_TOKENS])
                    ask(warm, _WARM_DECODED)
                    engines[-1] = (measured, ask)
            for number, prompt in enumerate(prompts[1:], 1):
                if all(measured.error for measured, _ in engines[1:]):
                    break
                for measured, ask in engines:
                    if ask is None or measured.error:
                        continue
                    with _noted(measured):
                        measured.rounds.append(ask(prompt, settings.decode_tokens))
                        LOGGER.info("round %d of %d: %s: %.2f tokens/s, first token after %.0f ms", number,
                                    settings.rounds, measured.name, measured.rounds[-1].decode_tps,
                                    measured.rounds[-1].first_token_ms)
        finally:
            _write(settings, machine, [measured for measured, _ in engines])
    return [measured for measured, _ in engines]


def table(engines: Sequence[Measured]) -> list[str]:
    """Lines of Markdown: medians, and how many times as fast kvs is."""
    ours = engines[0]
    lines = ["| engine | rounds | prompt tokens | prefill, tokens/s | first token, ms | decode, tokens/s | "
             "kvs / it, prefill | kvs / it, decode |", "| --- |" + " ---: |" * 7]
    for engine in engines:
        if not engine.rounds:
            lines.append(f"| {engine.name} | 0 | {engine.error} | | | | | |")
            continue
        ratios = [engine.ratio(ours, quantity) for quantity in ("prefill_tps", "decode_tps")]
        cells = [f"{engine.median('prompt_tokens'):.0f}", f"{engine.median('prefill_tps'):.1f}",
                 f"{engine.median('first_token_ms'):.0f}", f"{engine.median('decode_tps'):.2f}",
                 *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios)]
        lines.append(f"| {engine.name} | {len(engine.rounds)} | {' | '.join(cells)} |")
    return lines


def _prompt(settings: CompareSettings) -> str:
    tokens = settings.tokenizer.encode(settings.text[: settings.prompt_tokens * CHARS_PER_TOKEN], add_special=False)
    if len(tokens) < settings.prompt_tokens:
        raise ContextError(
            f"the text has {len(tokens)} tokens, --prompt-tokens asks for {settings.prompt_tokens}; give a longer one "
            "with --prompt-file, or ask for fewer", prompt_tokens=settings.prompt_tokens, context_tokens=len(tokens),
        )
    return settings.tokenizer.decode(tokens[: settings.prompt_tokens])


def _engines(settings: CompareSettings, logs: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names, and what is to be entered for a function that asks."""
    context = settings.context_tokens
    ours = free_port()
    yield _OURS, lambda: _server(
        [sys.executable, "-c", _KVS, "serve", *settings.arguments, "--ctx-size", str(context), "--host", "127.0.0.1",
         "--port", str(ours)], ours, logs / "kvs.log")
    names = {_OURS}

    def unique(name: str) -> str:
        numbered = chain([name], (f"{name}-{number}" for number in count(2)))
        found = next(each for each in numbered if each not in names)
        names.add(found)
        return found

    for template in settings.commands:
        port = free_port()
        words = command_of(template, model=settings.model, port=port, context=context)
        name = unique(Path(words[0]).name)
        log = logs / f"{name}.log"
        yield name, lambda words=words, port=port, log=log: _server(words, port, log)   # type: ignore[misc]
    for address in settings.addresses:
        yield unique(address.partition("://")[2]), lambda address=address: _address(   # type: ignore[misc]
            address, settings.api_key)
    if settings.offloaded:
        yield unique("transformers, offloaded"), lambda: _offloaded(settings, logs / "offloaded.log")


@contextmanager
def _server(command: Sequence[str], port: int, log: Path) -> Iterator[Ask]:
    with started(command, port, log) as endpoint:
        yield endpoint.time


@contextmanager
def _address(address: str, api_key: str) -> Iterator[Ask]:
    endpoint = Endpoint(address, api_key)
    if not endpoint.is_ready():
        raise EngineError(f"{address} does not answer /health or /v1/models")
    yield endpoint.time


@contextmanager
def _offloaded(settings: CompareSettings, log: Path) -> Iterator[Ask]:
    if settings.model is None:
        raise EngineError("it needs a model in a file; kvs synthesize writes a synthetic one")
    command = [sys.executable, "-m", "kvs_cli.bench.offloaded", str(settings.model.resolve())]
    with log.open("ab") as lines:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=lines, text=True,
                                   start_new_session=True)
    assert process.stdin is not None
    assert process.stdout is not None
    jobs, answers = process.stdin, process.stdout

    def answered() -> dict[str, Any]:
        line = answers.readline()
        if not line:
            raise EngineError(f"it ended with code {process.wait(_END_S)}; {log} says why")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise EngineError(told["error"])
        return told

    def ask(prompt: str, decode_tokens: int) -> Timed:
        tokens = settings.tokenizer.encode(prompt)
        with suppress(BrokenPipeError):
            jobs.write(json.dumps({"tokens": tokens, "decode_tokens": decode_tokens}) + "\n")
            jobs.flush()
        told = answered()
        return Timed(len(tokens), decode_tokens, told["first_token_ms"], told["decode_tps"])

    try:
        answered()
        yield ask
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _noted(measured: Measured) -> Iterator[None]:
    """What goes wrong with an engine is the engine's, and the others go on."""
    try:
        yield
    except EngineError as error:
        measured.error = str(error)
        LOGGER.warning("%s: %s", measured.name, error)


def _write(settings: CompareSettings, machine: Mapping[str, Any], engines: Sequence[Measured]) -> None:
    names = ("prompt_tokens", "decode_tokens", "first_token_ms", "prefill_tps", "decode_tps")
    rows = [{"round": number, "engine": engine.name, **{name: getattr(timed, name) for name in names}}
            for engine in engines for number, timed in enumerate(engine.rounds, 1)]
    rows.sort(key=lambda row: row["round"])
    text = io.StringIO()
    writer = csv.DictWriter(text, ("round", "engine", *names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(settings.output / "compare.csv", text.getvalue())
    facts = {"machine": machine, "rounds": rows, "engines": [
        {"name": engine.name, "error": engine.error or None}
        | {f"{name}_median": engine.median(name) for name in names}
        | {f"kvs_over_it_{name}": engine.ratio(engines[0], name) for name in ("prefill_tps", "decode_tps")}
        for engine in engines]}
    write_text(settings.output / "compare.json", json.dumps(facts, indent=1) + "\n")
    if engines:
        write_text(settings.output / "compare.md", "\n".join(table(engines)) + "\n")

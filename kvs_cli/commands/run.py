"""``kvs run``: continue a prompt. The text goes to stdout as it comes, everything else to stderr.

    settings ─ file, tokenizer, prompt tokens: checked ─ weights ─ prefill ─ text, token by token ─ summary

Ctrl-C while text comes ends it there: what was printed stays, the summary follows, and the exit code is 130. Earlier,
it ends the command at once. With ``--json`` the object is printed all the same, its stop reason ``interrupted``. So it
is where an error ends the text, or comes before or behind it: the object has what is known by then and the ``error``
(``error_object.py``).
With ``--session`` the file is taken up before the prompt is read and written behind the text, before the object of
``--json``, which tells of an error there too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from kvs_cli import ending
from kvs_cli.constraint import run_constraint
from kvs_cli.error_object import FAILED, INTERRUPTED, ErrorObject
from kvs_cli.open_model import OpenModel, check_keep, open_engine, open_model, plan_context, text_bounds
from kvs_cli.prompt import prompt_tokens, read_prompt
from kvs_cli.render import Screen, end_text, log_summary, print_json, write_text
from kvs_cli.result import Drafts, RunResult, Timings, model_facts
from kvs_cli.saved_text import SavedText, check_place
from kvs_core.device.choose import begin_opening
from kvs_core.engine.completion import Piece, complete
from kvs_core.engine.context_shift import ContextShift
from kvs_core.engine.engine import Engine
from kvs_core.engine.round import accept_prompt
from kvs_core.engine.session import TAIL_TOKENS, Session, check_prompt
from kvs_core.engine.speculation import Speculation, make_speculation
from kvs_core.errors import KvsError
from kvs_core.sampling.constrained import ConstrainedSampler, Constraint
from kvs_core.sampling.params import RANDOM_SEED, SamplingParams
from kvs_core.settings import RunSettings


def execute(settings: RunSettings, told: ErrorObject) -> int:
    """Run it; the exit code. Raises ``KvsError``. ``told`` learns what there is to tell of an error."""
    start_s = time.perf_counter()
    screen = Screen.of(settings.logging)
    if settings.session is not None:
        check_place(settings.session)
    text = read_prompt(settings.prompt)
    begin_opening(settings.engine.device)
    model = open_model(settings.engine.model, screen, settings.engine.rope)
    told.facts |= model_facts(model.file.path, model.spec, synthetic=model.file.synthetic)
    context = plan_context(model, settings.engine)
    is_saved = settings.session is not None and settings.session.exists()
    goes_on = not text and is_saved
    prompt = [] if goes_on else prompt_tokens(model, text, settings.chat, context)
    check_keep(settings.engine.context, context, bos=model.tokenizer.add_bos)
    sampler = _sampler(model, settings)
    rule = run_constraint(settings.constraint, model, prompt if settings.chat.enabled else ())
    bounds = text_bounds(
        settings.engine.context, context, prompt_tokens=len(prompt), bos=model.tokenizer.add_bos, is_saved=is_saved
    )
    with open_engine(model, settings.engine, screen, bounds=bounds) as engine:
        saved = None
        if settings.session is not None:
            saved = SavedText(engine, model, settings.engine.rope, settings.session)
            prompt = prompt or saved.tokens
            if not (goes_on and settings.engine.context.shift):   # which makes room
                check_prompt(len(prompt), context, is_session=goes_on, can_shift=engine.can_rewind)
            if goes_on and settings.chat.enabled:
                rule = run_constraint(settings.constraint, model, prompt)
        result = _generate(settings, model, engine, sampler, rule, prompt, saved, screen, start_s)
        told.facts |= result.as_json()
        if result.error is not None:
            raise result.error
        log_summary(result)
        if saved is not None:
            saved.save([*prompt, *result.token_ids], dropped=result.dropped_tokens)
        if settings.output.json:
            told.due = False
            print_json(told.facts)
    return ending.INTERRUPTED if result.stop_reason == INTERRUPTED else 0


def _sampler(model: OpenModel, settings: RunSettings) -> ConstrainedSampler:
    return ConstrainedSampler(
        SamplingParams.resolve(model.file.metadata, settings.sampling),
        n_vocab=model.spec.n_vocab,
        vocab=model.tokenizer,
        eog_ids=model.tokenizer.eog_ids,
        suppress_ids=model.tokenizer.suppress_ids,
    )


def _generate(
    settings: RunSettings,
    model: OpenModel,
    engine: Engine,
    sampler: ConstrainedSampler,
    rule: Constraint | None,
    prompt: Sequence[int],
    saved: SavedText | None,
    screen: Screen,
    start_s: float,
) -> RunResult:
    output = settings.output
    session = Session(engine) if saved is None else saved.session
    context = settings.engine.context
    shift = None
    if context.shift:
        shift = ContextShift(context.keep, prompt_tokens=len(prompt), bos=model.tokenizer.add_bos)
    accept_prompt(sampler, prompt)
    if shift is not None and saved is not None and len(prompt) >= engine.context.context_tokens:
        prompt = saved.make_room(shift)
    kept = 0 if saved is None else saved.keep(prompt)
    loaded_s = time.perf_counter()
    with screen.stage("reading the prompt", "tokens") as progress:
        logits = session.prefill(prompt[kept:], border=len(prompt) - TAIL_TOKENS - kept, progress=progress)[0]
    prompt_done_s = time.perf_counter()
    prompt_h2d_bytes = engine.report().h2d_bytes

    if rule is not None:
        sampler.constrain(rule)
    speculation = make_speculation(engine, settings.engine.speculative, sampler, model.tokenizer.eog_ids)
    pieces: list[Piece] = []
    token_s: list[float] = []
    n_predict = context.n_predict
    stop_reason = INTERRUPTED if n_predict else "length"   # where no piece says why the text ends
    failed: KvsError | None = None
    try:
        with closing(complete(
            session, sampler, logits, model.tokenizer, n_predict=n_predict, stops=output.stop, special=output.special,
            n_probs=output.n_probs if output.json else 0, speculation=speculation, shift=shift,
        )) as completion:
            for piece in completion:
                token_s.append(time.perf_counter())
                pieces.append(piece)
                if not output.json:
                    write_text(piece.text)
                stop_reason = piece.stop or INTERRUPTED
    except KeyboardInterrupt:
        stop_reason = INTERRUPTED
    except (KvsError, OSError, MemoryError) as error:   # what was written stays, the error has a line of its own
        if not output.json:
            end_text()
            raise
        stop_reason, failed = FAILED, error if isinstance(error, KvsError) else KvsError(ending.error_text(error))
    if not output.json:
        end_text()
    report = engine.report()
    return RunResult(
        path=model.file.path,
        synthetic=model.file.synthetic,
        spec=model.spec,
        device=engine.device_name,
        token_ids=tuple(piece.token for piece in pieces),
        text="".join(piece.text for piece in pieces),
        stop_reason=stop_reason,
        seed=sampler.seed_used,
        seed_is_random=sampler.params.seed == RANDOM_SEED and sampler.params.temperature > 0,
        timings=Timings.between(start_s, loaded_s, prompt_done_s, token_s, len(prompt) - kept),
        kv=report,
        weights=engine.weights_report(),
        decode_h2d_bytes=report.h2d_bytes - prompt_h2d_bytes,
        probs=tuple(piece.probs for piece in pieces if piece.probs is not None),
        drafts=_drafts(speculation),
        dropped_tokens=0 if shift is None else shift.dropped,
        error=failed,
    )


def _drafts(speculation: Speculation | None) -> Drafts | None:
    if speculation is None:
        return None
    return Drafts(speculation.rounds, speculation.is_synthetic, speculation.stats)


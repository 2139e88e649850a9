"""GET /kvs/live: where pages are, and when the engine's thread looks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_cli.server.live import PLACES, LiveView, place_runs
from kvs_cli.server.slot import Conversation, SlotView
from kvs_core.engine.session import Session
from kvs_core.paging.slots import PageId
from kvs_core.streaming.places import LayerPlaces
from tests.engine.tiny import engine, kv_settings
from tests.server.running import running
from tests.support.tiny_gguf import write_tiny_gemma3

RESIDENT, RING, HOST = range(3)
TOKENS = [3 + at % 200 for at in range(450)]


@st.composite
def layers(draw: st.DrawFn) -> LayerPlaces:
    """A head, a cut, and runs between them; or a window, and what it has passed."""
    pages = draw(st.integers(0, 40))
    if draw(st.booleans()):
        return LayerPlaces(pages, range(0), (), draw(st.integers(0, pages)))
    cut = draw(st.integers(0, pages))
    head = draw(st.integers(0, cut))
    inside = sorted(draw(st.sets(st.integers(head, cut), max_size=6)))
    runs = [range(first, end) for first, end in pairwise(inside)]
    return LayerPlaces(pages, range(head, cut), tuple(run for run in runs if draw(st.booleans())))


@given(layer=layers())
def test_runs_say_of_each_page_where_it_is(layer: LayerPlaces) -> None:
    """Joined, the runs are the pages in their order, each with its place; none is empty."""
    runs = list(place_runs(layer))
    assert all(pages > 0 for _, pages in runs)
    shown = [place for place, pages in runs for _ in range(pages)]
    assert shown == [
        HOST if page < layer.first_page else RESIDENT if page not in layer.streamed
        else RING if any(page in run for run in layer.in_ring) else HOST
        for page in range(layer.pages)
    ]


def test_what_a_window_has_passed_is_not_resident() -> None:
    """Of 13 pages, those before the window's first one are not on the device, and the others are."""
    assert list(place_runs(LayerPlaces(13, range(0), (), 8))) == [(HOST, 8), (RESIDENT, 5)]


def _shown(view: LiveView) -> list[list[int]]:
    layers = view.as_json(0)["pages"]["layers"]
    return [[place for place, pages in layer["runs"] for _ in range(pages)] for layer in layers]


@pytest.mark.parametrize("slides", [False, True])
def test_places_are_those_of_the_table(llama_path: Path, tmp_path: Path, slides: bool) -> None:
    """In a small pool, between any two steps: what is called resident has a slot and nothing else has; what is called
    in the ring are the runs copied ahead, and they fit into it. After a step back too, and where windows have passed
    pages."""
    path = write_tiny_gemma3(tmp_path / "gemma3.gguf", seed=1) if slides else llama_path
    with engine(path, kv=kv_settings(), pool=0.3, fixed=True) as built:
        session = Session(built)
        view = LiveView(Conversation(session, "", None), SlotView())
        assert _shown(view) == [[]] * 4
        kv = built._kv

        def check() -> None:
            view.look(always=True)
            shown = _shown(view)
            assert [len(layer) for layer in shown] == [kv._placement.pages] * 4
            for layer, pages in enumerate(shown):
                for page, place in enumerate(pages):
                    assert (place == RESIDENT) == kv._pools.holds(PageId(layer, page)), (layer, page)
            assert sum(pages.count(RING) for pages in shown) <= kv._pools.shared.ring_slots

        session.prefill(TOKENS, progress=lambda done, total: check())
        seen = set()
        for token in TOKENS[:40]:
            session.decode(token)
            check()
            seen |= {place for pages in _shown(view) for place in pages}
        assert seen == {RESIDENT, RING, HOST}
        session.rewind(built.nearest(100))
        check()
        session.rewind(0)
        check()


@dataclass
class Clock:
    """Goes as it is told."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_it_looks_only_while_somebody_polls_and_rates_are_of_what_lies_between(llama_path: Path) -> None:
    """Without polls no snapshot; then a few per second, for some seconds; rates are tokens and bytes over time."""
    with engine(llama_path, kv=kv_settings()) as built:
        clock, slot = Clock(), SlotView()
        view = LiveView(Conversation(Session(built), "", None), slot, clock=clock)
        assert view.as_json(3)["state"] == "idle"
        assert view.as_json(3)["queue"] == 3
        slot.processing, slot.task, slot.decoded = True, 1, 1
        before = view.snapshot
        clock.now_s += 60
        view.look()
        assert view.snapshot is before
        view.polled()
        view.look()
        first = view.snapshot
        assert first is not before
        assert first.tokens_per_s is None
        clock.now_s += 0.1
        view.look()
        assert view.snapshot is first   # too soon
        clock.now_s += 0.9
        slot.decoded += 25
        view.look()
        assert view.as_json(0)["state"] == "text"
        assert view.as_json(0)["tokens_per_s"] == pytest.approx(25.0)
        assert view.as_json(0)["link"]["bytes_per_s"] == 0
        clock.now_s += 2
        slot.decoded += 10
        view.look()
        assert view.as_json(0)["tokens_per_s"] == pytest.approx(5.0)   # the fast second has left the window
        slot.task, slot.decoded, slot.prompt_processed = 2, 0, 400
        clock.now_s += 1
        view.look()
        assert view.as_json(0)["state"] == "prompt"
        assert view.as_json(0)["tokens_per_s"] is None   # another request: nothing lies between yet
        last = view.snapshot
        clock.now_s += 60
        view.look()
        assert view.snapshot is last   # nobody polls any more
        view.polled(90)   # by one who comes back in a minute and a half
        clock.now_s += 60
        view.polled()
        clock.now_s += 20
        view.look()
        assert view.snapshot is not last
        last = view.snapshot
        clock.now_s += 20
        view.look()
        assert view.snapshot is last
        slot.processing = False
        view.look(always=True)
        assert view.snapshot is not last
        assert view.as_json(0)["tokens_per_s"] is None


def test_the_reply_follows_a_request(llama_path: Path) -> None:
    """While text streams the state, the context and the copied bytes grow; at the end nothing is called a rate; an
    erased slot is empty."""
    flags = ("-c", 512, "-ub", 64, "--kv-page-tokens", 32, "--kv-stream-arena-mib", 1, "--spec-type", "ngram-simple")
    with running("-m", llama_path, *flags) as server:
        idle = server.get("/kvs/live")
        assert (idle["state"], idle["queue"], idle["decoded"]) == ("idle", 0, 0)
        assert idle["context"] == {"tokens": 0, "size": 512}
        assert idle["pages"]["places"] == list(PLACES)
        assert [layer["layer"] for layer in idle["pages"]["layers"]] == [0, 1, 2, 3]
        body: dict[str, Any] = {"prompt": TOKENS[:300], "n_predict": 150, "ignore_eos": True, "stream": True}
        seen = []
        with server.http.stream("POST", "/completion", json=body) as reply:
            for at, line in enumerate(reply.iter_lines()):
                if line and at % 20 == 0:
                    seen.append(server.get("/kvs/live"))
        assert {each["state"] for each in seen} <= {"text", "idle"}   # idle once the last of it is on its way
        assert seen[0]["decoded"] > 0
        assert [each["decoded"] for each in seen] == sorted(each["decoded"] for each in seen)
        end = server.get("/kvs/live")
        assert (end["state"], end["decoded"], end["tokens_per_s"]) == ("idle", 150, None)
        assert end["prompt"] == {"tokens": 300, "processed": 300, "cached": 0}
        assert end["context"]["tokens"] == 449   # the last token is not run
        assert end["link"]["bytes_per_s"] is None
        assert end["link"]["probed_bytes_per_s"] > 0
        assert end["link"]["h2d_bytes"] > idle["link"]["h2d_bytes"]
        counts = [sum(pages for _, pages in layer["runs"]) for layer in end["pages"]["layers"]]
        assert counts == [15] * 4   # of 32 tokens
        assert {each["name"] for each in end["drafters"]} == {"ngram-simple"}
        server.post("/slots/0?action=erase")
        erased = server.get("/kvs/live")
        assert erased["context"]["tokens"] == 0
        assert all(layer["runs"] == [] for layer in erased["pages"]["layers"])

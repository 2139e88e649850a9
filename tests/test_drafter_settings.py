"""Settings of drafters hold what can run, and say why something cannot, in one line."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from kvs_core.errors import SettingsError
from kvs_core.settings.drafters import (
    DRAFTERS,
    ModelDraftSettings,
    NgramMapSettings,
    NgramModSettings,
    NgramSimpleSettings,
    SpeculativeSettings,
)

MTP = ("draft-mtp",)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"types": ("ngram-mode",)}, "--spec-type ngram-mode: not a drafter; use one of ngram-simple, .*-resident"),
        ({"types": ("ngram-simple",), "ngram_simple": NgramSimpleSettings(size_m=65)},
         "--spec-ngram-simple-size-m 65: verifying that takes 66 rows, and at most 65 run together; use 1 to 64"),
        ({"types": ("ngram-map-k",), "ngram_map_k": NgramMapSettings(size_m=1024)},
         "--spec-ngram-map-k-size-m 1024: verifying that takes 1025 rows"),
        ({"types": ("ngram-map-k4v",), "ngram_map_k4v": NgramMapSettings(size_m=0)},
         "--spec-ngram-map-k4v-size-m 0: ngram-map-k4v would draft nothing"),
        ({"types": ("ngram-map-k4v",), "ngram_map_k4v": NgramMapSettings(min_hits=0)}, "min-hits 0: use at least 1"),
        ({"types": ("ngram-mod",), "ngram_mod": NgramModSettings(n_max=65)}, "--spec-ngram-mod-n-max 65: verifying"),
        ({"types": ("ngram-mod",), "ngram_mod": NgramModSettings(n_match=0)}, "nothing would have to match"),
        ({"types": ("ngram-mod",), "ngram_mod": NgramModSettings(n_min=-1)}, "use at least 0"),
        ({"types": MTP, "draft": ModelDraftSettings(n_max=8)},
         "--spec-draft-n-max 8: draft-mtp drafts 1 to 7 tokens; use one of these, or leave that type out"),
        ({"types": ("draft-resident",), "draft": ModelDraftSettings(n_max=0)}, "draft-resident drafts 1 to 7 tokens"),
        ({"types": MTP, "draft": ModelDraftSettings(n_min=4)},
         "--spec-draft-n-min 4 with --spec-draft-n-max 3: no draft would be kept; use 0 to 3"),
        ({"types": MTP, "draft": ModelDraftSettings(p_min=1.5)}, "use 0 to 1"),
        ({"types": MTP, "draft": ModelDraftSettings(sampling="best")},  # type: ignore[arg-type]
         "use greedy or probabilistic"),
        ({"types": MTP, "draft": ModelDraftSettings(n_min=2, p_min=0.1, sampling="probabilistic")},
         "--spec-draft-n-min 2 and --spec-draft-p-min 0.1 together would change what probabilistic drafts generate"),
        ({"synth_len": 2.0}, "--spec-synth-len pretends that drafts are accepted, and nothing drafts; add --spec-type"),
        ({"types": MTP, "synth_len": 4.5}, "--spec-draft-n-max allows 3 drafted tokens, so 1 to 4 tokens come out"),
        ({"types": MTP, "synth_len": 0.5}, "--spec-synth-len 0.5"),
        ({"types": MTP, "synth_rates": (0.5, 0.9, 0.1)}, "expected 3 rates from 0 to 1 that never rise"),
        ({"types": (*MTP, "ngram-mod"), "synth_rates": (0.5, 0.4, 0.1)},
         r"expected 64 rates .* \(--spec-ngram-mod-n-max 64\), got 3"),
        ({"types": MTP, "synth_rates": (1.5, 0.4, 0.1)}, "rates from 0 to 1"),
        ({"types": MTP, "synth_len": 2.0, "synth_rates": (0.5, 0.4, 0.1)}, "give one of them"),
    ],
)
def test_what_cannot_run_is_refused(values: dict[str, Any], words: str) -> None:
    """With the flag, the numbers, and what to use."""
    with pytest.raises(SettingsError, match=words) as caught:
        SpeculativeSettings(**values)
    assert "\n" not in str(caught.value)


def test_numbers_of_a_drafter_that_is_off_do_not_matter() -> None:
    """As in llama-server: ``--spec-type ngram-simple --spec-draft-n-max 64`` is a command line in use."""
    settings = SpeculativeSettings(
        types=("ngram-simple",), ngram_mod=NgramModSettings(n_max=1024), draft=ModelDraftSettings(n_max=64))
    assert settings.verify_rows == 49
    assert SpeculativeSettings(draft=ModelDraftSettings(n_max=64)).verify_rows == 1


@pytest.mark.parametrize(
    ("types", "rows"),
    [((), 1), (MTP, 4), (("draft-resident",), 4), (("ngram-cache",), 9), (("ngram-cache", *MTP), 9),
     (("ngram-simple", "ngram-cache"), 49), (("ngram-map-k",), 49), (("ngram-map-k4v",), 49), (DRAFTERS, 65)],
)
def test_rows_of_the_widest_verification(types: tuple[str, ...], rows: int) -> None:
    """One, and the widest draft of all types."""
    settings = SpeculativeSettings(types=types)
    assert (settings.verify_rows, settings.widest_draft) == (rows, rows - 1)


def test_types_are_held_in_the_order_of_asking() -> None:
    """Whatever order they are given in, each once."""
    for types in permutations(("ngram-simple", "ngram-cache", "draft-mtp")):
        assert SpeculativeSettings(types=(*types, types[0])).types == ("ngram-simple", "ngram-cache", "draft-mtp")

"""Forecast: how long a decode round will take at any context, from sizes and from what a device does per second. Pure.

    kernels  weights / rate + layers x overhead + attention: KV bytes / rate, at least a little + calls for runs
    link     streamed bytes / rate + copies x overhead
    step     the longer of the two; where they are about equal they hinder each other
    round    drafts + step + what the host does

Where the pages of a step are and which copies move them is not modelled but asked of the rooms that decide it: the
residency policy and the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvs_core.engine.budget import Budget, Drafting
from kvs_core.memory.phases import Phase
from kvs_core.models.recurrent import state_bytes
from kvs_core.models.spec import ModelSpec
from kvs_core.paging.geometry import GROUP_PAGES
from kvs_core.paging.residency import Observation, ResidencyState, residency_step
from kvs_core.paging.schedule import plan_schedule
from kvs_core.paging.weight_ring import ALL_STAY, WeightSplit
from kvs_core.settings.drafters import SpeculativeSettings
from kvs_core.settings.rooms import KvSettings
from kvs_core.speculative.synthetic import rates_of_length

_BALANCE = 20.0
"""Exponent that joins two times of work side by side: 3.5 % above the longer one where they are equal, 0.6 % where one
is 0.9 of the other. Steps of two models on an H200 (benchmarks/results/cliff_h200) were at most 3.4 and 7.7 % above it,
most of them 1 to 3 %."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a second, and what steps cost beside.

    link_bytes_per_s       large copies to the device
    weight_bytes_per_s     one row's product with a matrix, by the form in which it is held; "" stands for all others
    row_costs              the same with 1, 2, ... rows, as multiples of one; at least two numbers
    attention_bytes_per_s  one row's attention over K and V
    attention_row          what a further row adds, as a part of the first
    layer_s                of a layer, beside its bytes
    least_attention_s      of an attention layer, however short its context
    run_s, run_rows_s      of a further attention call, for streamed runs, and its fold; more, if there are several rows
    copy_s                 of the same, its copy beside its bytes
    round_s, plan_s        of the host, per round: sampling, bookkeeping; and per streamed run of its plan
    draft_s                of the host, per drafted row: its guess comes back before the next row begins

    What the host does while the device works is in none of the last three: it costs nothing.
    """

    link_bytes_per_s: float
    weight_bytes_per_s: Mapping[str, float]
    row_costs: Mapping[str, Sequence[float]]
    attention_bytes_per_s: float
    attention_row: float
    layer_s: float
    least_attention_s: float
    run_s: float
    run_rows_s: float
    copy_s: float
    round_s: float
    plan_s: float
    draft_s: float

    def multiply_s(self, weights: Mapping[str, int], rows: int) -> float:
        """Seconds that ``rows`` rows take with matrices of so many bytes, by the form in which they are held."""
        speeds, costs = self.weight_bytes_per_s, self.row_costs
        return sum(
            size / speeds.get(name, speeds[""]) * _at(costs.get(name, costs[""]), rows)
            for name, size in weights.items()
        )

    def choose_s(self, experts: Mapping[str, int], share: float) -> float:
        """Seconds that one row's products with a share of experts take, all of them so many bytes."""
        speeds = self.weight_bytes_per_s
        return share * sum(size / speeds.get(name, speeds[""]) for name, size in experts.items())

    def attend_s(self, kv_bytes: float, rows: int) -> float:
        """Seconds of one layer's attention over so many bytes of K and V."""
        once = max(self.least_attention_s, kv_bytes / self.attention_bytes_per_s)
        return once * (1.0 + self.attention_row * (rows - 1))


def _at(costs: Sequence[float], rows: int) -> float:
    """The cost of so many rows; beyond those that are known it grows as between the last two."""
    if rows <= len(costs):
        return costs[rows - 1]
    return costs[-1] + (rows - len(costs)) * (costs[-1] - costs[-2])


IN_FILE = "in the file"
"""Form of matrices that the host dequantises at every use. They take no memory; their bytes are the float32 values'."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of matrices that a step reads, by the form in which they are held on the device.

    table_bytes    of device memory, of the token table: a step reads a row of it per token
    experts        of a mixture of experts, all that the trunk has, which are in none of the others; nextn_experts: the
                   MTP block's
    share          of its experts, what a row reads
    passing_bytes  of the trunk's, what takes no memory of its own: it passes through the arena
    cached_bytes   of device memory, float32 values of matrices that the file has in another type: the host's cache
    """

    trunk: Mapping[str, int]
    head: Mapping[str, int]
    nextn: Mapping[str, int]
    table_bytes: int = 0
    experts: Mapping[str, int] = field(default_factory=dict)
    nextn_experts: Mapping[str, int] = field(default_factory=dict)
    share: float = 0.0
    passing_bytes: int = 0
    cached_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Device memory of all of them."""
        held = sum(size for part in self._parts for name, size in part.items() if name != IN_FILE)
        return self.table_bytes + held - self.passing_bytes

    @property
    def in_file_bytes(self) -> int:
        """Of matrices that take no device memory: what they are as float32, which the host makes at every use."""
        return sum(part.get(IN_FILE, 0) for part in self._parts)

    @property
    def forms(self) -> list[str]:
        """In which they are held."""
        return list(dict.fromkeys(name for part in self._parts for name in part))

    @property
    def _parts(self) -> tuple[Mapping[str, int], ...]:
        return self.trunk, self.head, self.nextn, self.experts, self.nextn_experts


@dataclass(frozen=True, slots=True)
class Rounds:
    """What a round drafts and brings.

    kind    "", "draft-mtp" or "draft-resident"
    drafts  rows that are drafted
    tokens  that come out of a round on average; None: what is accepted is not known
    """

    kind: str = ""
    drafts: int = 0
    tokens: float | None = 1.0

    @property
    def rows(self) -> int:
        """Of the step that verifies."""
        return 1 + self.drafts

    @staticmethod
    def of(settings: SpeculativeSettings) -> Rounds:
        """Rounds of the drafter that runs the model, if there is one; what n-gram drafters find is up to the text."""
        kind = next((name for name in settings.types if name.startswith("draft-")), "")
        if not kind:
            return Rounds()
        drafts = settings.draft.n_max
        rates = settings.synth_rates
        if settings.synth_len is not None:
            rates = rates_of_length(settings.synth_len, settings.widest_draft)
        return Rounds(kind, drafts, None if rates is None else 1.0 + sum(rates[:drafts]))


@dataclass(frozen=True, slots=True)
class Setup:
    """One model, one cache, one arena.

    state_bytes  of the device, beside weights and arena: recurrent state, and what the MTP block keeps
    split        which of the weights pass through the arena
    spilled_bytes  of weights that stay, what is in host memory: the link brings it too, at best as fast
    layers       of the trunk, of every kind
    favoured     of the layers with K and V, the last ones, that are the MTP block's
    windows      keys that a row sees of each layer with K and V, 0: all
    page_bytes   of each of them; token_bytes: of a token in each
    reads        whose K and V each attention of a step reads, in order
    """

    budget: Budget
    kv: KvSettings
    weights: Weights
    state_bytes: int
    layers: int
    kv_layers: int
    windows: tuple[int, ...]
    page_bytes: tuple[int, ...]
    token_bytes: tuple[int, ...]
    reads: tuple[int, ...]
    favoured: int = 0
    head_pages: int = 0
    split: WeightSplit = ALL_STAY
    spilled_bytes: int = 0

    @staticmethod
    def of(
        spec: ModelSpec, budget: Budget, kv: KvSettings, weights: Weights, drafting: Drafting,
        split: WeightSplit = ALL_STAY,
    ) -> Setup:
        """As the engine will have it."""
        holding = drafting.kv_layers(spec)
        windows = tuple(layer.window for layer in holding)
        layers = len(windows)
        favoured = layers - len(spec.kv_layers)
        state = state_bytes(spec) + drafting.table_bytes(spec)
        return Setup(
            budget, kv, weights, state, spec.n_layer, layers, windows, tuple(budget.pages.page_bytes(holding)),
            tuple(budget.pages.token_bytes(holding)), tuple(drafting.kv_reads(spec)), favoured, drafting.head_pages,
            split,
        )

    def pass_s(self, rates: Rates) -> float:
        """Seconds in which the link brings the weights that pass or spill, once."""
        moved_bytes = self.split.pass_bytes + self.spilled_bytes
        return moved_bytes / rates.link_bytes_per_s + len(self.split.ring.part_bytes) * rates.copy_s

    @property
    def trunk_kv_layers(self) -> int:
        """Layers of the trunk with K and V."""
        return self.kv_layers - self.favoured


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the pages of a step are. ``cuts``: per layer, pages before it are streamed, but for those of the head.

    streamed_pages  as often as they are copied in a step
    runs            copies
    calls           of attention, beyond one for each
    """

    pages: int
    cuts: tuple[int, ...]
    resident_pages: int
    streamed_pages: int
    ring_slots: int
    runs: int
    calls: int
    streamed_bytes: int


@dataclass(frozen=True, slots=True)
class Point:
    """The forecast at one context. Seconds per round, and per step in it.

    tokens  committed before the step
    rows    of the step
    host_s  of the round, in which the device waits for the host; what its drafts take of it is in drafts_s too
    """

    tokens: int
    rows: int
    placement: Placement
    kernels_s: float
    link_s: float
    step_s: float
    drafts_s: float
    host_s: float
    round_s: float
    tokens_per_round: float | None

    @property
    def tokens_per_s(self) -> float | None:
        """None where nobody knows how many drafts are accepted: then between one and all of ``rows`` come per round."""
        return None if self.tokens_per_round is None else self.tokens_per_round / self.round_s


def place(setup: Setup, rates: Rates, tokens: int, rows: int) -> Placement:
    """The pages of a step of ``rows`` rows behind ``tokens`` tokens. ``BudgetError`` if the pool cannot hold it."""
    budget, geometry = setup.budget, setup.budget.geometry
    config = replace(budget.residency, link_bytes_per_s=rates.link_bytes_per_s)
    pages = geometry.pages_of(tokens + rows)
    # The policy's own measure of the gap between two layers that stream: a step that streams no page, over their
    # number, without the time that the link takes for weights.
    pass_s, gaps = setup.pass_s(rates), max(1, sum(not config.slides(layer) for layer in setup.reads))
    gap_s = (side_by_side(_kernels_s(setup, rates, 0, 1, calls=0), pass_s) - pass_s) / gaps
    cuts: tuple[int, ...] = (0,) * setup.kv_layers
    # A prompt of so many tokens is read first: not all that a smaller pool gave up then comes back.
    for phase, first, last in (
        (Phase.PREFILL, max(0, tokens - budget.context.ubatch_tokens), tokens), (Phase.DECODE, tokens, tokens + rows)
    ):
        seen = Observation(
            geometry.pages_of(last), first // geometry.page_tokens, budget.memory.slots(phase), gap_s
        )
        state = residency_step(config, ResidencyState(cuts), seen)
        cuts = state.cuts
    away = [len(config.streamed(cut)) for cut in state.cuts]
    streamed = [config.streamed(state.cuts[layer]) for layer in setup.reads]
    count = sum(map(len, streamed))
    runs = calls = 0
    if count:
        schedule = plan_schedule(
            streamed, ring_slots=state.ring_slots, run_pages=config.run_pages_in(state.ring_slots)
        )
        runs = len(schedule.runs)
        # What arrives in one batch is read with the resident pages.
        arrivals = [len(set(schedule.batches(read))) for read in range(len(setup.reads))]
        calls = sum(count for count in arrivals if count > 1)
    every = pages * setup.kv_layers - sum(state.first_pages)
    return Placement(
        every, state.cuts, every - sum(away), count, state.ring_slots, runs, calls,
        count * geometry.page_bytes,
    )


def forecast(setup: Setup, rates: Rates, tokens: int, rounds: Rounds) -> Point:
    """A round behind ``tokens`` tokens, which leaves room for it in the context."""
    placement = place(setup, rates, tokens, rounds.rows)
    kernels_s = _kernels_s(setup, rates, tokens, rounds.rows, placement.calls)
    link_s = placement.streamed_bytes / rates.link_bytes_per_s + placement.runs * rates.copy_s + setup.pass_s(rates)
    step_s = side_by_side(kernels_s, link_s)
    drafts_s = rounds.drafts * _draft_s(setup, rates, tokens, placement, rounds.kind) if rounds.drafts else 0.0
    besides_s = rates.round_s + placement.runs * rates.plan_s
    host_s = besides_s + rounds.drafts * rates.draft_s
    return Point(
        tokens, rounds.rows, placement, kernels_s, link_s, step_s, drafts_s, host_s, drafts_s + step_s + besides_s,
        rounds.tokens,
    )


def side_by_side(first_s: float, second_s: float) -> float:
    """Two kinds of work at one time."""
    longer, shorter = max(first_s, second_s), min(first_s, second_s)
    return longer * (1.0 + (shorter / longer) ** _BALANCE) ** (1.0 / _BALANCE) if longer > 0.0 else 0.0


def _kernels_s(setup: Setup, rates: Rates, tokens: int, rows: int, calls: int) -> float:
    """A step's kernels: the trunk, the head, the MTP block's layer that follows; further attention calls.

    Of experts, each row reads its own: two that choose the same one are the exception.
    """
    weights = setup.weights
    read = [
        setup.token_bytes[layer] * min(tokens + rows, setup.windows[layer] or tokens + rows) for layer in setup.reads
    ]
    return (
        sum(rates.multiply_s(part, rows) for part in (weights.trunk, weights.head, weights.nextn))
        + sum(rates.choose_s(part, weights.share * rows) for part in (weights.experts, weights.nextn_experts))
        + (setup.layers + setup.favoured) * rates.layer_s
        + sum(rates.attend_s(each, rows) for each in read)
        + calls * (rates.run_s + (rates.run_rows_s if rows > 1 else 0.0))
    )


def _draft_s(setup: Setup, rates: Rates, tokens: int, placement: Placement, kind: str) -> float:
    """One drafted row: the MTP block alone, or the trunk on the pages that are on the device; and the head."""
    weights, geometry = setup.weights, setup.budget.geometry
    cuts = placement.cuts
    if kind == "draft-mtp":
        parts, experts, layers = (weights.nextn, weights.head), weights.nextn_experts, setup.favoured
        cuts = cuts[setup.trunk_kv_layers :]
        streamed = sum(cut - min(setup.head_pages, cut) for cut in cuts)
        streamed_s = streamed * geometry.page_bytes / rates.link_bytes_per_s
        attention_s = len(cuts) * rates.attend_s(geometry.token_bytes * tokens, 1)
    else:
        parts, experts, layers = (weights.trunk, weights.head), weights.experts, setup.layers
        streamed_s = setup.pass_s(rates)
        away = [geometry.page_tokens * (cut - min(setup.head_pages, cut)) for cut in cuts]
        trunk = [layer for layer in setup.reads if layer < setup.trunk_kv_layers]
        attention_s = sum(
            rates.attend_s(
                setup.token_bytes[layer] * max(0, min(tokens - away[layer], setup.windows[layer] or tokens)), 1
            )
            for layer in trunk
        )
    multiply_s = sum(rates.multiply_s(part, 1) for part in parts) + rates.choose_s(experts, weights.share)
    return max(multiply_s + layers * rates.layer_s + attention_s, streamed_s) + rates.draft_s


def contexts(context_tokens: int, rows: int, step_tokens: int) -> list[int]:
    """Where to look: the context halved again and again, down to a group of pages; each with room for a round."""
    least = GROUP_PAGES * step_tokens
    points = {max(0, context_tokens - rows)}
    size = context_tokens // 2
    while size >= least:
        points.add(size - rows)
        size //= 2
    return sorted(points)


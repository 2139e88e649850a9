"""The forward pass on the host device, over a dense KV cache, against the oracle and against itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvs_core.device.base import StepInputs
from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.device.host.ops import basic
from kvs_core.device.workspace import Workspace, workspace_bytes
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.phases import Phase
from kvs_core.models.blocks import Batch
from kvs_core.models.model import Model, forward_buffers, logit_buffers
from kvs_core.models.recurrent import RecurrentState
from kvs_core.models.registry import load_model
from tests.models.dense_kv import DenseKv, DenseLayer
from tests.reference import forward as oracle
from tests.support.tiny_gguf import (
    Experts,
    Gemma4,
    write_tiny_gemma3,
    write_tiny_gemma4,
    write_tiny_llama,
    write_tiny_qwen2,
    write_tiny_qwen3,
    write_tiny_qwen3moe,
    write_tiny_qwen35,
    write_tiny_qwen35moe,
)

UBATCH = 16
ARENA_BYTES = 1 << 20

# float32 against float64: logits of a few units, each a chain of some hundred roundings.
TOLERANCE = 1e-4


@pytest.fixture(
    scope="module",
    params=[
        "qwen35", "qwen35 untied, no MTP", "llama", "llama untied, divisors", "qwen2", "qwen2 untied, q8_0", "qwen3",
        "qwen3 untied, q8_0", "qwen3moe", "qwen3moe q8_0", "gemma3", "gemma3 stretched, capped, q8_0", "qwen35moe",
        "qwen35moe joined, q8_0", "gemma4 shared, per layer", "gemma4 with experts, q8_0", "q8_0",
    ],
)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    match request.param:
        # A head of 48 has 6 rotary pairs, which three equal sections cover.
        case "qwen35":
            return write_tiny_qwen35(path, seed=1, head_dim=48)
        case "qwen35 untied, no MTP":
            return write_tiny_qwen35(path, seed=3, head_dim=48, mtp=False, tied=False, n_layer=5, interval=3)
        case "llama":
            return write_tiny_llama(path, seed=2)
        case "llama untied, divisors":
            return write_tiny_llama(path, seed=4, tied=False, rope_freqs=True, head_dim=32, kv_heads=1)
        case "qwen2":
            return write_tiny_qwen2(path, seed=6)
        case "qwen2 untied, q8_0":
            return write_tiny_qwen2(path, seed=7, tied=False, heads=4, kv_heads=2, weight_type="q8_0")
        case "qwen3":
            return write_tiny_qwen3(path, seed=8)
        case "qwen3 untied, q8_0":
            return write_tiny_qwen3(path, seed=9, tied=False, heads=3, kv_heads=1, head_dim=96, weight_type="q8_0")
        case "gemma3":
            return write_tiny_gemma3(path, seed=10, window=20)
        case "gemma3 stretched, capped, q8_0":
            return write_tiny_gemma3(
                path, seed=11, n_layer=3, window=7, pattern=[False, True, True], rope_scale=8.0, softcap=3.0, heads=3,
                kv_heads=1, head_dim=96, weight_type="q8_0",
            )
        case "gemma4 shared, per layer":
            return write_tiny_gemma4(
                path, seed=14, window=20, head_dims=(32, 96), ffn=[64, 96, 32, 64, 128],
                more=Gemma4(shared=2, per_layer=8, values=False),
            )
        case "gemma4 with experts, q8_0":
            experts = Experts(count=5, used=2, joined=True)
            return write_tiny_gemma4(path, seed=15, window=7, weight_type="q8_0", more=Gemma4(experts=experts))
        case "qwen3moe":
            return write_tiny_qwen3moe(path, seed=10)
        case "qwen3moe q8_0":
            return write_tiny_qwen3moe(path, seed=11, experts=Experts(count=20, used=8), weight_type="q8_0")
        case "qwen35moe":
            return write_tiny_qwen35moe(path, seed=12)
        case "qwen35moe joined, q8_0":
            experts = Experts(count=5, used=2, shared=32, joined=True)
            return write_tiny_qwen35moe(path, seed=13, experts=experts, weight_type="q8_0")
        case _:
            return write_tiny_qwen35(path, seed=5, head_dim=96, weight_type="q8_0")


@pytest.fixture(scope="module")
def device(model_path: Path) -> Iterator[HostDevice]:
    """A device of its own for every model: it holds the weights of one."""
    host = HostDevice(threads=1, debug=HostDebug(poison=True))
    host.allocate_arena(ARENA_BYTES)
    yield host
    host.close()


@pytest.fixture(scope="module")
def model(model_path: Path, device: HostDevice) -> Model:
    return load_model(GgufFile.open(model_path), device, context_tokens=2048)


class Run:
    """One sequence of a model over a dense cache, collecting what every row gives."""

    def __init__(self, model: Model, device: HostDevice) -> None:
        specs = [*forward_buffers(model.spec, UBATCH), *logit_buffers(model.spec, UBATCH)]
        self.model = model
        self.device = device
        self.ws = Workspace(device, 256, workspace_bytes(specs), specs)
        self.kv = DenseKv([layer.kv_index for layer in model.spec.layers if layer.kv_index is not None])
        self.state = RecurrentState(model.spec, device)
        self.position = 0
        self.hidden = np.empty((0, model.spec.n_embd), np.float32)
        self.logits = np.empty((0, model.spec.n_vocab), np.float32)

    def forward(self, batch: Batch, kv: DenseKv) -> None:
        """Run rows; what becomes of them is open."""
        self.state.begin(batch.phase, batch.rows, batch.first_position)
        self.device.begin_step(StepInputs(batch.tokens, batch.first_position, self.state.pending, batch.phase))
        self.model.forward(batch, kv, self.state, self.ws)

    def step(self, tokens: np.ndarray, phase: Phase, keep: int | None = None) -> None:
        """Run the rows and keep the first ``keep`` (all) of them."""
        keep = len(tokens) if keep is None else keep
        if phase is Phase.PREFILL:
            self.state.flush()
        self.forward(Batch(tokens, self.position, phase), self.kv)
        hidden = np.empty((len(tokens), self.model.spec.n_embd), np.float32)
        basic.rms_norm(self.ws.rows("x", len(tokens)), self.model._output_norm, hidden, eps=self.model.spec.rms_eps)
        logits = self.model.logits(self.ws.rows("x", len(tokens)), self.ws)
        self.hidden = np.concatenate([self.hidden, hidden[:keep]])
        self.logits = np.concatenate([self.logits, logits[:keep]])
        self.state.settle(keep)
        self.position += keep
        self.kv.truncate(self.position)


def draw_tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count).astype(np.int32)


@pytest.mark.parametrize(
    "steps",
    [
        "p16 p16 p16 p16",
        "p7 p1 p16 p3 p16 p5",
        "d1 " * 20,
        "d8 d1 d5 d2 d8",
        "p16 d1 d1 d4 p9 d8 p16 d1",
    ],
)
def test_logits_are_the_oracles(model: Model, model_path: Path, device: HostDevice, steps: str) -> None:
    """Hidden rows and logits equal a plain float64 pass, in prefill ubatches, decode steps and mixtures of them."""
    parts = [(part[0], int(part[1:])) for part in steps.split()]
    tokens = draw_tokens(0, sum(rows for _, rows in parts))
    run = Run(model, device)
    for kind, rows in parts:
        run.step(tokens[run.position : run.position + rows], Phase.PREFILL if kind == "p" else Phase.DECODE)
    expected = oracle.forward(model_path, tokens.tolist())
    np.testing.assert_allclose(run.hidden, expected.hidden, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(run.logits, expected.logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("rows", range(2, 9))
def test_a_rows_bits_do_not_depend_on_the_others(model: Model, device: HostDevice, rows: int) -> None:
    """n rows in one decode step give the bits of n steps of one row, hidden rows and logits alike."""
    tokens = draw_tokens(1, 10 + rows)
    together, alone = Run(model, device), Run(model, device)
    for run in (together, alone):
        run.step(tokens[:10], Phase.PREFILL)
    together.step(tokens[10:], Phase.DECODE)
    for row in range(10, 10 + rows):
        alone.step(tokens[row : row + 1], Phase.DECODE)
    assert np.array_equal(together.hidden, alone.hidden)
    assert np.array_equal(together.logits, alone.logits)


def test_rejected_rows_leave_no_trace(model: Model, device: HostDevice) -> None:
    """After steps of which only some rows were kept, every later bit equals that of a run without the others."""
    tokens, wrong = draw_tokens(2, 40), draw_tokens(3, 40)
    drafted, plain = Run(model, device), Run(model, device)
    for rows, keep in ((4, 4), (8, 1), (3, 3), (5, 2), (8, 8), (2, 1), (6, 4)):
        draft = tokens[drafted.position : drafted.position + rows].copy()
        draft[keep:] = wrong[keep:rows]
        drafted.step(draft, Phase.DECODE, keep)
    for position in range(drafted.position):
        plain.step(tokens[position : position + 1], Phase.DECODE)
    for run in (drafted, plain):
        run.step(tokens[run.position : run.position + 7], Phase.PREFILL)
    assert np.array_equal(drafted.hidden, plain.hidden)
    assert np.array_equal(drafted.logits, plain.logits)


class Failure(Exception):
    """What ``FailingKv`` raises."""


class FailingKv(DenseKv):
    """The layers of another cache, until the one that fails."""

    def __init__(self, kv: DenseKv, fail_at: int) -> None:
        self._layers = kv._layers[:fail_at]

    def layer(self, read_index: int) -> DenseLayer:
        if read_index >= len(self._layers):
            raise Failure
        return super().layer(read_index)


def test_a_step_that_broke_off_leaves_no_trace(model: Model, device: HostDevice) -> None:
    """A decode step whose attention fails, in whichever layer, can be dropped and repeated with the same bits."""
    tokens = draw_tokens(4, 12)
    broken, plain = Run(model, device), Run(model, device)
    for run in (broken, plain):
        run.step(tokens[:4], Phase.DECODE, keep=3)
        run.step(tokens[3:8], Phase.DECODE)
    for fail_at in range(model.spec.n_reads):
        batch = Batch(tokens[8:11], 8, Phase.DECODE)
        with pytest.raises(Failure):
            broken.forward(batch, FailingKv(broken.kv, fail_at))
        broken.state.drop()
        broken.kv.truncate(8)
    for run in (broken, plain):
        run.step(tokens[8:], Phase.DECODE)
    assert np.array_equal(broken.logits, plain.logits)


def test_workspace_grows_with_rows_alone(model: Model) -> None:
    """A workspace for more rows has the same buffers, and the first rows of each serve a smaller step."""
    small, large = forward_buffers(model.spec, 1), forward_buffers(model.spec, UBATCH)
    assert [spec.name for spec in small] == [spec.name for spec in large]
    assert all(spec.shape[0] == UBATCH for spec in large)   # a multiple of 8, as queries are kept
    assert len({spec.name for spec in large}) == len(large)
    assert workspace_bytes(large) <= UBATCH * workspace_bytes(small)

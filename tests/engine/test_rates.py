"""Rates: measured once, kept, and measured again where what was kept is of no use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.host.device import HostDevice
from kvs_core.engine import host_rates, measuring, rates
from kvs_core.engine.forecast import IN_FILE, Rates
from kvs_core.errors import SettingsError
from kvs_core.settings.rooms import KvSettings
from tests.cuda_on_cpu.cpu_runtime import CpuRuntime

KV = KvSettings("q8_0", "q4_0")
PRODUCTS = {"link": 3e9, "float32 1": 2e9, "float32 2": 1e9, "float32 4": 1e9, "float32 8": 0.25e9,
            "in the file 1": 1e8, "in the file 2": 1e8, "in the file 4": 5e7, "in the file 8": 4e7}
STEPS = {"attention": 7e8, "row": 0.25, "layer": 1e-3, "call": 2e-3}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A cache of its own, and a list of what is measured."""
    done: list[str] = []

    def note(name: str, numbers: dict[str, float]) -> Callable[..., dict[str, float]]:
        def measure(*_: object) -> dict[str, float]:
            done.append(name)
            return numbers

        return measure

    monkeypatch.setenv("KVS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(rates, "measure_products", note("products", PRODUCTS))
    monkeypatch.setattr(rates, "measure_steps", note("steps", STEPS))
    return done


@pytest.fixture
def device() -> Iterator[HostDevice]:
    with closing(HostDevice(1)) as opened:
        yield opened


def test_measured_once(measured: list[str], device: HostDevice) -> None:
    """The second time nothing is measured; other KV types take new steps and the same products; other threads all."""
    first = rates.find_rates(device, KV)
    again = rates.find_rates(device, KV)
    assert (first.kept, again.kept) == (False, True)
    assert first.rates == again.rates
    rates.find_rates(device, KvSettings("f16", "f16"))
    assert measured == ["products", "steps", "steps"]
    with closing(HostDevice(2)) as other:
        assert not rates.find_rates(other, KV).kept


def test_another_processor_is_measured(
    measured: list[str], device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines of one name need not be one machine."""
    rates.find_rates(device, KV)
    monkeypatch.setattr(rates, "cpu_model", lambda: "another")
    assert not rates.find_rates(device, KV).kept
    assert measured == ["products", "steps"] * 2


@pytest.mark.parametrize("text", [
    "", "{", "[]", "7", '{"numbers": 3}', '{"key": "other", "numbers": {"link": 1.0}}', "bad numbers"])
def test_what_is_damaged_is_measured_again(
    measured: list[str], device: HostDevice, tmp_path: Path, text: str
) -> None:
    """Whatever stands in the files: no JSON, another form, another machine's, numbers that cannot be."""
    good = rates.find_rates(device, KV).rates
    for path in (tmp_path / "rates").iterdir():
        kept = json.loads(path.read_text())
        kept["numbers"] |= dict.fromkeys(kept["numbers"], 0.0)
        path.write_text(json.dumps(kept) if text == "bad numbers" else text)
    found = rates.find_rates(device, KV)
    assert (found.kept, found.rates) == (False, good)
    assert measured == ["products", "steps"] * 2


def test_what_was_kept_is_forgotten(measured: list[str], device: HostDevice, tmp_path: Path) -> None:
    """All of one device, with every K and V type; another's rates stay, and what is damaged is in nobody's way."""
    with closing(HostDevice(2)) as other:
        for kv in (KV, KvSettings("f16", "f16")):
            rates.find_rates(device, kv)
        rates.find_rates(other, KV)
        (tmp_path / "rates" / "damaged.json").write_text("[]")
        rates.forget_rates(device)
        measured.clear()
        assert rates.find_rates(other, KV).kept
        assert not rates.find_rates(device, KV).kept
        assert not rates.find_rates(device, KvSettings("f16", "f16")).kept
    assert measured == ["products", "steps", "steps"]


def test_what_cannot_be_forgotten(
    measured: list[str], device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """is no measurement: one line instead of the old rates."""
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    rates.find_rates(device, KV)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(SettingsError, match="Read-only file system; remove it, or set KVS_CACHE_DIR"):
        rates.forget_rates(device)
    assert measured == ["products", "steps"]


def test_a_disk_that_takes_nothing(
    measured: list[str], device: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """costs a warning."""
    file = tmp_path / "a file"
    file.write_text("")
    monkeypatch.setenv("KVS_CACHE_DIR", str(file))
    assert not rates.find_rates(device, KV).kept
    assert "cannot be kept" in caplog.text
    assert measured == ["products", "steps"]


def test_rates_of_the_host_by_hand() -> None:
    """Costs of rows are those of one row over those of many, in between by a line, and never fall."""
    found = host_rates.host_rates(PRODUCTS | STEPS)
    assert found.row_costs[""] == pytest.approx([1, 2, 2, 2, 3.5, 5, 6.5, 8])
    assert found.row_costs[IN_FILE] == pytest.approx([1, 1, 1.5, 2, 2.125, 2.25, 2.375, 2.5])
    assert (found.link_bytes_per_s, found.attention_bytes_per_s, found.layer_s) == (3e9, 7e8, 1e-3)
    assert (found.attention_row, found.round_s, found.draft_s) == (0.25, 2e-3, 2e-3)


def test_steps_of_the_host_by_hand() -> None:
    """Rounds have nine layers and drafts one: a millisecond each, and two beside them, are told apart. A token of
    context takes 10 us, and 4 for each further row of three."""
    draft_s = 1e-3 + 240 / 540 * 10e-3 + 1e-3 + 2e-3   # its weights, its layer's K and V, the layer, the rest
    rounds_s = (9e-3 + 10e-3 + 9e-3 + 2e-3, 9e-3 + 30e-3 + 9e-3 + 2e-3)

    def numbers(
        rounds_s: tuple[float, float], draft_s: float, steps_s: tuple[float, float] = (50e-3, 94e-3)
    ) -> Mapping[str, float]:
        return host_rates.step_numbers(
            1e9, (1000, 3000), rounds_s, steps_s, draft_s, rows=4, layers=9, read_bytes=9_000_000,
            drafted_bytes=1_000_000, token_bytes=[200, 100, 240],
        )

    assert numbers(rounds_s, draft_s) == pytest.approx(
        {"attention": 540 / 10e-6, "row": 0.4, "layer": 1e-3, "call": 2e-3})
    for disturbed in (numbers((30e-3, 20e-3), draft_s), numbers(rounds_s, 1e-6), numbers(rounds_s, 1.0),
                      numbers((1e-3, 50e-3), draft_s), numbers(rounds_s, draft_s, (94e-3, 50e-3))):
        assert all(value > 0.0 for value in disturbed.values()), disturbed
    assert numbers(rounds_s, draft_s, (0.0, 1.0))["row"] == 1.0


def test_the_host_is_measured(device: HostDevice) -> None:
    """Real numbers of this machine: all positive, and memory, products and attention within what machines do."""
    numbers = dict(host_rates.measure_products(device))
    numbers |= host_rates.measure_steps(device, KV, numbers)
    found = host_rates.host_rates(numbers)
    assert isinstance(found, Rates)
    assert 1e8 < found.link_bytes_per_s < 1e12
    assert 1e7 < found.attention_bytes_per_s < 1e12
    assert 1e-6 < found.layer_s < 1.0
    assert 0.01 <= found.attention_row <= 1.0
    assert 1e-7 < found.round_s == found.draft_s < 1.0
    assert all(1e8 < speed < 1e12 for speed in found.weight_bytes_per_s.values())
    for costs in found.row_costs.values():
        assert list(costs) == sorted(costs)


class Clocked:
    """A device whose copies take their time on a clock of the test's: bytes over a rate per stream."""

    def __init__(self) -> None:
        self.now = 0.0
        self.copy, self.compute, self.publish = _Stream(), _Stream(), _Stream()
        self.rates = {id(self.copy): 5e9, id(self.compute): 1e11, id(self.publish): 4e9}

    def free_bytes(self) -> int:
        return 64 << 20

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def allocate_pinned(self, size_bytes: int) -> np.ndarray:
        return np.empty(size_bytes, np.uint8)

    def enqueue_copy(self, dst: np.ndarray, src: np.ndarray, stream: Any) -> None:
        assert dst.nbytes == src.nbytes <= self.free_bytes() // 8
        self.now += src.nbytes / self.rates[id(stream)]


class _Stream:
    def synchronize(self) -> None:
        pass


def test_a_gpu_is_measured_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the link, there and back, bytes count once, within memory twice, as read and as written; little memory is
    taken."""
    device: Any = Clocked()
    monkeypatch.setattr(measuring, "perf_counter", lambda: device.now)
    numbers = dict(rates.measure_gpu(device))
    assert numbers == {"link": pytest.approx(5e9), "back": pytest.approx(4e9), "memory": pytest.approx(2e11)}
    found = rates.gpu_rates(numbers | {"round": 2e-4, "draft": 1e-4})
    assert (found.round_s, found.draft_s) == (2e-4, 1e-4)
    assert found.link_bytes_per_s == numbers["link"]
    # Reading alone is a little faster than copying.
    assert all(0.5 < speed / numbers["memory"] < 1.1 for speed in found.weight_bytes_per_s.values())
    assert all(len(costs) == 8 and list(costs) == sorted(costs) for costs in found.row_costs.values())


def test_a_gpu_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the host that serves it: under another processor, and another Python, both are measured again."""
    done: list[float] = []

    def host_part(device: CudaDevice, memory: float) -> dict[str, float]:
        done.append(memory)
        return {"round": 3e-4, "draft": 2e-4}

    monkeypatch.setenv("KVS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(rates, "Driver", lambda: SimpleNamespace(cuda_version=(13, 0)))
    monkeypatch.setattr(rates, "measure_gpu", lambda device: {"link": 5e10, "back": 5e10, "memory": 4e12})
    monkeypatch.setattr(rates, "measure_host_part", host_part)
    with closing(CudaDevice(CpuRuntime())) as device:
        first, again = rates.find_rates(device, KV), rates.find_rates(device, KvSettings("f16", "f16"))
        assert (first.kept, again.kept, done) == (False, True, [4e12])
        assert (again.rates.round_s, again.rates.draft_s) == (3e-4, 2e-4)
        monkeypatch.setattr(rates, "cpu_model", lambda: "another")
        assert not rates.find_rates(device, KV).kept
        monkeypatch.setattr(rates.platform, "python_version", lambda: "3.99.0")
        assert not rates.find_rates(device, KV).kept

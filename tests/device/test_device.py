"""The host device: an arena of exact size, copies behind fences, hostile on demand."""

import random
import threading
from collections.abc import Iterator

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.base import Capabilities
from kvs_core.device.host import device as device_module
from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.device.host.weights import HostWeight
from kvs_core.device.operands import Buffer, Weight
from kvs_core.errors import CapabilityError, DeviceError
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import KvType, PageGeometry
from tests.device.tensors import tensor


@pytest.fixture
def device() -> Iterator[HostDevice]:
    device = HostDevice()
    yield device
    device.close()


def test_the_arena_has_its_size_to_the_byte_and_begins_at_a_page(device: HostDevice) -> None:
    """A window may end at the last byte and not beyond it; windows share the arena's memory."""
    device.allocate_arena(5000)
    whole = device.arena_view(0, (5000,), np.uint8)
    assert whole.ctypes.data % 4096 == 0
    tail = device.arena_view(4992, (2,), np.float32)
    tail[:] = 1.0
    assert whole[4992:].tobytes() == np.ones(2, np.float32).tobytes()
    assert device.arena_view(16, (3, 4, 5), np.float16).shape == (3, 4, 5)
    assert device.memory_report()["arena"] == 5000


@pytest.mark.parametrize(("offset", "shape"), [(-4, (1,)), (4996, (2,)), (0, (1251,)), (2, (1,)), (8192, (0,))])
def test_a_window_outside_the_arena_or_between_items_is_refused(
    device: HostDevice, offset: int, shape: tuple[int, ...]
) -> None:
    """Addresses come from plans, so this is a bug, not a situation."""
    device.allocate_arena(5000)
    with pytest.raises(AssertionError):
        device.arena_view(offset, shape, np.float32)


def test_memory_that_cannot_be_had_is_an_error_with_both_numbers(device: HostDevice) -> None:
    """An absurd arena is refused before it is touched, and one that fits can be had afterwards."""
    with pytest.raises(DeviceError, match=r"1048576 MiB of RAM for the arena cannot be had: \d+ of \d+ MiB are free"):
        device.allocate_arena(1 << 40)
    with pytest.raises(DeviceError, match="the KV history"):
        device.allocate_pinned(1 << 40)
    device.allocate_arena(4096)


def test_copies_arrive_and_are_counted(device: HostDevice) -> None:
    """Bytes go where they should, on each stream, between any buffers of equal size."""
    device.allocate_arena(4096)
    slots = device.arena_view(0, (4, 1024), np.uint8)
    history = device.allocate_pinned(2048)
    history[:] = np.arange(2048) % 251
    device.enqueue_copy(slots[1:3], history, device.copy)
    device.copy.record().wait()
    assert np.array_equal(slots[1:3].reshape(-1), history)
    home = device.allocate_pinned(1024)
    device.enqueue_copy(home, slots[2], device.publish)
    device.publish.synchronize()
    assert np.array_equal(home, history[1024:])
    device.enqueue_copy(slots[0], slots[2], device.compute)
    assert np.array_equal(slots[0], history[1024:])
    done = device.counters()
    assert (done.copy_bytes, done.copy_calls, done.publish_bytes, done.publish_calls) == (2048, 1, 1024, 1)
    with pytest.raises(AssertionError):
        device.enqueue_copy(slots[0], history, device.copy)


def test_a_slot_reads_as_poison_from_the_copys_turn_until_it_is_done() -> None:
    """Who reads a slot without waiting for its fence sees 0xFF, not the page that was there or is to come."""
    begun, go = threading.Event(), threading.Event()

    def delay() -> float:
        begun.set()
        assert go.wait(10)
        return 0.0

    device = HostDevice(debug=HostDebug(copy_delay=delay, poison=True))
    device.allocate_arena(64)
    slot = device.arena_view(0, (64,), np.uint8)
    assert (slot == 0xFF).all()
    slot[:] = 1
    device.enqueue_copy(slot, np.full(64, 2, np.uint8), device.copy)
    fence = device.copy.record()
    assert begun.wait(10)
    assert (slot == 0xFF).all()
    go.set()
    fence.wait()
    assert (slot == 2).all()
    values = np.zeros((2, 4), np.float32)
    device.discard(values)
    assert np.isnan(values).all()
    assert (device.allocate_pinned(8) == 0xFF).all()
    device.close()


def test_the_counters_know_how_long_compute_waited() -> None:
    """A wait for a slow copy is a stall; a wait for one that is done is none."""
    device = HostDevice(debug=HostDebug(copy_delay=lambda: 0.05))
    device.enqueue_copy(np.zeros(8, np.uint8), np.ones(8, np.uint8), device.copy)
    fence = device.copy.record()
    device.compute.wait(fence)
    stalled = device.counters().stall_ns
    assert stalled > 20e6
    device.compute.wait(fence)
    assert device.counters().stall_ns == stalled
    device.close()


def test_free_memory_is_what_the_machine_says(device: HostDevice) -> None:
    """An arena chosen by it can be had."""
    assert device.free_bytes() > 1 << 20
    device.drop_captured()
    device.allocate_arena(min(device.free_bytes() // 2, 1 << 20))


def test_discard_leaves_an_ordinary_device_alone(device: HostDevice) -> None:
    """Without poison it costs nothing and changes nothing."""
    values = np.ones(4, np.float32)
    device.discard(values)
    assert (values == 1.0).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12), st.integers(0, 2**32 - 1))
def test_with_waits_in_place_delays_and_poison_change_nothing(moves: list[tuple[int, int]], seed: int) -> None:
    """Pages that go to slots on one stream and home on the other end up as if all was done at once."""
    delays = random.Random(seed)
    device = HostDevice(debug=HostDebug(copy_delay=lambda: delays.choice([0.0, 0.0005]), poison=True))
    device.allocate_arena(4 * 256)
    slots = device.arena_view(0, (4, 256), np.uint8)
    slots[:] = 0
    expected = [0, 0, 0, 0]
    pages = [np.full(256, 10 + page, np.uint8) for page in range(4)]
    for page, slot in moves:
        device.copy.wait(device.publish.record())
        device.enqueue_copy(slots[slot], pages[page], device.copy)
        device.publish.wait(device.copy.record())
        expected[slot] = 10 + page
        pages[page] = np.empty(256, np.uint8)
        device.enqueue_copy(pages[page], slots[slot], device.publish)
    device.compute.wait(device.publish.record())
    assert np.array_equal(slots, np.repeat(expected, 256).reshape(4, 256))
    assert all((page == 10 + number).all() for number, page in enumerate(pages))
    device.close()


def test_the_copy_asked_for_fails_and_is_reported() -> None:
    """The copy before it is done; its fence, and every later call on the stream, raise."""
    device = HostDevice(debug=HostDebug(fail_copy_at=1))
    targets = np.zeros((3, 16), np.uint8)
    source = np.ones(16, np.uint8)
    device.enqueue_copy(targets[0], source, device.copy)
    device.copy.record().wait()
    device.enqueue_copy(targets[1], source, device.copy)
    with pytest.raises(DeviceError, match="copy 1 of 16 bytes"):
        device.copy.synchronize()
    with pytest.raises(DeviceError, match="copy 1 of 16 bytes"):
        device.enqueue_copy(targets[2], source, device.copy)
    device.enqueue_copy(targets[2], source, device.publish)
    device.publish.synchronize()
    assert targets[:, 0].tolist() == [1, 0, 1]
    device.close()


def test_the_allocation_asked_for_fails_and_the_next_one_works() -> None:
    """Arena, device and pinned memory are counted together."""
    device = HostDevice(debug=HostDebug(fail_alloc_at=1))
    device.allocate((4,), np.float32)
    with pytest.raises(DeviceError, match="the arena"):
        device.allocate_arena(4096)
    device.allocate_arena(4096)
    device.close()


def test_state_is_zeroed_and_reported_and_downloads_are_copies(device: HostDevice) -> None:
    """Allocated memory starts at zero; a downloaded array does not follow the buffer."""
    state = device.allocate((3, 5), np.float32)
    assert state.shape == (3, 5)
    assert not state.any()
    host = device.download(state)
    state[:] = 1.0
    assert not host.any()
    device.load_vector(tensor("norm", np.ones((1, 8), np.float32)))
    assert device.memory_report() == {"weights": 32, "state": 60, "arena": 0}


def test_a_small_tensor_is_read_as_float32_in_numpy_order(device: HostDevice) -> None:
    """Shape reversed: taps of a channel are contiguous in the file and stay together."""
    taps = np.arange(12, dtype=np.float32).reshape(3, 4)
    half = tensor("conv1d", taps, gguf.GGMLQuantizationType.F16)
    assert half.shape == (4, 3)
    loaded = device.load_vector(half)
    assert loaded.dtype == np.float32
    assert np.array_equal(loaded, taps)


def test_the_same_tensor_is_the_same_weight(device: HostDevice) -> None:
    """A tied output head costs nothing: the tensor is held once."""
    table = tensor("token_embd.weight", np.ones((32, 32), np.float32), gguf.GGMLQuantizationType.F16)
    device.prepare_weights([table])
    device.load_matrix([table])
    device.load_matrix([table])
    device.load_table(table)
    assert device.memory_report()["weights"] == 4096


def test_the_link_has_a_rate(device: HostDevice) -> None:
    """Measured once: a policy that asks twice sees one machine."""
    assert device.link_bytes_per_s() > 1e8
    assert device.link_bytes_per_s() == device.link_bytes_per_s()


def test_close_ends_the_threads_and_can_be_repeated() -> None:
    """A closed device has no arena and no streams left to enqueue on."""
    before = threading.active_count()
    device = HostDevice(3)
    device.allocate_arena(4096)
    assert threading.active_count() == before + 2 + 2   # two copy streams, two helpers
    device.close()
    device.close()
    assert threading.active_count() == before
    assert device.memory_report()["arena"] == 0
    with pytest.raises(DeviceError, match="closed"):
        device.enqueue_copy(np.zeros(1, np.uint8), np.zeros(1, np.uint8), device.copy)


def test_a_blas_that_mixes_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a row's bits followed its neighbours, verified tokens could differ from decoded ones: nothing may start."""

    def mixing(x: Buffer, weight: Weight, out: Buffer, *, phase: Phase) -> None:
        assert isinstance(weight, HostWeight)
        np.matmul(x, weight.pieces(phase)[0].matrix.read(0, weight.n_out).T, out=out)
        out[:, 0] = np.nextafter(out[:, 0], np.float32(len(x)))

    monkeypatch.setattr(device_module, "matmul", mixing)
    with pytest.raises(DeviceError, match="other bits beside other rows"):
        device_module._check_row_invariance.__wrapped__()


def test_capabilities_say_what_works_and_refuse_the_rest(device: HostDevice) -> None:
    """The host takes every pair of K/V types and any head size; a device that does not says which."""
    geometry = PageGeometry(32, 2, 96, 96, KvType.Q5_1, KvType.Q4_0)
    device.capabilities.check(geometry)
    narrow = Capabilities("toy", frozenset({(KvType.F16, KvType.F16)}), frozenset({64, 128}), 8)
    with pytest.raises(CapabilityError, match="K q5_1 with V q4_0 has no attention kernel on toy"):
        narrow.check(geometry)
    with pytest.raises(CapabilityError, match="head dim 96 has no attention kernel on toy, which has 64, 128"):
        narrow.check(PageGeometry(32, 2, 128, 96, KvType.F16, KvType.F16))
    narrow.check(PageGeometry(32, 2, 128, 64, KvType.F16, KvType.F16))

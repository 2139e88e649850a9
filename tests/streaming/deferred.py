"""A CUDA runtime that does work as late, and in as strange an order, as streams and events allow.

What is enqueued becomes a node that waits for the nodes before it in its stream and for those of the events its stream
was told to wait for; nothing else orders anything. Nodes are done when the host asks for a fence, one of those that may
be done at a time, by ranks that are drawn. So a missing wait is a wrong byte. A capture keeps nodes instead; each
launch adds copies of them behind the compute stream, and what the compute stream gets next comes behind all of them. As
in CUDA, a stream enters a capture by waiting for an event of it, what it did before orders nothing there, and it must
be joined again.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Work = Callable[[], None]


class Node:
    """A piece of work, and what it comes behind. ``graph``: it is captured work, never done itself. Of the nodes that
    may be done the one of the lowest rank is next: so a single one can be overtaken by a long chain."""

    __slots__ = ("after", "done", "graph", "rank", "work")

    def __init__(self, work: Work | None, after: Sequence[Node], graph: DeferredGraph | None) -> None:
        self.work = work
        self.after = [node for node in after if not node.done]
        self.graph = graph
        self.rank = 0.0
        self.done = False


class DeferredEvent:
    """The last node of a stream at some time."""

    def __init__(self, runtime: DeferredRuntime) -> None:
        self._runtime = runtime
        self.node: Node | None = None

    def done(self) -> bool:
        assert self.node is not None
        assert self.node.graph is None, "a question about an event of a graph"
        self._runtime.do_some()
        return self.node.done

    def wait(self) -> None:
        assert self.node is not None
        self._runtime.finish(self.node)


class DeferredStream:
    """Nodes in order."""

    def __init__(self, runtime: DeferredRuntime) -> None:
        self._runtime = runtime
        self.behind: list[Node] = []
        self.outside: list[Node] | None = None   # ``behind`` from before the capture it is in

    def enqueue(self, work: Work | None) -> Node:
        graphs = {node.graph for node in self.behind} or {None}
        assert len(graphs) == 1, "work inside and outside of a graph at once"
        node = Node(work, self.behind, graphs.pop())
        (self._runtime.pending if node.graph is None else node.graph.nodes).append(node)
        self.behind = [node]
        return node

    def record(self, event: DeferredEvent) -> None:
        event.node = self.enqueue(None)

    def wait(self, event: DeferredEvent) -> None:
        assert event.node is not None
        if event.node.graph is not None and self.outside is None:
            self.outside, self.behind = self.behind, []
        self.behind.append(event.node)

    def synchronize(self) -> None:
        self._runtime.finish(self.enqueue(None))


class DeferredGraph:
    """Captured nodes, the first one their root."""

    def __init__(self, runtime: DeferredRuntime) -> None:
        self._runtime = runtime
        self.nodes: list[Node] = []

    def launch(self) -> None:
        compute, copies = self._runtime.compute, dict[int, Node]()
        root = compute.enqueue(None)
        for node in self.nodes:
            copies[id(node)] = Node(node.work, [root, *(copies[id(before)] for before in node.after)], None)
        self._runtime.pending += copies.values()
        compute.behind = list(copies.values())
        compute.enqueue(None)


class DeferredRuntime:
    """See above. ``graphs``: captures that have ended well."""

    name = "deferred"

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self.pending: list[Node] = []
        self.launcher = self.gemm = _NoKernels()
        self.compute, self.copy, self.publish = (DeferredStream(self) for _ in range(3))
        self._graph: DeferredGraph | None = None
        self._memory: list[np.ndarray] = []   # addresses of it are on their way
        self.graphs = 0

    def do_some(self) -> None:
        """Time passes."""
        for _ in range(self._dice.choice((0, 0, 1, 5))):
            if self.pending:
                self._do_one()

    def finish(self, node: Node) -> None:
        assert node.graph is None, "the host waits for a node of a graph"
        while not node.done:
            self._do_one()

    def allocate(self, size_bytes: int, purpose: str) -> np.ndarray:
        return self._keep(np.zeros(max(size_bytes, 16), np.uint8))[:size_bytes]

    def allocate_pinned(self, size_bytes: int) -> np.ndarray:
        return self._keep(np.full(max(size_bytes, 16), 0xFF, np.uint8))[:size_bytes]

    def view(self, memory: np.ndarray, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        size = int(np.prod(shape)) * dtype.itemsize
        return memory[offset : offset + size].view(dtype).reshape(shape)

    def event(self, *, timed: bool = False) -> DeferredEvent:
        return DeferredEvent(self)

    def seconds_between(self, first: DeferredEvent, last: DeferredEvent) -> float:
        return 1e-3

    def enqueue_copy(self, dst: int, src: int, size_bytes: int, stream: DeferredStream) -> None:
        stream.enqueue(lambda: _copy(dst, src, size_bytes))

    def begin_capture(self) -> None:
        assert self._graph is None
        self._graph = DeferredGraph(self)
        root = Node(None, [], self._graph)
        self._graph.nodes.append(root)
        self.compute.outside, self.compute.behind = self.compute.behind, [root]

    def end_capture(self) -> DeferredGraph:
        graph = self._graph
        assert graph is not None
        before = set(_ancestors(self.compute.behind))
        left = [node for node in graph.nodes if node not in before]
        self.abandon_capture()
        assert not left, "a stream is not joined at the end of a capture"
        self.graphs += 1
        return graph

    def abandon_capture(self) -> None:
        self._graph = None
        for stream in (self.compute, self.copy, self.publish):
            if stream.outside is not None:
                stream.behind, stream.outside = stream.outside, None

    def measure_copies(self, size_bytes: int, times: int) -> float:
        return 1e9

    def free_bytes(self) -> int:
        return 1 << 30

    def close(self) -> None:
        pass

    def _keep(self, memory: np.ndarray) -> np.ndarray:
        self._memory.append(memory)
        return memory

    def _do_one(self) -> None:
        ready = [node for node in self.pending if all(before.done for before in node.after)]
        for node in ready:
            node.rank = node.rank or self._dice.random()
        node = min(ready, key=lambda node: node.rank)
        self.pending.remove(node)
        if node.work is not None:
            node.work()
        node.done = True
        node.after.clear()


class _NoKernels:
    """Nothing is launched: who uses this runtime brings ops of its own."""

    arch, sm_count, shared_bytes = 90, 4, 227 * 1024

    def prepare(self, kernels: object, progress: object = None) -> None:
        pass

    def close(self) -> None:
        pass


def _copy(dst: int, src: int, size_bytes: int) -> None:
    ctypes.memmove(dst, src, size_bytes)


def _ancestors(nodes: Sequence[Node]) -> Iterator[Node]:
    """Those nodes and all that they come behind."""
    seen, todo = set[int](), list(nodes)
    while todo:
        node = todo.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            todo += node.after

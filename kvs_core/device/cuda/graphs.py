"""Captured steps: graphs that are launched once per token, what their copies have moved, and how long the last took."""

from __future__ import annotations

from kvs_core.device.base import StepInputs
from kvs_core.device.copied import NONE_COPIED, Copied
from kvs_core.device.cuda.runtime import Graph, Runtime
from kvs_core.device.cuda.steps import StepTable
from kvs_core.device.cuda.streams import CudaStream


class Launches:
    """Graphs on their way to the GPU, one behind the other on the compute stream.

    copied  by all of them so far
    """

    def __init__(self, runtime: Runtime, compute: CudaStream, steps: StepTable) -> None:
        self.copied = NONE_COPIED
        self._runtime = runtime
        self._compute = compute
        self._steps = steps
        self._began, self._ended = runtime.event(timed=True), runtime.event(timed=True)

    def launch(self, graph: Graph, inputs: StepInputs, copied: Copied) -> None:
        """Enqueue captured work for a step with these inputs, whose copies move ``copied``."""
        self._steps.write(inputs)
        self._compute.raw.record(self._began)
        graph.launch()
        self._compute.raw.record(self._ended)
        self._steps.launched()
        self.copied = self.copied.plus(copied)

    def seconds(self) -> float | None:
        """How long the last one took on the GPU; None while it runs."""
        if not self._ended.done():
            return None
        return self._runtime.seconds_between(self._began, self._ended)


class CapturedStep:
    """``Captured``: a graph, and what it copies each time."""

    def __init__(self, launches: Launches, graph: Graph, copied: Copied) -> None:
        self._launches = launches
        self._graph = graph
        self._copied_each = copied

    def launch(self, inputs: StepInputs) -> None:
        """See ``Captured``."""
        self._launches.launch(self._graph, inputs, self._copied_each)

    def elapsed_s(self) -> float | None:
        """See ``Captured``."""
        return self._launches.seconds()

"""How far a sweep is: a bar with the time left on a terminal, a line per finished point anyway."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LOGGER = logging.getLogger(__name__)

_START_TOKENS = 16384   # starting a process takes about as long as measuring so many tokens of context


class PointProgress:
    """Around the points, whose contexts tell how long each takes."""

    def __init__(self, contexts: Sequence[int]) -> None:
        """``contexts`` in tokens, in the order in which they will be measured."""
        self._costs = [_START_TOKENS + context for context in contexts]
        self._number = 0
        self._title = ""
        self._bars: Progress | None = None
        if sys.stderr.isatty() and LOGGER.isEnabledFor(logging.INFO):
            self._bars = Progress(
                TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(),
                console=Console(stderr=True), transient=True, speed_estimate_period=24 * 3600,
            )
            self._bar = self._bars.add_task("", total=sum(self._costs))

    def __enter__(self) -> PointProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, title: str) -> None:
        """The next point."""
        self._title = f"point {self._number + 1} of {len(self._costs)}: {title}"
        if self._bars is not None:
            self._bars.update(self._bar, description=self._title)

    def end(self, result: str) -> None:
        """It is finished."""
        if self._bars is not None:
            self._bars.advance(self._bar, self._costs[self._number])
        self._number += 1
        if self._bars is None:
            LOGGER.info("%s: %s", self._title, result)
        else:   # above the bar
            self._bars.console.print(f"{self._title}: {result}", markup=False, highlight=False, soft_wrap=True)

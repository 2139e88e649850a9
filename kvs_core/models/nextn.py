"""The MTP block ("NextN"): it guesses the token after next from a token and what the trunk thought before it.

    e  = rms(embedding(token p), enorm)
    hn = rms(h[p - 1], hnorm)                  h: hidden rows after the output norm; zeros before position 0
    x  = concat(e, hn) eh_proj^T
    x += attention, feed-forward               an attention layer with K and V of its own, at position p
    h' = rms(x, head norm);  logits = h' head^T            for the token at p + 1

It follows the trunk in every step, with the same rows, so that its K and V are complete. To draft, it runs alone: a
token at a time, each with its own h' as the hidden row. Source: DeepSeek-V3 report, 2024, section 2.2; ggml's qwen35.

    hidden table   row 0: h before the step's first row | 1 .. T: h of its rows | DRAFT_ROW: h' of the last draft
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvs_core.device.base import Turn
from kvs_core.device.operands import Buffer, Weight
from kvs_core.device.workspace import BufferSpec
from kvs_core.memory.phases import Phase
from kvs_core.models.blocks import ACTIVATION, Attention, Experts, FeedForward, Step
from kvs_core.models.recurrent import MAX_ROWS

DRAFT_ROW = MAX_ROWS + 1
"""Row of the hidden table for what the block itself thought."""

TABLE_ROWS = MAX_ROWS + 2


def table_bytes(n_embd: int) -> int:
    """Device bytes of the hidden table."""
    return TABLE_ROWS * n_embd * np.dtype(ACTIVATION).itemsize


@dataclass(frozen=True, slots=True, eq=False)
class NextN:
    """The block and what it shares with the trunk: the token table, and the head unless it has its own.

    hidden  float32 [TABLE_ROWS, E] beside the arena: it outlives steps and phases
    """

    table: Weight
    embed_norm: Buffer
    hidden_norm: Buffer
    join: Weight
    attention: Attention
    feed_forward: FeedForward | Experts
    head_norm: Buffer
    head: Weight
    hidden: Buffer

    @staticmethod
    def buffers(rows: int, n_embd: int) -> Sequence[BufferSpec]:
        """The block's own; those of its attention and feed-forward are the trunk's."""
        widths = {"nextn_x": n_embd, "nextn_embedded": n_embd, "nextn_joined": 2 * n_embd}
        specs = [BufferSpec(name, (rows, width), ACTIVATION) for name, width in widths.items()]
        return [*specs, BufferSpec("nextn_hidden", (rows + 1, n_embd), ACTIVATION)]

    def begin(self, step: Step) -> None:
        """Before the trunk runs: the hidden row before this step's first one, from those of the last step."""
        step.ops.take_kept(self.hidden, self._rows(step)[:1])

    def follow(self, step: Step, output_norm: Buffer) -> None:
        """After the trunk has run: the block over the same rows. ``step`` is the trunk's."""
        hidden = self._rows(step)
        step.ops.rms_norm(step.x, output_norm, hidden[1:], eps=step.eps)
        self._run(step, hidden[:-1])
        if step.batch.phase is Phase.PREFILL:
            step.ops.rms_norm(step.x[-1:], output_norm, self.hidden[:1], eps=step.eps)   # again: it stays

    def begin_tiles(self, first: Step) -> None:
        """``begin`` of a step in tiles, whose hidden rows lie with them: the table keeps the row before the step."""
        first.ops.take_kept(self.hidden, first.ws["nextn_hidden"][:1])
        first.ops.take_kept(self.hidden, self.hidden[:1])

    def follow_tiles(self, tiles: Sequence[Step], output_norm: Buffer, turn: Turn) -> None:
        """``follow`` of a step in tiles."""
        blocks = []
        for number, tile in enumerate(tiles):
            turn(number)
            hidden = tile.ws["nextn_hidden"][: tile.batch.rows + 1]
            if number > 0:
                tile.ops.rms_norm(tiles[number - 1].x[-1:], output_norm, hidden[:1], eps=tile.eps)
            tile.ops.rms_norm(tile.x, output_norm, hidden[1:], eps=tile.eps)
            blocks.append(self._join(tile, hidden[:-1]))
        self.attention.add_to_tiles(blocks, turn)
        for number, block in enumerate(blocks):
            turn(number)
            self.feed_forward.add_to(block)

    def keep(self, tile: Step, row: int, output_norm: Buffer) -> None:
        """That row of a step in tiles is the last that counts."""
        tile.ops.rms_norm(tile.x[row : row + 1], output_norm, self.hidden[:1], eps=tile.eps)

    def draft(self, step: Step, out: Buffer) -> None:
        """One row alone; logits [1, V] of the token behind it. ``StepInputs.kept`` names its hidden row."""
        hidden = step.ws["nextn_hidden"][:1]
        step.ops.take_kept(self.hidden, hidden)
        self._run(step, hidden)
        x = step.ws.rows("nextn_x", 1)
        step.ops.rms_norm(x, self.head_norm, self.hidden[DRAFT_ROW:], eps=step.eps)
        step.ops.project(x, self.head_norm, self.head, out, eps=step.eps, phase=Phase.DECODE)

    def _rows(self, step: Step) -> Buffer:
        """[T + 1, E]: in decode the table itself, since nobody knows yet how many rows will be kept."""
        rows = step.batch.rows + 1
        return self.hidden[:rows] if step.batch.phase is Phase.DECODE else step.ws["nextn_hidden"][:rows]

    def _run(self, trunk: Step, hidden: Buffer) -> None:
        step = self._join(trunk, hidden)
        self.attention.add_to(step)
        self.feed_forward.add_to(step)

    def _join(self, trunk: Step, hidden: Buffer) -> Step:
        """The block's own step over the trunk's rows, its residual rows made of tokens and hidden rows."""
        step = Step(trunk.ops, trunk.batch, trunk.kv, None, trunk.ws, trunk.eps, "nextn_x")
        embedded, joined = step.rows("nextn_embedded"), step.rows("nextn_joined")
        width = embedded.shape[1]
        step.ops.embed(self.table, embedded)
        step.ops.rms_norm(embedded, self.embed_norm, joined[:, :width], eps=step.eps)
        step.ops.rms_norm(hidden, self.hidden_norm, joined[:, width:], eps=step.eps)
        step.ops.clear(step.x)
        step.add(joined, self.join)
        return step

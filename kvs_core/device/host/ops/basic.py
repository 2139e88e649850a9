"""Plain NumPy forms of the elementwise and matrix ops: the reference for every other device.

In DECODE a row's bits must not depend on the number of rows. Elementwise NumPy loops and sums over the last axis of an
array do not; a BLAS product does, so each row has its own matrix-vector product. In neither phase do bits depend on the
number of threads: a product is made of pieces that the matrix's shape alone fixes, each by one thread.
"""

from __future__ import annotations

import math

import numpy as np

from kvs_core.device.host.weights import HostMatrix, HostWeight
from kvs_core.device.host.workers import Team
from kvs_core.device.operands import Activation, Buffer, RopeTable, Weight
from kvs_core.memory.phases import Phase

_EXP_LIMIT = np.float32(88.0)   # exp of it is still a float32
_GELU_SLOPE, _GELU_CUBE = np.float32(2.0 * math.sqrt(2.0 / math.pi)), np.float32(0.044715)
_GELU_LIMIT = np.float32(64.0)
_ALONE = Team(1)


def sigmoid(x: Buffer) -> Buffer:
    """1 / (1 + exp(-x)), a new array; below -88 as at -88, which is less than the smallest normal float32."""
    out = np.negative(x)
    np.minimum(out, _EXP_LIMIT, out=out)
    np.exp(out, out=out)
    out += np.float32(1.0)
    np.reciprocal(out, out=out)
    return out


def silu(x: Buffer) -> Buffer:
    """x * sigmoid(x), a new array."""
    out = sigmoid(x)
    out *= x
    return out


def gelu(x: Buffer) -> Buffer:
    """x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), a new array: see ``Activation.GELU``."""
    cubed = np.clip(x, -_GELU_LIMIT, _GELU_LIMIT)   # beyond, the sigmoid is 0 or 1
    out = np.square(cubed)
    out *= _GELU_CUBE
    out += np.float32(1.0)
    out *= cubed
    out *= _GELU_SLOPE
    out = sigmoid(out)
    out *= x
    return out


ACTIVATIONS = {Activation.SILU: silu, Activation.GELU: gelu}


def embed(table: Weight, tokens: np.ndarray, x: Buffer) -> None:
    """x[t] = row tokens[t] of the table."""
    assert isinstance(table, HostMatrix)
    assert len(tokens) == 0 or (tokens.min() >= 0 and tokens.max() < table.n_out)
    for row, token in zip(x, tokens.tolist(), strict=True):
        row[:] = table.read(token, 1)[0]


def matmul(x: Buffer, weight: Weight, out: Buffer, *, phase: Phase, team: Team = _ALONE) -> None:
    """out = x @ weight.T + bias   x [T, n_in]; out [T, n_out], not overlapping x

    The team shares the pieces; which thread has which does not show in the bits.
    """
    assert isinstance(weight, HostWeight)
    assert x.shape[1] == weight.n_in
    assert out.shape == (len(x), weight.n_out)
    jobs = weight.pieces(phase)

    def multiply(job: int) -> None:
        matrix, first, rows, column = jobs[job]
        columns = slice(column, column + rows)
        values = matrix.read(first, rows)
        if phase is Phase.PREFILL:
            np.matmul(x, values.T, out=out[:, columns])
        else:
            for x_row, out_row in zip(x, out, strict=True):
                np.dot(values, x_row, out=out_row[columns])

    team.share(len(jobs), multiply)
    if weight.bias is not None:
        out += weight.bias


def rms_norm(x: Buffer, weight: Buffer, out: Buffer, *, eps: float) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight over the last axis.   out may be x"""
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    mean += np.float32(eps)
    np.sqrt(mean, out=mean)
    np.divide(x, mean, out=out)
    out *= weight


def gated(rows: Buffer, out: Buffer, activation: Activation = Activation.SILU) -> None:
    """out = activation(gate) * up   rows [T, 2 F]: gate, then up; out [T, F]"""
    gate, up = np.split(rows, 2, axis=-1)
    np.multiply(ACTIVATIONS[activation](gate), up, out=out)


def gate_heads(x: Buffer, gate: Buffer) -> None:
    """x *= sigmoid(gate)   x, gate [T, H, D] (gate may be strided)"""
    np.multiply(x, sigmoid(gate), out=x)


def rope(x: Buffer, first_position: int, table: RopeTable) -> None:
    """Turn the first n_rot values of each head in place; row t is at first_position + t.   x [T, H, D]

    Angles are float64: at position 262,143 a float32 angle would be off by 0.01.
    """
    positions = np.arange(first_position, first_position + len(x), dtype=np.float64)
    angles = np.multiply.outer(positions, table.inv_freq)[:, None, :]
    _turn(x, table, table.magnitude * np.cos(angles), table.magnitude * np.sin(angles))


def rope_by(x: Buffer, positions: int, table: RopeTable) -> None:
    """Turn what ``rope`` has turned by ``positions`` more, in place: rows become those of other positions, all equally
    far away.   x [..., D]; ``positions`` may be negative

    Rotations about one axis add up, whatever the frequencies. The magnitude is in the rows already.
    """
    turn = turn_by(positions, table)
    _turn(x, table, turn[:, 0], turn[:, 1])


def turn_by(positions: int, table: RopeTable) -> np.ndarray:
    """Cosine and sine of a turn by ``positions``, without the magnitude: float32 [n_rot / 2, 2]"""
    angles = positions * table.inv_freq
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


def _turn(x: Buffer, table: RopeTable, cosines: np.ndarray, sines: np.ndarray) -> None:
    """Pairs (a, b) become (a cos - b sin, b cos + a sin).   cosines, sines: broadcast to [..., n_rot / 2]"""
    cos, sin = cosines.astype(np.float32), sines.astype(np.float32)
    n_rot = table.n_rot
    if table.interleaved:
        left, right = x[..., 0:n_rot:2], x[..., 1:n_rot:2]
    else:
        left, right = x[..., : n_rot // 2], x[..., n_rot // 2 : n_rot]
    turned = left * cos - right * sin
    right[...] = right * cos + left * sin
    left[...] = turned


def hadamard(x: Buffer, block: int) -> None:
    """x times an orthonormal Walsh-Hadamard matrix (Sylvester order) per ``block`` values, in place.

    It is its own inverse, and the m-fold Kronecker power of [[1, 1], [1, -1]], block = 2**m. Applying that to the last
    bit of the index and moving the bit to the front, m times, does all bits and leaves their order, with long loops.
    """
    assert block > 0
    assert block & (block - 1) == 0
    assert x.shape[-1] % block == 0
    values = x.reshape(-1, block)
    half = block // 2
    for _ in range(block.bit_length() - 1):
        even, odd = values[:, 0::2], values[:, 1::2]
        values = np.empty_like(values)
        np.add(even, odd, out=values[:, :half])
        np.subtract(even, odd, out=values[:, half:])
    np.multiply(values.reshape(x.shape), np.float32(1.0 / math.sqrt(block)), out=x)


def scale(x: Buffer, factor: float) -> None:
    """x *= factor"""
    np.multiply(x, np.float32(factor), out=x)


def softcap(x: Buffer, cap: float) -> None:
    """x = cap * tanh(x / cap)"""
    np.divide(x, np.float32(cap), out=x)
    np.tanh(x, out=x)
    scale(x, cap)

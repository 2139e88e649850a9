"""Gated DeltaNet on the host (Yang et al., Gated Delta Networks, 2024), row by row with deferred commit, and in chunks.

Per value head, with key k and query q of unit length, value v, decay a and step b in (0, 1):

    S = a S;   d = b (v - S^T k);   S = S + k d^T;   o = S^T q / sqrt(d_k)

S depends on a row only through its a, k and d, so those and the row's convolution input are what a step saves.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvs_core.device.host.ops.basic import rms_norm, sigmoid, silu
from kvs_core.device.operands import Buffer, GdnShape, GdnState, GdnWeights

_CHUNK = 64   # rows whose mutual effects are solved as one triangular system


class _Rows(NamedTuple):
    """What T rows bring: q, k [T, k_heads, d_k] (q with its 1 / sqrt(d_k)); v [T, v_heads, d_v]; g, b [T, v_heads]."""

    q: Buffer
    k: Buffer
    v: Buffer
    g: Buffer
    b: Buffer


def gdn_decode(
    y: Buffer, weights: GdnWeights, shape: GdnShape, state: GdnState, out: Buffer, *, position: int, pending: int,
    store: bool = True,
) -> None:
    """See ``Ops.gdn_decode``."""
    if not store:
        state = replace(state, state=state.state.copy())
    gdn_apply(shape, state, position=position, pending=pending)
    n_rows, slots = len(y), len(state.ring_x)
    assert n_rows + max(pending, shape.conv_taps - 1) <= slots, f"{n_rows} rows in rings of {slots}"
    rows = _prepare(y, weights, shape, state, position)
    s = state.state.copy()
    heads = out.reshape(n_rows, shape.v_heads, shape.d_v)
    for t in range(n_rows):
        slot = (position + t) % slots
        decay, d, k = state.ring_decay[slot], state.ring_d[slot], rows.k[t]
        state.ring_x[slot], state.ring_k[slot] = y[t, : shape.conv_channels], k
        np.exp(rows.g[t], out=decay)
        s *= decay[:, None, None]
        np.subtract(rows.v[t], _times_state(k, s, shape), out=d)
        d *= rows.b[t, :, None]
        _add_outer(s, k, d, shape)
        heads[t] = _times_state(rows.q[t], s, shape)
    _finish(heads, y, weights, shape)


def gdn_apply(shape: GdnShape, state: GdnState, *, position: int, pending: int) -> None:
    """See ``Ops.gdn_apply``."""
    for p in range(position - pending, position):
        slot = p % len(state.ring_x)
        state.state *= state.ring_decay[slot][:, None, None]
        _add_outer(state.state, state.ring_k[slot], state.ring_d[slot], shape)


def gdn_prefill(
    y: Buffer, weights: GdnWeights, shape: GdnShape, state: GdnState, out: Buffer, *, position: int
) -> None:
    """See ``Ops.gdn_prefill``."""
    rows = _prepare(y, weights, shape, state, position)
    n_rows, slots = len(y), len(state.ring_x)
    for t in range(max(0, n_rows - shape.conv_taps + 1), n_rows):
        state.ring_x[(position + t) % slots] = y[t, : shape.conv_channels]
    heads = out.reshape(n_rows, shape.v_heads, shape.d_v)
    for first in range(0, n_rows, _CHUNK):
        part = slice(first, first + _CHUNK)
        _run_chunk(_Rows(*(values[part] for values in rows)), shape, state.state, heads[part])
    _finish(heads, y, weights, shape)


def _prepare(y: Buffer, weights: GdnWeights, shape: GdnShape, state: GdnState, position: int) -> _Rows:
    """Convolve (the last tap meets the row itself, the first rows the ring's inputs), normalise, and make the gates."""
    n_rows, taps, channels = len(y), shape.conv_taps, shape.conv_channels
    before = state.ring_x[np.arange(position - taps + 1, position) % len(state.ring_x)]
    inputs = np.concatenate([before, y[:, :channels]])
    mixed = inputs[:n_rows] * weights.conv[0]
    for tap in range(1, taps):
        mixed += inputs[tap : tap + n_rows] * weights.conv[tap]
    mixed = silu(mixed)
    keys = shape.k_heads * shape.d_k
    q = _unit(mixed[:, :keys].reshape(n_rows, shape.k_heads, shape.d_k), weights.eps)
    q *= np.float32(1.0 / math.sqrt(shape.d_k))
    k = _unit(mixed[:, keys : 2 * keys].reshape(n_rows, shape.k_heads, shape.d_k), weights.eps)
    v = mixed[:, 2 * keys :].reshape(n_rows, shape.v_heads, shape.d_v)
    beta, alpha = np.split(y[:, channels + shape.inner :], 2, axis=1)
    g = np.logaddexp(np.float32(0.0), alpha + weights.dt_bias)   # softplus
    g *= weights.a
    return _Rows(q, k, v, g, sigmoid(beta))


def _unit(x: Buffer, eps: float) -> Buffer:
    """x / sqrt(sum(x^2) + eps) over the last axis."""
    norm = np.sum(np.square(x), axis=-1, keepdims=True)
    norm += np.float32(eps)
    np.sqrt(norm, out=norm)
    return x / norm


def _finish(heads: Buffer, y: Buffer, weights: GdnWeights, shape: GdnShape) -> None:
    """heads = rms(heads) * norm * silu(z)   heads [T, v_heads, d_v]; z in y"""
    rms_norm(heads, weights.norm, heads, eps=weights.eps)
    heads *= silu(y[:, shape.conv_channels : shape.conv_channels + shape.inner]).reshape(heads.shape)


def _by_key_head(x: Buffer, shape: GdnShape) -> Buffer:
    """[v_heads, ...] to [v_heads / k_heads, k_heads, ...]: v head i reads key head i % k_heads."""
    return x.reshape(-1, shape.k_heads, *x.shape[1:])


def _times_state(x: Buffer, s: Buffer, shape: GdnShape) -> Buffer:
    """S^T x of each value head: [v_heads, d_v]   x [k_heads, d_k]; s [v_heads, d_k, d_v]"""
    return np.matmul(x[:, None, :], _by_key_head(s, shape)).reshape(shape.v_heads, shape.d_v)


def _add_outer(s: Buffer, k: Buffer, d: Buffer, shape: GdnShape) -> None:
    """s += k d^T in each value head, in place   k [k_heads, d_k]; d [v_heads, d_v]"""
    states = _by_key_head(s, shape)
    states += k[:, :, None] * _by_key_head(d, shape)[:, :, None, :]


def _run_chunk(rows: _Rows, shape: GdnShape, state: Buffer, out: Buffer) -> None:
    """Bring ``state`` from before the first to behind the last of C rows; out [C, v_heads, d_v] = their o.

    With c the running sum of g and M[i, j] = exp(c_i - c_j) on and below the diagonal, the d of all rows solve

        (I + strictly_lower(b K K^T M)) D = b (V - exp(c) K S)

    and then  O = exp(c) Q S + lower(Q K^T M) D,   S = exp(c_last) S + (exp(c_last - c) K)^T D.
    """
    # [v_heads / k_heads, k_heads, ...] throughout; what only key heads have is shared by the first axis.
    q, k = rows.q.transpose(1, 0, 2), rows.k.transpose(1, 0, 2)
    v = _by_key_head(rows.v.transpose(1, 0, 2), shape)
    b = _by_key_head(rows.b.T, shape)[..., None]
    # Sums in float64: differences of a long sum are what counts.
    c = _by_key_head(np.cumsum(rows.g.T, axis=1, dtype=np.float64), shape)
    s = _by_key_head(state, shape)
    lower = np.tri(len(rows.q), dtype=bool)
    m = np.exp(np.where(lower, c[..., :, None] - c[..., None, :], -np.inf)).astype(np.float32)
    grown = np.exp(c).astype(np.float32)[..., None]
    left = np.exp(c[..., -1:] - c).astype(np.float32)[..., None]

    k_t = k.swapaxes(-1, -2)
    system = np.matmul(k, k_t) * m
    system *= b
    diagonal = np.arange(len(rows.q))
    system[..., diagonal, diagonal] = 1.0
    d = np.linalg.solve(system, b * (v - grown * np.matmul(k, s)))
    o = grown * np.matmul(q, s) + np.matmul(np.matmul(q, k_t) * m, d)
    out[:] = o.reshape(shape.v_heads, *o.shape[2:]).transpose(1, 0, 2)
    s *= grown[..., -1:, :]
    s += np.matmul((left * k).swapaxes(-1, -2), d)

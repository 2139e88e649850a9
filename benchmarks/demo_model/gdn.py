"""Gated DeltaNet in chunks: the maths of Yang et al., Gated Delta Networks (arXiv 2412.06464), for training.

Per head, with S [D key, D value], decay exp(g) and write strength beta:

    S  = exp(g) S;   d = beta (v - S^T k);   S = S + k d^T;   o = S^T q / sqrt(D)

A chunk of C tokens, c the running sum of g, M[i, j] = exp(c_i - c_j) for i >= j:

    A = strictly_lower((beta k) k^T * M)        T = (I + A)^-1
    W = T (beta k exp(c))                       V' = T (beta v)
    S_next = (exp(c_last) I - K'^T W) S + K'^T V'                     K' = k exp(c_last - c)
    o = (q exp(c)) S + (lower(q k^T) * M) (V' - W S)

Everything but the line of S_next is one batch over all chunks (``prepare``, ``read``); that line is a linear
recurrence, one small matrix product per chunk (``scan``). All in float32. N counts chunks of all sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK = 64
_BASE = 16  # diagonal blocks of this size are inverted by powers


def unit_lower_inverse(strict: Tensor) -> Tensor:
    """(I + A)^-1 for strictly lower triangular A [..., C, C], C a power of two of at least 16.

    Blocks on the diagonal by (I - A)(I + A^2)(I + A^4)(I + A^8), exact since A^16 = 0; then pairs of blocks:
    [[P, 0], [R, Q]]^-1 = [[P', 0], [-Q' R P', Q']]. Powers of larger blocks would grow beyond float32.
    """
    size = strict.shape[-1]
    if size == _BASE:
        one = torch.eye(size, dtype=strict.dtype, device=strict.device)
        inverse, power = one - strict, strict
        for _ in range(3):
            power = power @ power
            inverse = inverse + inverse @ power
        return inverse
    half = size // 2
    both = torch.stack((strict[..., :half, :half], strict[..., half:, half:]))
    first, second = unit_lower_inverse(both)
    corner = -(second @ strict[..., half:, :half] @ first)
    upper = torch.cat((first, torch.zeros_like(first)), -1)
    return torch.cat((upper, torch.cat((corner, second), -1)), -2)


class UnitLowerInverse(torch.autograd.Function):
    """``unit_lower_inverse`` with the derivative -T^T G T^T, so that nothing but T is kept."""

    @staticmethod
    def forward(ctx: Any, strict: Tensor) -> Tensor:
        inverse = unit_lower_inverse(strict)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.mT
        return torch.tril(-(turned @ grads[0] @ turned), -1)


class Chunks(NamedTuple):
    """What ``scan`` and ``read`` need. [N, H, ...]"""

    step: Tensor
    """[N, H, D, D] the matrix before S in S_next"""
    added: Tensor
    """[N, H, D, D] what is added to it"""
    query: Tensor
    """[N, H, C, D] q exp(c)"""
    scores: Tensor
    """[N, H, C, C] lower(q k^T) * M"""
    fresh: Tensor
    """[N, H, C, D] V'"""
    erased: Tensor
    """[N, H, C, D] W"""


def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Chunks:
    """All of a chunk that does not depend on S.

    q, k, v  [N, H, C, D] float32; q already divided by sqrt(D)
    g, beta  [N, H, C] float32
    """
    c = g.cumsum(-1)
    size = q.shape[-2]
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    mask = torch.where(lower, (c[..., :, None] - c[..., None, :]).clamp(max=0.0), float("-inf")).exp()
    written = beta[..., None] * k
    strict = torch.tril((written @ k.mT) * mask, -1)
    inverse: Tensor = UnitLowerInverse.apply(strict)  # type: ignore[no-untyped-call]
    erased = inverse @ (written * c.exp()[..., None])
    fresh = inverse @ (beta[..., None] * v)
    last = c[..., -1:]
    kept = k * (last - c).exp()[..., None]
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    step = last[..., None].exp() * eye - kept.mT @ erased
    return Chunks(step, kept.mT @ fresh, q * c.exp()[..., None], (q @ k.mT) * mask, fresh, erased)


class _Scan(torch.autograd.Function):
    """S before each chunk of S_next = step S + added. [chunks, B, D, D]; S is 0 at the start."""

    @staticmethod
    def forward(ctx: Any, step: Tensor, added: Tensor) -> Tensor:
        states = torch.empty_like(added)
        states[0].zero_()
        for i in range(len(step) - 1):
            torch.baddbmm(added[i], step[i], states[i], out=states[i + 1])
        ctx.save_for_backward(step, states)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        step, states = ctx.saved_tensors
        # after[i]: the derivative by the state after chunk i; nothing reads the one after the last
        after = torch.empty_like(states)
        after[-1].zero_()
        for i in range(len(step) - 1, 0, -1):
            torch.baddbmm(grads[0][i], step[i].mT, after[i], out=after[i - 1])
        return after @ states.mT, after


def scan(step: Tensor, added: Tensor, chunks: int) -> Tensor:
    """The state before each chunk, [N, H, D, D], where every ``chunks`` of the N are one sequence."""
    n, heads, dim, _ = step.shape

    def by_time(x: Tensor) -> Tensor:
        return x.reshape(n // chunks, chunks, heads, dim, dim).transpose(0, 1).reshape(chunks, -1, dim, dim)

    states: Tensor = _Scan.apply(by_time(step), by_time(added))  # type: ignore[no-untyped-call]
    return states.view(chunks, n // chunks, heads, dim, dim).transpose(0, 1).reshape(n, heads, dim, dim)


def read(chunk: Chunks, states: Tensor) -> Tensor:
    """The outputs o, [N, H, C, D]."""
    return chunk.query @ states + chunk.scores @ (chunk.fresh - chunk.erased @ states)


def sequential(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The same outputs token by token for one sequence, [H, T, D]: the reference."""
    heads, count, dim = q.shape
    state = q.new_zeros(heads, dim, dim)
    out = torch.empty_like(v)
    for t in range(count):
        state = state * g[:, t, None, None].exp()
        delta = beta[:, t, None] * (v[:, t] - (state.mT @ k[:, t, :, None])[..., 0])
        state = state + k[:, t, :, None] * delta[:, None, :]
        out[:, t] = (state.mT @ q[:, t, :, None])[..., 0]
    return out

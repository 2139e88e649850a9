"""Two optimizers: Muon for the large matrices, AdamW for everything else.

Muon: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024: the momentum of a matrix is replaced
by the nearest orthogonal matrix, found by a Newton-Schulz iteration of five quintic steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

LEAST_ROWS = 32  # of a matrix that Muon updates
_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalised(x: Tensor) -> Tensor:
    """Matrices [..., R, C] with all singular values moved near 1."""
    a, b, c = _QUINTIC
    wide = x.shape[-2] <= x.shape[-1]
    x = (x if wide else x.mT).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return (x if wide else x.mT).float()


class Optimizer:
    """Steps all weights. ``rate`` in ``step`` scales both learning rates."""

    def __init__(
        self, weights: Mapping[str, Tensor], *, muon_rate: float, adam_rate: float, decay: float, momentum: float = 0.95
    ) -> None:
        self._muon_rate, self._decay, self._momentum = muon_rate, decay, momentum
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        others = []
        for name, weight in weights.items():
            matrix = weight.dim() == 2 and weight.shape[0] >= LEAST_ROWS and "conv1d" not in name
            if matrix and name != "token_embd.weight":
                by_shape[weight.shape].append(weight)
            else:
                others.append(weight)
        self._groups = list(by_shape.values())
        self._moments = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self._groups]
        device = others[0].device
        self._adam = torch.optim.AdamW(
            others, lr=adam_rate, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=device.type == "cuda"
        )
        self._adam_rate = adam_rate
        self._all = [*others, *(weight for group in self._groups for weight in group)]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply and forget the gradients."""
        torch.nn.utils.clip_grad_norm_(self._all, 1.0)
        for group, moments in zip(self._groups, self._moments, strict=True):
            grads = torch.stack([weight.grad for weight in group if weight.grad is not None])
            moments.lerp_(grads, 1 - self._momentum)
            update = orthogonalised(grads.lerp_(moments, self._momentum))
            rows, columns = group[0].shape
            step = rate * self._muon_rate
            torch._foreach_mul_(group, 1 - step * self._decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-step * max(1.0, rows / columns) ** 0.5)
        for settings in self._adam.param_groups:
            settings["lr"] = rate * self._adam_rate
        self._adam.step()
        for weight in self._all:
            weight.grad = None


def schedule(step: int, steps: int, *, warm_up: int, cool_down: float) -> float:
    """The factor on the learning rates: up, level, and down to zero over the last part ``cool_down``."""
    rising = min(1.0, (step + 1) / warm_up)
    falling = min(1.0, (steps - step) / max(1.0, cool_down * steps))
    return min(rising, falling)

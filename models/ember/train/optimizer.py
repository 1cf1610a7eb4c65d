"""Muon for the matrices inside the layers, AdamW for everything else. Owns the update rules, never the schedule.

Muon (Jordan and others, 2024) moves a matrix along its momentum with all singular values set to about one; the small
polynomial below does that without a decomposition. It needs about half the steps of AdamW on this model.
"""

import torch

# Coefficients of the odd polynomial whose fifth iterate sends singular values from (0, 1] near 1, from Muon's authors.
POLYNOMIAL = (3.4445, -4.7750, 2.0315)
ROUNDS = 5


def orthogonalised(matrices):
    """The nearest semi-orthogonal matrix of each matrix in [n, rows, columns], roughly."""
    a, b, c = POLYNOMIAL
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Momentum with orthogonalised updates, over groups of matrices of equal shape so that one call serves a group."""

    def __init__(self, matrices, lr, momentum=0.95, weight_decay=0.01):
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.groups = {}
        for matrix in matrices:
            self.groups.setdefault(matrix.shape, []).append(matrix)
        self.state = {
            shape: torch.zeros(len(group), *shape, device=group[0].device) for shape, group in self.groups.items()
        }
        self.direction = torch.compile(self.direction, dynamic=False) if matrices[0].is_cuda else self.direction

    @torch.no_grad()
    def step(self, scale):
        """Moves every matrix; `scale` is the schedule's share of the learning rate."""
        for shape, group in self.groups.items():
            update = self.direction(self.state[shape], torch.stack([matrix.grad for matrix in group]))
            # A tall matrix gets a longer step, so that outputs of every shape move equally far.
            lr = self.lr * scale * max(1, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(group, 1 - lr * self.weight_decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-lr)

    def direction(self, state, grad):
        state.lerp_(grad, 1 - self.momentum)
        return orthogonalised(grad.lerp(state, self.momentum))


class Optimizer:
    """Both rules behind one `step(scale)`."""

    def __init__(self, model, muon_lr=0.02, adam_lr=0.003):
        inside = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
        self.muon = Muon(inside, muon_lr)
        self.adam_lr = adam_lr
        self.adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda)

    def step(self, scale):
        self.muon.step(scale)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for group in self.muon.groups.values():
            for matrix in group:
                matrix.grad = None

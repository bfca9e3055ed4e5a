"""How far both algorithms are from the polynomial that they stand for.

The oracle applies it to the singular values, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch
from torch.optim import _muon

from .speed import ALGORITHMS, ONE_TRIPLE


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


# The first five of the Polar Express, https://arxiv.org/abs/2505.16932, and the factor by which it shrinks
# what it expects of an iteration that rounds.
POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
_SAFETY = 1.01

COEFFICIENTS = {
    "default": [ONE_TRIPLE] * _muon.DEFAULT_NS_STEPS,
    "Polar Express": [
        (a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in POLAR_EXPRESS
    ],
}
SPECTRA = ("flat", "Gaussian", "decaying", "low rank")


@dataclass(frozen=True)
class Accuracy:
    shapes: tuple[tuple[int, int], ...]
    threads: int


def work(rank: int, world: int, job: Accuracy) -> list[dict[str, Any]]:
    torch.set_num_threads(job.threads)
    return [
        {"shape": list(shape), "spectrum": kind, "distances": distances(shape, kind)}
        for shape in job.shapes
        for kind in SPECTRA
    ]


def distances(shape: tuple[int, int], kind: str) -> dict[str, dict[str, list[float]]]:
    """By coefficients and algorithm: from the exact polynomial, and from the orthogonal factor.

    Relative, in Frobenius norm.
    """
    x = matrix(kind, *shape)
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    orthogonal = u @ v
    found: dict[str, dict[str, list[float]]] = {}
    for name, triples in COEFFICIENTS.items():
        exact = (u * _polynomial(s / s.norm(), triples)) @ v
        found[name] = {}
        for algorithm in ALGORITHMS:
            update = _muon._zeropower_via_newtonschulz(
                x, triples, len(triples), _muon.EPS, algorithm
            ).double()
            found[name][algorithm] = [
                float((update - goal).norm() / goal.norm())
                for goal in (exact, orthogonal)
            ]
    return found


def _polynomial(s: Tensor, triples: Sequence[tuple[float, float, float]]) -> Tensor:
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return s


def matrix(kind: str, rows: int, columns: int) -> Tensor:
    """Seeded noise, as in bfloat16, with singular values of a ``kind``."""
    torch.manual_seed(0)
    noise = torch.randn(rows, columns, dtype=torch.float64)
    if kind == "Gaussian":
        return noise.bfloat16()
    left = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64)).Q
    right = torch.linalg.qr(noise.T).Q
    ranks = torch.arange(1, rows + 1, dtype=torch.float64)
    s = {
        "flat": torch.ones(rows, dtype=torch.float64),
        "decaying": ranks**-1.5,
        # A few directions far above the noise, as momentum has them.
        "low rank": torch.where(ranks > 16, 1e-3, 1.0),
    }[kind]
    return ((left * s) @ right.T).bfloat16()

"""``python -m tools.bench gram``: Newton-Schulz by the Gram matrix beside the quintic, in one process.

Both take turns. The distance is from the polynomial that both stand for, which an oracle applies to the
singular values in float64; it is relative, in Frobenius norm.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, TYPE_CHECKING

from .table import render


if TYPE_CHECKING:
    import argparse

    from torch import Tensor


ALGORITHMS = ("quintic", "gram")
SHAPES = ((512, 1024), (512, 1792), (512, 2048), (512, 4096), (1024, 4096))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    torch.set_num_threads(1)
    cases = [measure(shape, args.reps) for shape in args.shapes or SHAPES]
    head = ["", "FLOPs, gram / quintic", "quintic ms", "gram / quintic"]
    head += [f"{name}, from exact" for name in ALGORITHMS]
    rows = [
        [
            "x".join(map(str, case["shape"])),
            f"{case['flops']['gram'] / case['flops']['quintic']:.2f}",
            f"{1e3 * case['seconds']['quintic']:.1f}",
            f"{case['seconds']['gram'] / case['seconds']['quintic']:.2f}",
            *(f"{case['distance'][name]:.3f}" for name in ALGORITHMS),
        ]
        for case in cases
    ]
    print(render(head, rows))
    return cases


def measure(shape: tuple[int, int], reps: int) -> dict[str, Any]:
    import torch

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    seconds: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    for rep in range(reps + 1):
        for name in ALGORITHMS if rep % 2 else reversed(ALGORITHMS):
            began = time.perf_counter()
            orthogonalized(x, name)
            seconds[name].append(time.perf_counter() - began)
    return {
        "shape": shape,
        "flops": {name: flops(shape, name) for name in ALGORITHMS},
        # The first of each warms up.
        "seconds": {name: statistics.median(seconds[name][1:]) for name in ALGORITHMS},
        "distance": {name: distance(x, name) for name in ALGORITHMS},
    }


def orthogonalized(x: Tensor, algorithm: str) -> Tensor:
    from torch.optim import _newton_schulz as ns

    triple = (ns.DEFAULT_A, ns.DEFAULT_B, ns.DEFAULT_C)
    return ns.orthogonalize(x, triple, ns.DEFAULT_NS_STEPS, ns.EPS, algorithm)


def distance(x: Tensor, algorithm: str) -> float:
    import torch
    from torch.optim import _newton_schulz as ns

    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(ns.DEFAULT_NS_STEPS):
        s = ns.DEFAULT_A * s + ns.DEFAULT_B * s**3 + ns.DEFAULT_C * s**5
    exact = (u * s) @ v
    return float((orthogonalized(x, algorithm).double() - exact).norm() / exact.norm())


def flops(shape: tuple[int, int], algorithm: str) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        orthogonalized(torch.empty(shape, device="meta"), algorithm)
    return counter.get_total_flops()

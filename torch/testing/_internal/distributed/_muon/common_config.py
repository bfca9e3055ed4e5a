"""Helpers for tests of Muon on one process."""

from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import _muon_formulas, Muon
from torch.optim.muon import DistributedConfig
from torch.testing._internal.common_utils import TestCase


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# The arguments that torch.optim._muon.muon needs.
FUNCTIONAL = {
    "lr": 0.02,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": COEFFICIENTS,
    "ns_steps": 5,
    "eps": 1e-7,
    "adjust_lr_fn": None,
    "has_complex": False,
}


# The order of additions may change this part of an update's norm, as Newton-Schulz in bfloat16 amplifies
# rounding. ``test_order_of_additions`` measures it on a CPU: median 0, 99 % below 1.5 %, at most 4.4 %.
ROUNDING = 0.1


def near(found, expected, moved):
    """Whether two pieces of a parameter, which ``moved`` as a whole, are equal but for rounding."""
    limit = ROUNDING * moved.norm()
    return found.shape == expected.shape and bool((found - expected).norm() <= limit)


def exact(matrix, triples, safety=1.0):
    """The polynomials of Newton-Schulz, applied to the singular values in float64."""
    rows, values, columns = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / (values.norm() * safety)
    for a, b, c in triples:
        values = a * values + b * values**3 + c * values**5
    return rows @ torch.diag(values) @ columns


def all_to(rank):
    return lambda params, state: {rank: list(range(len(params)))}


def local_config(assign_fn=None, *, state=None, **options):
    return DistributedConfig(
        assign_fn=assign_fn or all_to(0),
        gather_fn=lambda piece, owner, state: piece,
        redistribute_fn=lambda full, owner, state: full,
        state={} if state is None else state,
        **options,
    )


def randn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_matrix(shape, dtype=torch.float32, generator=None, strided="contiguous"):
    rows, columns = shape
    if strided == "transposed":
        return torch.randn(columns, rows, generator=generator).to(dtype).T
    if strided == "every other column":
        return torch.randn(rows, 2 * columns, generator=generator).to(dtype)[:, ::2]
    return torch.randn(rows, columns, generator=generator).to(dtype)


def parts_of(tensor, split=None, flatten=False):
    """The matrices of a fused or flattened weight, by hand."""
    tensor = tensor.flatten(1) if flatten else tensor
    stack = tensor.flatten(0, -3) if tensor.ndim > 2 else tensor[None]
    if not isinstance(split, dict):
        return [part for one in stack for part in one.split(split or len(one))]
    dim, sizes = split.get("dim", 0), split["sizes"]
    # The number of the part that each row or column belongs to.
    of_part = [i for i, size in enumerate(sizes) for _ in range(size)]
    of_part = torch.tensor(of_part * split.get("repeats", 1))
    lines = [(of_part == i).nonzero().flatten() for i in range(len(sizes))]
    return [one.index_select(dim, at) for one in stack for at in lines]


def make_params(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    params = []
    for shape in shapes:
        param = nn.Parameter(make_matrix(shape, dtype, generator))
        param.grad = make_matrix(shape, dtype, generator)
        params.append(param)
    return params


class NewtonSchulzCalls:
    """Counts the matrices that this rank orthogonalizes, and takes a batch apart, which rounds otherwise."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.batches: list[tuple[int, ...]] = []
        self._original = _muon_formulas.newton_schulz
        self._patch = mock.patch.object(
            _muon_formulas, "newton_schulz", side_effect=self._call
        )

    def _call(
        self, x: torch.Tensor, *args: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.ndim > 2:
            self.batches.append(tuple(x.shape))
            return torch.stack([self._call(matrix, *args) for matrix in x])
        self.shapes.append(tuple(x.shape))
        return self._original(x, *args, out=out)

    def __enter__(self):
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


class MuonTestCase(TestCase):
    """Runs one optimizer class over made-up gradients."""

    device = "cpu"

    def run_steps(
        self,
        cls,
        shapes,
        *,
        dtype=torch.float32,
        steps=3,
        strided=("contiguous", "contiguous"),
        has_grad=lambda step, index: True,
        groups=None,
        named=False,
        between=lambda optimizer, step: None,
        **options,
    ):
        """Returns parameters, momentum buffers and the optimizer after ``steps`` steps.

        ``strided`` says how parameters and gradients are stored; ``between`` is called before each step.
        """
        generator = torch.Generator().manual_seed(0)
        params = [
            nn.Parameter(
                make_matrix(shape, dtype, generator, strided[0]).to(self.device)
            )
            for shape in shapes
        ]
        given = [(f"w{i}", p) for i, p in enumerate(params)] if named else params
        groups = [
            {**group, "params": [given[i] for i in group["params"]]}
            for group in groups or [{"params": range(len(params))}]
        ]
        optimizer = cls(groups, **options)
        for step in range(steps):
            between(optimizer, step)
            # The parameters may be others now.
            params = [p for group in optimizer.param_groups for p in group["params"]]
            for index, param in enumerate(params):
                grad = make_matrix(param.shape, dtype, generator, strided[1])
                param.grad = grad.to(self.device) if has_grad(step, index) else None
            optimizer.step()
        return params, self.buffers_of(optimizer, params), optimizer

    def buffers_of(self, optimizer, params):
        return [optimizer.state.get(p, {}).get("momentum_buffer") for p in params]

    def assert_same_bits(self, actual, expected):
        self.assertEqual(len(actual), len(expected))
        for mine, other in zip(actual, expected):
            if other is None:
                self.assertIsNone(mine)
                continue
            self.assertEqual(mine, other, rtol=0, atol=0, equal_nan=False)
            self.assertEqual(mine.stride(), other.stride())

    def assert_same_training(self, shapes, cls, config=None, **options):
        """A Muon with ``config`` ends with the same bits as a ``cls`` without one."""
        results = []
        for each, own in ((Muon, {"distributed_config": config}), (cls, {})):
            params, buffers, _ = self.run_steps(each, shapes, **own, **options)
            results.append(params + buffers)
        self.assert_same_bits(*results)

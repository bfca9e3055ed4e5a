"""Helpers for tests of Muon on one process."""

import threading
from typing import Any

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


# The order of additions may change this part of an update's norm, as Newton-Schulz in bfloat16 amplifies rounding. On
# a CPU, batches and turned matrices had a median of 0, 99 % below 1.5 %, and at most 4.4 %.
ROUNDING = 0.1


def is_near(found, expected, moved):
    """Whether two pieces of a parameter, which ``moved`` as a whole, are equal but for rounding."""
    if found.shape != expected.shape:
        return False
    distance = (found - expected).norm()
    return bool(distance <= ROUNDING * moved.norm())


def exact_result(matrix, triples, safety=1.0):
    """The polynomials of Newton-Schulz, applied to the singular values in float64."""
    rows, values, columns = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / (values.norm() * safety)
    for a, b, c in triples:
        values = a * values + b * values**3 + c * values**5
    return rows @ torch.diag(values) @ columns


def all_to(rank):
    return lambda params, state: {rank: list(range(len(params)))}


def local_config(assign_fn=None, *, state=None):
    return DistributedConfig(
        assign_fn=assign_fn or all_to(0),
        gather_fn=lambda piece, owner, state: piece,
        redistribute_fn=lambda full, owner, state: full,
        state={} if state is None else state,
    )


def randn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_matrix(shape, dtype, generator, strided):
    rows, columns = shape
    if strided == "transposed":
        return torch.randn(columns, rows, generator=generator).to(dtype).T
    if strided == "every other column":
        return torch.randn(rows, 2 * columns, generator=generator).to(dtype)[:, ::2]
    return torch.randn(rows, columns, generator=generator).to(dtype)


def parts_of(tensor, split=None, flatten=False):
    """The matrices of a fused or flattened weight, by hand."""
    if flatten:
        tensor = tensor.flatten(1)
    # The leading dimensions of a stack count its matrices.
    stack = tensor.flatten(0, -3) if tensor.ndim > 2 else tensor[None]
    if split is None:
        return list(stack)
    parts = []
    if not isinstance(split, dict):
        for matrix in stack:
            parts += matrix.split(split)
        return parts
    dim, sizes = split.get("dim", 0), split["sizes"]
    # The rows or columns of each part.
    lines = [[] for _ in sizes]
    line = 0
    for _ in range(split.get("repeats", 1)):
        for part, size in enumerate(sizes):
            lines[part] += range(line, line + size)
            line += size
    for matrix in stack:
        for own in lines:
            parts.append(matrix.index_select(dim, torch.tensor(own)))
    return parts


def make_params(*shapes):
    params = []
    for number, shape in enumerate(shapes):
        param = nn.Parameter(randn(2 * number, *shape))
        param.grad = randn(2 * number + 1, *shape)
        params.append(param)
    return params


# The calls that this thread, which may be a rank, counts.
_counting = threading.local()
_newton_schulz = _muon_formulas.newton_schulz


def _counted_newton_schulz(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    calls = getattr(_counting, "calls", None)
    if calls is None:
        return _newton_schulz(x, *args, **options)
    if x.ndim == 2:
        calls.shapes.append(tuple(x.shape))
        return _newton_schulz(x, *args, **options)
    calls.batches.append(tuple(x.shape))
    options["out"] = None
    return torch.stack([_counted_newton_schulz(m, *args, **options) for m in x])


class NewtonSchulzCalls:
    """Counts the matrices that this rank orthogonalizes, and takes a batch apart, which rounds otherwise."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.batches: list[tuple[int, ...]] = []

    def __enter__(self):
        # It stays, because other threads may still count.
        _muon_formulas.newton_schulz = _counted_newton_schulz
        _counting.calls = self
        return self

    def __exit__(self, *_: object) -> None:
        _counting.calls = None


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
        of_params, of_grads = strided
        params, given = [], []
        for index, shape in enumerate(shapes):
            matrix = make_matrix(shape, dtype, generator, of_params)
            param = nn.Parameter(matrix.to(self.device))
            params.append(param)
            given.append((f"w{index}", param) if named else param)
        if groups is None:
            groups = [{"params": range(len(params))}]
        filled = []
        for group in groups:
            own = [given[index] for index in group["params"]]
            filled.append({**group, "params": own})
        optimizer = cls(filled, **options)
        for step in range(steps):
            between(optimizer, step)
            # The parameters may be others now.
            params = []
            for group in optimizer.param_groups:
                params += group["params"]
            for index, param in enumerate(params):
                grad = make_matrix(param.shape, dtype, generator, of_grads)
                param.grad = None
                if has_grad(step, index):
                    param.grad = grad.to(self.device)
            optimizer.step()
        return params, self.buffers_of(optimizer, params), optimizer

    def buffers_of(self, optimizer, params):
        buffers = []
        for param in params:
            state = optimizer.state.get(param, {})
            buffers.append(state.get("momentum_buffer"))
        return buffers

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
        params, buffers, _ = self.run_steps(
            Muon, shapes, distributed_config=config, **options
        )
        others, their_buffers, _ = self.run_steps(cls, shapes, **options)
        self.assert_same_bits(params, others)
        self.assert_same_bits(buffers, their_buffers)

# mypy: allow-untyped-defs
r"""Orthogonalization by Newton-Schulz iterations: the quintic, and its Gram form.

The method, the quintic's coefficients and the number of steps are Keller Jordan's:
https://kellerjordan.github.io/posts/muon/ and
https://github.com/KellerJordan/Muon/blob/f90a42b28e00b8d9d2d05865fe90d9f39abcbcbd/muon.py#L16,
with suggestions by @jxbz, @leloykun and @YouJiacheng.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


EPS = 1e-7
DEFAULT_A = 3.4445
DEFAULT_B = -4.7750
DEFAULT_C = 2.0315
DEFAULT_NS_STEPS = 5

# Newton-Schulz reads and writes this dtype, so ranks also exchange it. Rounding an element before it
# is sent gives the same bits as rounding it after it has arrived.
NS_DTYPE = torch.bfloat16
NS_ALGORITHMS = ("quintic", "gram", "symmetric")


class _GramLimits(NamedTuple):
    """The matrices for which the Gram form is faster than the default's products."""

    # At least this many times the short side.
    long_by_short: float
    # At least this many rows or columns.
    short: int


_GRAM_ON_CPUS = _GramLimits(long_by_short=1.5, short=1)
# Measured on an H100 (docs/data/h100-gpu.md), with plain products.
_GRAM_ON_ACCELERATORS = _GramLimits(long_by_short=3.5, short=2048)
# Recompute the Gram matrix before small singular values have grown by more than this. The bfloat16 Gram
# matrix loses the singular values below its rounding, and more growth destroys nearly low-rank matrices.
_GRAM_GROWTH = 50
# Symmetric products with at least this many rows are cut into blocks, at most this many times.
_MIN_SYMMETRIC = 512
_SYMMETRIC_LEVELS = 2

Coefficients = tuple[float, float, float]


def as_tuples(ns_coefficients: Any) -> tuple:
    """Returns ``ns_coefficients`` with tuples for lists, which JSON and YAML checkpoints contain, and for arrays."""
    if not hasattr(ns_coefficients, "__iter__"):
        return (ns_coefficients,)
    return tuple(
        tuple(c) if getattr(c, "ndim", hasattr(c, "__iter__")) else c
        for c in ns_coefficients
    )


def _per_step(ns_coefficients: Sequence[Any]) -> bool:
    return bool(ns_coefficients) and isinstance(ns_coefficients[0], (list, tuple))


def check_newton_schulz(ns_coefficients, ns_steps: int, ns_algorithm: str) -> None:
    """Raises ValueError if the options of Newton-Schulz are invalid."""
    if ns_steps >= 100:
        raise ValueError(
            "Number of steps must be less than 100 for computational efficiency"
        )
    per_step = _per_step(ns_coefficients)
    if any(len(c) != 3 for c in (ns_coefficients if per_step else [ns_coefficients])):
        raise ValueError("Coefficients must be a tuple of exactly 3 values")
    if per_step and len(ns_coefficients) != ns_steps:
        raise ValueError(
            f"ns_coefficients has {len(ns_coefficients)} tuples but ns_steps is {ns_steps}; pass one per step or one for all steps"
        )
    check_ns_algorithm(ns_algorithm)


def uses_gram(shape: Sequence[int], ns_algorithm: str, is_cpu: bool) -> bool:
    """Whether a matrix of ``shape`` takes the Gram form: on request, on devices and for shapes where it pays."""
    limits = _GRAM_ON_CPUS if is_cpu else _GRAM_ON_ACCELERATORS
    short, long = sorted(shape)
    is_faster = short >= limits.short and long >= limits.long_by_short * short
    return ns_algorithm == "gram" and is_faster


def check_ns_algorithm(ns_algorithm: str) -> None:
    if ns_algorithm not in NS_ALGORITHMS:
        raise ValueError(
            f"ns_algorithm must be one of {NS_ALGORITHMS} but is {ns_algorithm!r}"
        )


def _addmm(base, left, right, beta, alpha=1, out=None) -> Tensor:
    """``beta * base + alpha * left @ right``, of matrices or of batches."""
    addmm = torch.addmm if left.ndim == 2 else torch.baddbmm
    return addmm(base, left, right, beta=beta, alpha=alpha, out=out)


def _mirrored(base, left, right, beta, alpha=1, out=None, levels=_SYMMETRIC_LEVELS):
    """Like :func:`_addmm`, for a symmetric ``base`` and result, whose blocks below the diagonal are copies."""
    rows = left.size(-2)
    if not levels or rows < _MIN_SYMMETRIC:
        return _addmm(base, left, right, beta, alpha, out)
    out = torch.empty_like(base) if out is None else out
    upper, lower = slice(None, rows // 2), slice(rows // 2, None)
    for down, along in ((upper, upper), (lower, lower), (upper, lower)):
        a, b, c = base[..., down, along], left[..., down, :], right[..., along]
        if down == along:
            _mirrored(a, b, c, beta, alpha, out[..., down, along], levels - 1)
        else:
            # A contiguous block is transposed four times as fast as a view of ``out``.
            block = _addmm(a, b, c, beta, alpha)
            out[..., upper, lower] = block
            out[..., lower, upper] = block.mT.contiguous()
    return out


class Products:
    """The products of an iteration. Their factors commute, so the results are symmetric."""

    # The whole matrix's shape, if a rank has only a block of it.
    shape: Sequence[int] | None = None

    def norm(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return x.norm()
        if not x.is_cpu:
            # One launch. It may add in another order than the norm of a single matrix, whose bits no accelerator
            # promises for a batch.
            return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        # A CPU promises them.
        return torch.stack([matrix.norm() for matrix in x])[:, None, None]

    def gram(self, x: Tensor) -> Tensor:
        return x @ x.mT

    combine: Any = staticmethod(_addmm)


class SymmetricProducts(Products):
    """Computes the blocks on and above the diagonal, and mirrors those above."""

    def gram(self, x: Tensor) -> Tensor:
        gram = x.new_empty(*x.shape[:-1], x.size(-2))
        # With ``beta`` 0, the content of ``base`` does not count.
        return _mirrored(gram, x, x.mT, 0, out=gram)

    combine = staticmethod(_mirrored)


_PLAIN, _SYMMETRIC = Products(), SymmetricProducts()


@functools.cache
def _has_same_bits() -> bool:
    """Whether symmetric products have the bits of plain ones on this CPU. Measured on CPUs with AVX-512
    bfloat16 and without AMX. Other CPUs and accelerators use them on request.
    """
    cpu = torch.cpu
    return cpu._is_avx512_bf16_supported() and not cpu._is_amx_tile_supported()


def products_for(x: Tensor, ns_algorithm: str) -> Products:
    """Symmetric products on CPUs, on request or where they have the bits of plain products, and are faster."""
    if min(x.shape[-2:]) < _MIN_SYMMETRIC:
        return _PLAIN
    # Blocks are written into a result, which autograd, compilers and wrapper types do not take.
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.requires_grad:
        return _PLAIN
    if not x.is_cpu:
        # The host takes longer to launch the products of blocks than an H100 to compute whole products.
        return _PLAIN
    if ns_algorithm != "quintic":
        return _SYMMETRIC
    is_measured = x.ndim == 2 and x.dtype == NS_DTYPE
    # With more threads, the library may cut the sums of small blocks.
    is_exact = is_measured and torch.get_num_threads() <= 2 and _has_same_bits()
    return _SYMMETRIC if is_exact else _PLAIN


def newton_schulz(
    x: Tensor,
    ns_coefficients: Sequence[Any],
    ns_steps: int,
    eps: float,
    ns_algorithm: str = "quintic",
    products: Products | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Orthogonalizes ``x``, of shape (rows, columns) or (matrices, rows, columns), in its own dtype. It writes only
    to ``out``, which may be ``x`` itself: the result is there, unless it is the transpose of a computed matrix.
    ``ns_coefficients`` are (a, b, c) of the odd quintic, or one such tuple for each of ``ns_steps`` iterations. ``eps``
    is a lower bound of the norm that divides ``x``. With ``products`` of all owners of a divided matrix, ``x`` is a
    block of it.
    """
    products = products or products_for(x, ns_algorithm)
    rows, columns = products.shape or x.shape[-2:]
    tall = rows > columns
    if tall:
        x = x.mT
    # The iteration converges for singular values in [0, 1]. The Frobenius norm bounds them.
    x = x / products.norm(x).clamp(min=eps)
    per_step = _per_step(ns_coefficients)
    steps: Any = ns_coefficients if per_step else [ns_coefficients] * ns_steps
    if uses_gram((rows, columns), ns_algorithm, x.is_cpu):
        for block in _gram_blocks(steps):
            x = _gram_factor(x, block, products) @ x
        return x.mT if tall else x
    for number, (a, b, c) in enumerate(steps, 1):
        gram = products.gram(x)
        target = out if number == len(steps) and not tall else None
        # The polynomial has no name, so that its memory is free before the next Gram matrix.
        if c == 0:
            x = _addmm(x, _cubic(gram, b), x, a, out=target)
        else:
            x = _addmm(x, products.combine(gram, gram, gram, b, c), x, a, out=target)
    return x.mT if tall else x


def _cubic(gram: Tensor, b: float) -> Tensor:
    """``b * gram + 0 * gram @ gram``. Products with ``alpha=0`` would have the same bits, but take a slow path on
    CPUs.
    """
    return gram * b


def newton_schulz_bytes(
    shape: Sequence[int],
    ns_algorithm: str = "quintic",
    owners: int = 1,
    is_cpu: bool = True,
) -> int:
    """The most bytes that exist at once for a matrix: itself, two iterates, Gram matrices. Each of several
    ``owners`` has a block of the matrix, and whole Gram matrices.
    """
    short, long = sorted(shape)
    square, block = short * short, short * long // owners
    elements = 3 * block + 2 * square
    if uses_gram(shape, ns_algorithm, is_cpu):
        elements = max(3 * block + square, 2 * block + 5 * square)
    if owners > 1:
        # The sum of Gram matrices is in float32.
        elements = max(elements, 2 * block + 4 * square)
    return elements * NS_DTYPE.itemsize


def _gram_blocks(steps: Sequence[Coefficients]) -> list[list[Coefficients]]:
    """Splits the steps into blocks that share one Gram matrix: three and two of the default five."""
    blocks: list[list[Coefficients]] = []
    growth = math.inf
    for a, b, c in steps:
        growth *= abs(a)
        if growth > _GRAM_GROWTH:
            blocks.append([])
            growth = abs(a)
        blocks[-1].append((a, b, c))
    return blocks


def _gram_factor(x: Tensor, steps: list[Coefficients], products: Products) -> Tensor:
    """Returns the factor, of shape (..., rows, rows), by which ``steps`` multiply ``x``. Each step multiplies
    ``x`` by a polynomial of its Gram matrix, and the next Gram matrix is a polynomial of this one. So all steps
    of a block need two products with the long side instead of two per step.
    """
    gram = products.gram(x)
    factor = torch.empty(0)
    for step, (a, b, c) in enumerate(steps, 1):
        if c == 0:
            poly = _cubic(gram, b)
        else:
            poly = products.combine(gram, gram, gram, b, c)
        if step == 1:
            factor = poly.clone()
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            factor = products.combine(factor, poly, factor, a)
        if step < len(steps):
            # Adding ``a`` to the diagonal of ``poly`` first would round away the last bits of the rest.
            half = products.combine(gram, poly, gram, a)
            gram = products.combine(half, half, poly, a)
    return factor


def _zeropower_via_newtonschulz(
    grad: Tensor,
    ns_coefficients: Coefficients | Sequence[Coefficients],
    ns_steps: int,
    eps: float,
    ns_algorithm: str = "quintic",
) -> Tensor:
    r"""Approximates the orthogonal factor :math:`UV^T` of the matrix ``grad`` :math:`= USV^T`, in bfloat16.

    The coefficients maximize the quintic's slope at zero, so a few steps suffice. The singular values
    of the result lie between about 0.3 and 1.2 instead of at 1, which does not hurt training.
    """
    check_newton_schulz(ns_coefficients, ns_steps, ns_algorithm)
    if len(grad.shape) != 2:
        raise ValueError("Input tensor gradient must be a 2D matrix")
    x = grad.to(dtype=NS_DTYPE)
    return newton_schulz(x, ns_coefficients, ns_steps, eps, ns_algorithm)

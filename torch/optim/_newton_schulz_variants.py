# mypy: allow-untyped-defs
"""Faster forms of Newton-Schulz: symmetric products by blocks, and the Gram form, which iterates on the small side."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._newton_schulz import (
    BatchProducts,
    Coefficients,
    MIN_SYMMETRIC,
    NS_DTYPE,
    Products,
    quintic,
)


class _GramLimits(NamedTuple):
    """The matrices for which the Gram form is faster than the default's products."""

    # At least this many times the short side.
    long_by_short: float
    # At least this many rows or columns.
    short: int


_GRAM_ON_CPUS = _GramLimits(long_by_short=1.5, short=1)
# Measured on an H100 (docs/data/h100-gpu.md), with plain products.
_GRAM_ON_ACCELERATORS = _GramLimits(long_by_short=3.5, short=2048)
# With the kernels of ``_newton_schulz_kernels.py``, at least this many times the short side.
GRAM_LONG_BY_SHORT = 1.5
# Recompute the Gram matrix before small singular values have grown by more than this. The bfloat16 Gram
# matrix loses the singular values below its rounding, and more growth destroys nearly low-rank matrices.
_GRAM_GROWTH = 50
# Symmetric products are cut into blocks at most this many times.
_SYMMETRIC_LEVELS = 2


def fastest(
    x: Tensor,
    coefficients: Sequence[Coefficients],
    eps: float,
    ns_algorithm: str,
    out: Tensor | None,
) -> Tensor:
    """:func:`newton_schulz` in the fastest form that the algorithm allows for this shape and device."""
    if coefficients and not x.is_cpu:
        from . import _newton_schulz_kernels as kernels

        form = kernels.form_for(x, ns_algorithm)
        if form:
            return kernels.orthogonalized(x, coefficients, eps, form, out)
    products = products_for(x, ns_algorithm)
    if uses_gram(x.shape[-2:], ns_algorithm, x.is_cpu):
        return _gram_form(x, coefficients, eps, products)
    return quintic(x, coefficients, eps, products, out)


def uses_gram(shape: Sequence[int], ns_algorithm: str, is_cpu: bool) -> bool:
    """Whether a matrix of ``shape`` takes the Gram form: on request, on devices and for shapes where it pays."""
    limits = _GRAM_ON_CPUS if is_cpu else _GRAM_ON_ACCELERATORS
    short, long = sorted(shape)
    is_faster = short >= limits.short and long >= limits.long_by_short * short
    return ns_algorithm == "gram" and is_faster


class SymmetricProducts(Products):
    """Computes the blocks on and above the diagonal, and mirrors those above; of a matrix or of a batch."""

    @staticmethod
    def norm(x: Tensor) -> Tensor:
        return Products.norm(x) if x.ndim == 2 else BatchProducts.norm(x)

    @staticmethod
    def gram(x: Tensor, transposed: Tensor) -> Tensor:
        gram = x.new_empty(*x.shape[:-1], x.size(-2))
        # With ``beta`` 0, the content of the base does not count.
        return _mirrored(gram, x, transposed, beta=0, out=gram)

    @staticmethod
    def combine(base, left, right, *, beta, alpha=1) -> Tensor:
        return _mirrored(base, left, right, beta=beta, alpha=alpha)


def _mirrored(
    base: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: float,
    alpha: float = 1,
    out: Tensor | None = None,
    levels: int = _SYMMETRIC_LEVELS,
) -> Tensor:
    """``beta * base + alpha * left @ right``, for a symmetric ``base`` and result, whose blocks below the diagonal are
    copies.
    """
    add_product = torch.addmm if left.ndim == 2 else torch.baddbmm
    rows = left.size(-2)
    if not levels or rows < MIN_SYMMETRIC:
        return add_product(base, left, right, beta=beta, alpha=alpha, out=out)
    out = torch.empty_like(base) if out is None else out
    upper, lower = slice(None, rows // 2), slice(rows // 2, None)
    for half in (upper, lower):
        _mirrored(
            base[..., half, half],
            left[..., half, :],
            right[..., half],
            beta=beta,
            alpha=alpha,
            out=out[..., half, half],
            levels=levels - 1,
        )
    # A contiguous block is transposed four times as fast as a view of ``out``.
    block = add_product(
        base[..., upper, lower],
        left[..., upper, :],
        right[..., lower],
        beta=beta,
        alpha=alpha,
    )
    out[..., upper, lower] = block
    out[..., lower, upper] = block.mT.contiguous()
    return out


@functools.cache
def _has_same_bits() -> bool:
    """Whether symmetric products have the bits of plain ones on this CPU. Measured on CPUs with AVX-512
    bfloat16 and without AMX. Other CPUs and accelerators use them on request.
    """
    cpu = torch.cpu
    return cpu._is_avx512_bf16_supported() and not cpu._is_amx_tile_supported()


def products_for(x: Tensor, ns_algorithm: str) -> Any:
    """Symmetric products on CPUs, on request or where they have the bits of plain products, and are faster."""
    plain = Products if x.ndim == 2 else BatchProducts
    # Blocks are written into a result, which autograd, compilers and wrapper types do not take.
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.requires_grad:
        return plain
    if not x.is_cpu:
        # The host takes longer to launch the products of blocks than an H100 to compute whole products.
        return plain
    if ns_algorithm != "quintic":
        return SymmetricProducts
    is_measured = x.ndim == 2 and x.dtype == NS_DTYPE
    # With more threads, the library may cut the sums of small blocks.
    is_exact = is_measured and torch.get_num_threads() <= 2 and _has_same_bits()
    return SymmetricProducts if is_exact else plain


def newton_schulz_bytes(
    shape: Sequence[int], ns_algorithm: str = "quintic", is_cpu: bool = True
) -> int:
    """The most bytes that exist at once for a matrix: itself, two iterates, Gram matrices."""
    short, long = sorted(shape)
    square, whole = short * short, short * long
    elements = 3 * whole + 2 * square
    may_use_gram = uses_gram(shape, ns_algorithm, is_cpu)
    if not is_cpu and ns_algorithm == "gram":
        # By kernels, if the GPU has them.
        may_use_gram = long >= GRAM_LONG_BY_SHORT * short
    if may_use_gram:
        elements = max(3 * whole + square, 2 * whole + 5 * square)
    return elements * NS_DTYPE.itemsize


def _gram_form(
    x: Tensor, coefficients: Sequence[Coefficients], eps: float, products: Any
) -> Tensor:
    rows, columns = x.shape[-2:]
    is_tall = rows > columns
    if is_tall:
        x = x.mT
    x = x / products.norm(x).clamp(min=eps)
    for steps in steps_by_gram_matrix(coefficients):
        x = _gram_factor(x, steps, products) @ x
    return x.mT if is_tall else x


def steps_by_gram_matrix(
    coefficients: Sequence[Coefficients],
) -> list[list[Coefficients]]:
    """The steps that share one Gram matrix: three and two of the default five."""
    shared: list[list[Coefficients]] = []
    growth = math.inf
    for a, b, c in coefficients:
        growth *= abs(a)
        if growth > _GRAM_GROWTH:
            shared.append([])
            growth = abs(a)
        shared[-1].append((a, b, c))
    return shared


def _gram_factor(x: Tensor, steps: list[Coefficients], products: Any) -> Tensor:
    """Returns the factor, of shape (..., rows, rows), by which ``steps`` multiply ``x``. Each step multiplies
    ``x`` by a polynomial of its Gram matrix, and the next Gram matrix is a polynomial of this one. So all of these
    steps need two products with the long side instead of two per step.
    """
    gram = products.gram(x, x.mT)
    factor = torch.empty(0)
    for step, (a, b, c) in enumerate(steps, 1):
        if c == 0:
            polynomial = gram * b
        else:
            polynomial = products.combine(gram, gram, gram, beta=b, alpha=c)
        if step == 1:
            factor = polynomial.clone()
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            factor = products.combine(factor, polynomial, factor, beta=a)
        if step < len(steps):
            # Adding ``a`` to the diagonal of the polynomial first would round away the last bits of the rest.
            half = products.combine(gram, polynomial, gram, beta=a)
            gram = products.combine(half, half, polynomial, beta=a)
    return factor

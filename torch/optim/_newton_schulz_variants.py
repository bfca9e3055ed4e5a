# mypy: allow-untyped-defs
"""The products of an iteration of Newton-Schulz, by torch or by symmetric blocks. And the Gram form of the iterations,
which iterates on the small side. ``_newton_schulz.py`` chooses among them.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


Coefficients = tuple[float, float, float]


# With fewer rows and columns, products are not cut into blocks.
MIN_SYMMETRIC = 512
# Symmetric products are cut into blocks at most this many times.
_SYMMETRIC_LEVELS = 2
# The Gram form is faster than the default on CPUs, and with the kernels of ``_newton_schulz_kernels.py``, if the long side
# is at least this many times the short one.
GRAM_LONG_BY_SHORT = 1.5
# With plain products on accelerators, at least this many times, and from this many rows or columns. Measured on an H100
# (docs/data/h100-gpu.md).
_LONG_BY_SHORT_ON_ACCELERATORS = 3.5
_SHORT_ON_ACCELERATORS = 2048
# Recompute the Gram matrix before small singular values have grown by more than this. The bfloat16 Gram
# matrix loses the singular values below its rounding, and more growth destroys nearly low-rank matrices.
_GRAM_GROWTH = 50


def uses_gram(shape: Sequence[int], ns_algorithm: str, is_cpu: bool) -> bool:
    """Whether a matrix of ``shape`` takes the Gram form: on request, on devices and for shapes where it pays."""
    if ns_algorithm != "gram":
        return False
    short, long = sorted(shape)
    if is_cpu:
        return long >= GRAM_LONG_BY_SHORT * short
    is_long = long >= _LONG_BY_SHORT_ON_ACCELERATORS * short
    return is_long and short >= _SHORT_ON_ACCELERATORS


class Products:
    """The operations of an iteration on a matrix, in torch's own kernels. Their factors commute, so the results of
    ``gram`` and ``combine`` are symmetric.
    """

    # The Frobenius norm of a matrix.
    norm: Any = staticmethod(torch.Tensor.norm)
    # A matrix times its transpose.
    gram: Any = staticmethod(torch.mm)
    # ``beta * base + alpha * left @ right``.
    combine: Any = staticmethod(torch.addmm)


def _norms(x: Tensor) -> Tensor:
    """The Frobenius norm of each matrix of a batch, of shape (matrices, 1, 1)."""
    if not x.is_cpu:
        # One launch. It may add in another order than the norm of a single matrix, whose bits no accelerator
        # promises for a batch.
        return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    # A CPU promises them.
    return torch.stack([matrix.norm() for matrix in x])[:, None, None]


class BatchProducts(Products):
    """The operations on a batch of shape (matrices, rows, columns)."""

    norm = staticmethod(_norms)
    gram = staticmethod(torch.bmm)
    combine = staticmethod(torch.baddbmm)


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
    # The host takes longer to launch the products of blocks than an H100 to compute whole products.
    if not x.is_cpu:
        return plain
    # Blocks are written into a result, which autograd, compilers and wrapper types do not take.
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.requires_grad:
        return plain
    if ns_algorithm != "quintic":
        return SymmetricProducts
    is_measured = x.ndim == 2 and x.dtype == torch.bfloat16
    if not is_measured or min(x.shape) < MIN_SYMMETRIC:
        return plain
    # With more threads, the library may cut the sums of small blocks.
    is_exact = torch.get_num_threads() <= 2 and _has_same_bits()
    return SymmetricProducts if is_exact else plain


def newton_schulz_numel(shape: Sequence[int], ns_algorithm: str) -> int:
    """The most elements that exist at once for a matrix: itself, two iterates, Gram matrices."""
    short, long = sorted(shape)
    square, whole = short * short, short * long
    numel = 3 * whole + 2 * square
    if ns_algorithm == "gram" and long >= GRAM_LONG_BY_SHORT * short:
        numel = max(numel, 2 * whole + 5 * square)
    return numel


def gram_form(
    x: Tensor, coefficients: Sequence[Coefficients], eps: float, products: Any
) -> Tensor:
    """The iterations of the quintic, several with each Gram matrix of an iterate."""
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

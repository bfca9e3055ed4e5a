# mypy: allow-untyped-defs
r"""Orthogonalization by Newton-Schulz iterations with an odd quintic.

The method, the quintic's coefficients and the number of steps are Keller Jordan's:
https://kellerjordan.github.io/posts/muon/ and
https://github.com/KellerJordan/Muon/blob/f90a42b28e00b8d9d2d05865fe90d9f39abcbcbd/muon.py#L16,
with suggestions by @jxbz, @leloykun and @YouJiacheng.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._newton_schulz_variants import (
    BatchProducts,
    Coefficients,
    gram_form,
    Products,
    products_for,
    uses_gram,
)


EPS = 1e-7
DEFAULT_A = 3.4445
DEFAULT_B = -4.7750
DEFAULT_C = 2.0315
DEFAULT_NS_STEPS = 5

# Newton-Schulz reads and writes this dtype, so ranks also exchange it. Rounding an element before it
# is sent gives the same bits as rounding it after it has arrived.
NS_DTYPE = torch.bfloat16
NS_ALGORITHMS = ("quintic", "gram", "symmetric")
# Other names of these algorithms: the name of the quintic in upstream's proposal (#187132).
OTHER_NAMES = {"standard": "quintic"}


def as_tuples(ns_coefficients: Any) -> tuple:
    """Returns ``ns_coefficients`` with tuples for lists, which JSON and YAML checkpoints contain, and for arrays."""
    if not hasattr(ns_coefficients, "__iter__"):
        return (ns_coefficients,)
    return tuple(
        tuple(c) if getattr(c, "ndim", hasattr(c, "__iter__")) else c
        for c in ns_coefficients
    )


def check_newton_schulz(ns_coefficients, ns_steps: int, ns_algorithm: str) -> None:
    """Raises ValueError if the options of Newton-Schulz are invalid."""
    if ns_steps >= 100:
        raise ValueError(
            "Number of steps must be less than 100 for computational efficiency"
        )
    if ns_algorithm not in NS_ALGORITHMS:
        raise ValueError(
            f"ns_algorithm must be one of {NS_ALGORITHMS} but is {ns_algorithm!r}"
        )
    coefficients = coefficients_of_steps(ns_coefficients, ns_steps)
    if any(len(of_step) != 3 for of_step in coefficients):
        raise ValueError("Coefficients must be a tuple of exactly 3 values")
    if len(coefficients) != ns_steps:
        raise ValueError(
            f"ns_coefficients has {len(ns_coefficients)} tuples but ns_steps is {ns_steps}; pass one per step or one for all steps"
        )


def stored_ns_algorithm(ns_algorithm: Any) -> Any:
    """The name that parameter groups store, so that ranks and checkpoints agree on it."""
    # An invalid option of another type may have no hash. check_newton_schulz() refuses it.
    if not isinstance(ns_algorithm, str):
        return ns_algorithm
    # The proposal has an Enum of strings. Its members have other hashes than their values, and
    # torch.load() with weights_only would refuse them.
    name = str.__str__(ns_algorithm)
    return OTHER_NAMES.get(name, name)


def coefficients_of_steps(
    ns_coefficients: Sequence[Any], ns_steps: int
) -> Sequence[Coefficients]:
    """The coefficients of each step: ``ns_coefficients`` themselves, if they are one tuple for each."""
    if ns_coefficients and isinstance(ns_coefficients[0], (list, tuple)):
        return ns_coefficients
    return [ns_coefficients] * ns_steps  # type: ignore[list-item]


def newton_schulz(
    x: Tensor,
    ns_coefficients: Sequence[Any],
    ns_steps: int,
    eps: float,
    ns_algorithm: str = "quintic",
    out: Tensor | None = None,
) -> Tensor:
    """Orthogonalizes ``x``, of shape (rows, columns) or (matrices, rows, columns), in its own dtype. It writes only
    to ``out``, which may be ``x`` itself: the result is there, or is another tensor.
    ``ns_coefficients`` are (a, b, c) of the odd quintic, or one such tuple for each of ``ns_steps`` iterations. ``eps``
    is a lower bound of the norm that divides ``x``.
    """
    coefficients = coefficients_of_steps(ns_coefficients, ns_steps)
    if coefficients and ns_algorithm != "quintic" and not x.is_cpu:
        from . import _newton_schulz_kernels as kernels

        form = kernels.form_for(x, ns_algorithm)
        if form:
            return kernels.orthogonalized(x, coefficients, eps, form, out)
    products = products_for(x, ns_algorithm)
    if uses_gram(x.shape[-2:], ns_algorithm, x.is_cpu):
        return gram_form(x, coefficients, eps, products)
    return quintic(x, coefficients, eps, products, out)


def quintic(
    x: Tensor,
    coefficients: Sequence[Coefficients],
    eps: float,
    products: Any = None,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`newton_schulz` with one iteration for each of the ``coefficients``, by torch's ``products`` unless others
    are given.
    """
    if products is None:
        products = Products if x.ndim == 2 else BatchProducts
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    rows, columns = x.shape[-2:]
    is_tall = rows > columns
    keeps_layout = is_tall and has_fast_layouts(x)
    if is_tall:
        x = x.mT
    result = None
    if out is not None and (keeps_layout or not is_tall):
        result = out.mT if is_tall else out
    # The iteration converges for singular values in [0, 1]. The Frobenius norm bounds them.
    x = x / products.norm(x).clamp(min=eps)
    for step, (a, b, c) in enumerate(coefficients, 1):
        gram = products.gram(x, x.mT)
        target = None
        if step == len(coefficients) and result is not None:
            target = result
        elif keeps_layout:
            target = torch.empty_like(x)
        # The polynomial has no name, so that its memory is free before the next Gram matrix.
        if c == 0:
            # A product with ``alpha=0`` would have the same bits, but takes a slow path on CPUs.
            x = add_product(x, gram * b, x, beta=a, out=target)
        else:
            x = add_product(
                x,
                products.combine(gram, gram, gram, beta=b, alpha=c),
                x,
                beta=a,
                out=target,
            )
    if out is not None and x is result:
        return out
    return x.mT if is_tall else x


def has_fast_layouts(x: Tensor) -> bool:
    """Whether products are as fast for columns that follow each other in memory as for rows, with the same bits. Then
    the iterates of a tall matrix keep its own layout, and nothing transposes the last one. Measured on an H100, for
    rows and columns of a multiple of 16 bytes.
    """
    if x.is_cpu or type(x) is not Tensor or x.requires_grad:
        return False
    if torch.compiler.is_compiling():
        return False
    rows, columns = x.shape[-2:]
    return rows * x.itemsize % 16 == 0 and columns * x.itemsize % 16 == 0


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

# mypy: allow-untyped-defs
"""Newton-Schulz with symmetric products in Triton, on GPUs for which the kernels have been measured."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._newton_schulz import Coefficients
from ._newton_schulz_variants import GRAM_LONG_BY_SHORT, steps_by_gram_matrix


# The dtypes that the passes before and after Newton-Schulz take.
PASS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Gram matrices of float16 are this many times those of the normalized matrix, and its iterates as many times the square
# root. The elements of the Gram matrix of a large matrix are small: they would lose bits at the end of float16's range.
_GRAM_SCALE = 1024.0
_ITERATE_SCALE = 32.0


# Multiplications and additions of an iteration by torch's products. The host takes longer to launch Triton's products
# than a GPU to compute fewer of them by torch's. The Gram form has more and smaller products. A CUDA graph needs no
# host. Measured on an H100 (docs/data/h100-gpu.md).
_LEAST_FLOPS = 160e9
_LEAST_FLOPS_OF_GRAM_FORM = 240e9
_LEAST_FLOPS_IN_GRAPHS = 30e9


def form_of(
    shape: Sequence[int], matrices: int, ns_algorithm: str, in_graph: bool = False
) -> str:
    """How a GPU with the kernels orthogonalizes ``matrices`` of ``shape``: in the form "gram" or "symmetric", by
    symmetric products; or "", by torch's, if these are faster.
    """
    short, long = sorted(shape)
    # Descriptors of blocks need rows of a multiple of 16 bytes.
    if ns_algorithm == "quintic" or short % 8 or long % 8:
        return ""
    flops = matrices * short**2 * (4 * long + 2 * short)
    if flops < (_LEAST_FLOPS_IN_GRAPHS if in_graph else _LEAST_FLOPS):
        return ""
    is_long = long >= GRAM_LONG_BY_SHORT * short
    if ns_algorithm == "gram" and is_long:
        if in_graph or flops >= _LEAST_FLOPS_OF_GRAM_FORM:
            return "gram"
    return "symmetric"


def form_for(x: Tensor, ns_algorithm: str) -> str:
    """The form that Triton's symmetric products take for ``x``, a matrix or a batch; "" if torch's products are for it."""
    if ns_algorithm == "quintic" or not x.is_cuda or type(x) is not Tensor:
        return ""
    if torch.compiler.is_compiling() or x.requires_grad or not has_kernels(x.device):
        return ""
    if not (x.is_contiguous() or x.mT.is_contiguous()):
        return ""
    matrices = len(x) if x.ndim == 3 else 1
    in_graph = torch.cuda.is_current_stream_capturing()
    return form_of(x.shape[-2:], matrices, ns_algorithm, in_graph)


def orthogonalized(
    x: Tensor,
    coefficients: Sequence[Coefficients],
    eps: float,
    form: str,
    out: Tensor | None = None,
) -> Tensor:
    """Newton-Schulz in a ``form``, with one iteration for each of the ``coefficients``. The result is in ``out``, if given,
    which may be ``x`` itself.
    """
    shared: Sequence[Sequence[Coefficients]] = [[c] for c in coefficients]
    if form == "gram":
        shared = steps_by_gram_matrix(coefficients)
    return _by_factors(x, shared, eps, out)


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton has kernels for the GPU ``device``."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from . import _muon_kernels  # noqa: F401
    except ImportError:
        return False
    return True


def pass_takes(*lists: Sequence[Tensor]) -> bool:
    """Whether the kernels of the passes take lists of tensors on a GPU that has them, each list of one dtype."""
    if torch.cuda.is_current_stream_capturing():
        # A table of addresses comes from the host in each step, which a graph would not repeat.
        return False
    device = lists[0][0].device
    for tensors in lists:
        for tensor in tensors:
            if tensor.dtype != tensors[0].dtype or tensor.device != device:
                return False
            if type(tensor) not in (Tensor, torch.nn.Parameter):
                return False
            if tensor.dtype not in PASS_DTYPES or not tensor.is_contiguous():
                return False
    return True


def _by_factors(
    x: Tensor,
    shared: Sequence[Sequence[Coefficients]],
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Newton-Schulz by symmetric products in float16, whose rounding is an eighth of that of bfloat16, at the same speed.
    Each item of ``shared`` has the coefficients of the steps that share one Gram matrix of an iterate. Each step
    multiplies the iterate by a factor, which is a polynomial of the Gram matrix, and so is the next Gram matrix. The
    iterate, with the long side, is multiplied only by the product of these factors.
    """
    from ._muon_kernels import scaled, symmetric_product

    dtype = x.dtype
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = scaled(x, _ITERATE_SCALE / _norms(x, eps), torch.float16)
    for steps in shared:
        gram = symmetric_product(x, x)
        product: Any = None
        for step, of_step in enumerate(steps, 1):
            factor = _factor(gram, of_step)
            if step < len(steps):
                gram = symmetric_product(symmetric_product(factor, gram), factor)
            product = factor if product is None else symmetric_product(product, factor)
        if steps is shared[-1]:
            product /= _ITERATE_SCALE
        # The iterates keep the layout of the matrix in memory.
        x = torch.matmul(product, x, out=torch.empty_like(x))
    if is_tall:
        x = x.mT
    return x.to(dtype) if out is None else out.copy_(x)


def _norms(x: Tensor, eps: float) -> Tensor:
    """The Frobenius norm of each matrix in float32, of a shape that divides the matrices."""
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    return norms.clamp(min=eps)


def _factor(gram: Tensor, coefficients: Coefficients) -> Tensor:
    """By what one step multiplies an iterate: a polynomial of its Gram matrix, which is ``gram`` without its scale."""
    from ._muon_kernels import symmetric_product

    a, b, c = coefficients
    return symmetric_product(
        gram,
        gram,
        gram,
        beta=b / _GRAM_SCALE,
        alpha=c / _GRAM_SCALE**2,
        diagonal=a,
    )

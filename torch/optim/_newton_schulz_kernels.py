# mypy: allow-untyped-defs
"""When Newton-Schulz takes symmetric products in Triton, and how it uses them."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.torch_version import TorchVersion

from ._newton_schulz_variants import (
    Coefficients,
    GRAM_LONG_BY_SHORT,
    steps_by_gram_matrix,
)


# The dtypes that the passes before and after Newton-Schulz take.
PASS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Iterates of float16 are this many times those of the normalized matrix. Most elements of the Gram matrix of a large
# matrix would otherwise be below the smallest normal number of float16, and lose bits.
_ITERATE_SCALE = 32.0
_GRAM_SCALE = _ITERATE_SCALE**2


# Multiplications and additions of an iteration by torch's products. The host takes longer to launch Triton's products
# than a GPU to compute fewer of them by torch's. The Gram form has more and smaller products. Measured on an H100 (docs/data/h100-gpu.md).
_LEAST_FLOPS = 160e9
_LEAST_FLOPS_OF_GRAM_FORM = 240e9
# The kernels count the elements of a Gram matrix with 32 bits.
_MOST_ROWS = 46_340
# A tile has 128 rows. With few of them, their triangle is hardly smaller than the square.
_LEAST_ROWS = 256


def form_of(shape: Sequence[int], matrices: int, ns_algorithm: str) -> str:
    """How a GPU with the kernels orthogonalizes ``matrices`` of ``shape``: in the form "gram" or "symmetric", by
    symmetric products; or "", by torch's, if these are faster.
    """
    short, long = sorted(shape)
    if ns_algorithm == "quintic" or not _tiles_fit(short, long):
        return ""
    flops = matrices * short**2 * (4 * long + 2 * short)
    if flops < _LEAST_FLOPS:
        return ""
    is_long = long >= GRAM_LONG_BY_SHORT * short
    if ns_algorithm == "gram" and is_long and flops >= _LEAST_FLOPS_OF_GRAM_FORM:
        return "gram"
    return "symmetric"


def form_for(x: Tensor, ns_algorithm: str) -> str:
    """The form that Triton's symmetric products take for ``x``, a matrix or a batch; "" if torch's products are for it."""
    if not _products_take(x):
        return ""
    matrices = len(x) if x.ndim == 3 else 1
    return form_of(x.shape[-2:], matrices, ns_algorithm)


def _tiles_fit(rows: int, columns: int) -> bool:
    """Whether the kernel makes the Gram matrix of so many rows."""
    # Descriptors of blocks need rows of a multiple of 16 bytes.
    return _LEAST_ROWS <= rows <= _MOST_ROWS and rows % 8 == columns % 8 == 0


def _products_take(x: Tensor) -> bool:
    """Whether ``x`` is a tensor for Triton's products, which autograd and compilers do not see, on a GPU that has them."""
    if not x.is_cuda or type(x) is not Tensor or x.requires_grad:
        return False
    if torch.compiler.is_compiling() or not has_kernels(x.device):
        return False
    return x.is_contiguous() or x.mT.is_contiguous()


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
    # Triton launches on the current device.
    with torch.cuda.device_of(x):
        return _by_factors(x, shared, eps, out)


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton can run this project's kernels on the GPU ``device``. Warns if it should and cannot."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        _launch_once(device)
    except ImportError:
        return False
    except torch.OutOfMemoryError:
        # That says nothing about the kernels.
        raise
    except Exception as error:
        warnings.warn(
            f"Triton does not run on {device}, so torch's operations take the place of Muon's kernels: {error}",
            stacklevel=2,
        )
        return False
    return True


def _launch_once(device: torch.device) -> None:
    """Raises ImportError without a suitable Triton, and other errors where Triton lacks a C compiler or a folder for what it
    compiles.
    """
    import triton

    if TorchVersion(triton.__version__) < "3.6":
        raise ImportError("Muon's kernels need Triton 3.6 or later")
    from ._muon_kernels import scaled

    # Fake tensors have no memory.
    with unset_fake_temporarily(), torch.cuda.device(device):
        ones = torch.ones(8, 8, device=device)
        scaled(ones, ones, torch.float16)


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
    Each item of ``shared`` has the coefficients of the steps that share one Gram matrix of an iterate.
    """
    from ._muon_kernels import scaled

    dtype = x.dtype
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = scaled(x, _ITERATE_SCALE / _norms(x, eps), torch.float16)
    for steps in shared:
        factor = _factor_of_steps(x, steps)
        if steps is shared[-1]:
            factor /= _ITERATE_SCALE
        # The iterates keep the layout of the matrix in memory.
        x = torch.matmul(factor, x, out=torch.empty_like(x))
    if is_tall:
        x = x.mT
    return x.to(dtype) if out is None else out.copy_(x)


def _norms(x: Tensor, eps: float) -> Tensor:
    """The Frobenius norm of each matrix in float32, of a shape that divides the matrices."""
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    return norms.clamp(min=eps)


def _factor_of_steps(x: Tensor, steps: Sequence[Coefficients]) -> Tensor:
    """By what ``steps`` multiply the iterate ``x``. Each of them multiplies it by a polynomial of its Gram matrix, and the
    next Gram matrix is a polynomial of this one. Polynomials of one matrix commute, so their products are symmetric, and
    ``x``, with the long side, is multiplied once.
    """
    from ._muon_kernels import symmetric_product

    gram = symmetric_product(x, x)
    product: Any = None
    for step, coefficients in enumerate(steps, 1):
        factor = _factor(gram, coefficients)
        if step < len(steps):
            gram = symmetric_product(symmetric_product(factor, gram), factor)
        product = factor if product is None else symmetric_product(product, factor)
    return product


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

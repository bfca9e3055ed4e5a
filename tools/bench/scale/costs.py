"""Seconds of a rank's own work: Newton-Schulz, and passes over memory. Bytes are counted from the operations that the
optimizer calls, and not from the least that must be read and written.
"""

from functools import cache
from typing import NamedTuple

from torch.optim._newton_schulz_kernels import form_of
from torch.optim._newton_schulz_variants import uses_gram
from tools.bench.models import Shape

from ..engine_view import batch_size
from .hardware import Hardware


class Options(NamedTuple):
    """The options of Muon that a simulated step has."""

    algorithm: str = "quintic"
    fused: bool = False
    prefetch: int = 1
    # Owners of each matrix that is divided.
    owners: int | str = 1


DEFAULT = Options()


class Work(NamedTuple):
    """FLOPs of products by torch, FLOPs that symmetric products by Triton would have without their symmetry, and bytes
    that other operations read and write.
    """

    plain: float
    symmetric: float
    nbytes: float

    def seconds(self, hardware: Hardware) -> float:
        flops = self.plain + hardware.symmetric * self.symmetric
        return flops / hardware.flops + self.nbytes / hardware.memory_bandwidth


class MatrixKind(NamedTuple):
    """Matrices whose Newton-Schulz takes the same time: of one shape, each divided among ``owners``."""

    shape: Shape
    owners: int = 1


@cache
def batch_seconds(
    kind: MatrixKind,
    count: int,
    algorithm: str,
    hardware: Hardware,
    in_graph: bool = False,
) -> tuple[float, ...]:
    """Seconds of one owner for each batch of its ``count`` matrices, or for each of its blocks of matrices. The collectives
    of divided matrices come on top. A CUDA graph takes the kernels for smaller matrices.
    """
    if kind.owners > 1:
        return (block_work(kind, algorithm).seconds(hardware),) * count
    size = batch_size(kind.shape, algorithm)
    full_batches, remaining = divmod(count, size)
    seconds: tuple[float, ...] = ()
    for matrices, batches in ((size, full_batches), (remaining, 1)):
        if matrices and batches:
            form = form_of(kind.shape, matrices, algorithm, in_graph)
            of_matrix = matrix_work(kind.shape, form).seconds(hardware)
            seconds += (matrices * of_matrix,) * batches
    return seconds


def newton_schulz_seconds(
    kind: MatrixKind,
    count: int,
    algorithm: str,
    hardware: Hardware,
    in_graph: bool = False,
) -> float:
    """The sum of :func:`batch_seconds`."""
    return sum(batch_seconds(kind, count, algorithm, hardware, in_graph))


def matrix_work(shape: Shape, form: str) -> Work:
    """Five iterations of a matrix in a form of ``_newton_schulz_kernels``; "" for torch's products."""
    short, long = sorted(shape)
    elements = short * long
    wide = 2 * short * elements
    square = 2 * short**3
    # In bfloat16: the norm reads the matrix, and the division reads and writes it.
    nbytes = 6 * elements
    if not form:
        # In each iteration, the bases of two products are copied.
        nbytes += 5 * 4 * (elements + short**2)
        return Work(5 * (2 * wide + square), 0, nbytes)
    # The result is copied to its place.
    nbytes += 4 * elements
    if form == "gram":
        return Work(2 * wide, 2 * wide + 14 * square, nbytes + 4 * short**2)
    return Work(5 * wide, 5 * (wide + square), nbytes)


def block_work(kind: MatrixKind, algorithm: str) -> Work:
    """Five iterations on one of the blocks of a divided matrix. The kernels make only its Gram matrices."""
    short, long = sorted(kind.shape)
    block = short * long // kind.owners
    wide = 2 * short * block
    square = 2 * short**3 // kind.owners
    nbytes = 6 * block
    grams, other_wides, squares = 5, 5, 5
    if uses_gram(kind.shape, algorithm, is_cpu=False):
        grams, other_wides, squares = 2, 2, 14
    else:
        # The bases of the products with the block are copied.
        nbytes += 5 * 4 * block
    # A sum of Gram matrices in float32 becomes bfloat16.
    nbytes += grams * 6 * short**2
    plain = other_wides * wide + squares * square
    if algorithm != "quintic":
        return Work(plain, grams * wide, nbytes)
    # Products by torch become float32 for the sum.
    return Work(plain + grams * wide, 0, nbytes + grams * 6 * short**2)


class Passes(NamedTuple):
    """Bytes that the operations around Newton-Schulz read and write for an element. Weights, gradients and momentum are in
    float32, updates in bfloat16.
    """

    # Of a gradient into momentum; and of both into what is orthogonalized, on the replica that sends it.
    accumulate: int
    blend: int
    # Of the update into the weight.
    apply: int


# torch's functions: lerp (12); lerp (12) and copy (6); multiplication (8), copy (6) and addition (12).
FOREACH = Passes(accumulate=12, blend=18, apply=26)
# The kernels of ``fused=True``. Together with the first one, the blend has only bfloat16 to write.
FUSED = Passes(accumulate=12, blend=2, apply=10)
# What an owner receives is copied to whole matrices, and results are copied to what it sends.
PACK = 4
# Fused AdamW reads and writes a weight and two moments, and reads the gradient, all in float32.
ADAMW = 7 * 4
# What an optimizer keeps of an element between steps.
MUON_STATE, ADAMW_STATE = 4, 8
# A weight, its gradient and its momentum.
TRAINING_BYTES = 3 * 4


def passes_of(options: Options) -> Passes:
    return FUSED if options.fused else FOREACH


def least_seconds(shape: Shape, options: Options, hardware: Hardware) -> float:
    """What one matrix takes at least, in whatever batch."""
    forms = {"", form_of(shape, 2**20, options.algorithm)}
    return min(matrix_work(shape, form).seconds(hardware) for form in forms)

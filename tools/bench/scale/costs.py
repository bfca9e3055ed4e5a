"""Seconds of a rank's own work: Newton-Schulz, and passes over memory. Bytes are counted from the operations that the
optimizer calls, and not from the least that must be read and written.
"""

from typing import NamedTuple

from torch.optim._newton_schulz_kernels import form_of
from tools.bench.models import Shape

from ..engine_view import batch_size
from .hardware import Hardware


class Options(NamedTuple):
    """The options of Muon that a simulated step has."""

    algorithm: str = "quintic"
    fused: bool = False
    prefetch: int = 1


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


def newton_schulz_seconds(
    shape: Shape, count: int, algorithm: str, hardware: Hardware
) -> float:
    """Seconds of one owner for ``count`` matrices, in the batches of a step."""
    size = batch_size(shape, algorithm)
    full_batches, remaining = divmod(count, size)
    seconds = 0.0
    for matrices, batches in ((size, full_batches), (remaining, 1)):
        if matrices and batches:
            form = form_of(shape, matrices, algorithm)
            of_matrix = matrix_work(shape, form).seconds(hardware)
            seconds += batches * matrices * of_matrix
    return seconds


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
# An owner copies received shards to whole matrices, and results to what it sends.
PACK = 4
# Fused AdamW reads and writes a weight and two moments, and reads the gradient, all in float32.
ADAMW = 7 * 4
# The bytes that an optimizer keeps of an element between steps.
MUON_STATE, ADAMW_STATE = 4, 8


def passes_of(options: Options) -> Passes:
    return FUSED if options.fused else FOREACH

"""Checks of Muon's Triton kernels without a GPU, in a process of their own: ``python -m`` this module.

``interpret`` runs the kernels in Triton's interpreter, which must be chosen before they are imported. ``compile``
compiles them for GPUs. Both print what they found as JSON.

The interpreter cuts off the last bits of what is stored in bfloat16, and keeps arguments that are floats in float64.
Therefore the checks have float16 and float32, and factors that float32 has without rounding. It fuses a multiplication
and an addition only where a kernel says so.
"""

import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any
from unittest import mock


if sys.argv[-1] == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from torch import nn
from torch.optim import (
    _muon,
    _muon_formulas,
    _muon_kernels as kernels,
    _newton_schulz_kernels as forms,
    Muon,
)
from torch.optim._muon_formulas import MuonFormulas
from torch.optim._newton_schulz import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, quintic
from torch.optim.muon import POLAR_EXPRESS


SMALL = kernels.Tiles(side=16, inner=16, stages=1, warps=1, by_descriptor=True)
COEFFICIENTS = [(DEFAULT_A, DEFAULT_B, DEFAULT_C)] * 5
# A kernel must not change elements of this value.
UNTOUCHED = 12345.0
MOMENTA = torch.tensor([0.95, 0.5, 0.3, 0.0]).tolist()
# The factors of a parameter and of its update.
FACTORS = torch.tensor([0.99, -0.023]).tolist()
# The distance of each form of Newton-Schulz from the exact polynomial. Iterates and Gram matrices have the 11 bits of
# float16, and a step multiplies small singular values by 3.4. Of all shapes below and six seeds, the largest distances
# were 0.0020 and 0.0052. The default's products in bfloat16, of 8 bits, had 0.005 to 0.019.
MOST = {"symmetric": 0.003, "gram": 0.007}


def drawn(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def by_columns(x: torch.Tensor) -> torch.Tensor:
    """The same matrices, whose columns follow each other in memory."""
    return x.mT.contiguous().mT


def descriptors_take(x: torch.Tensor) -> bool:
    """Whether the rows of a factor, or its columns, are contiguous and start at multiples of 16 bytes."""
    by_columns = x.stride(-1) != 1
    if by_columns and x.stride(-2) != 1:
        return False
    outer = [*x.stride()[:-2], x.stride(-1) if by_columns else x.stride(-2)]
    return all(stride * x.itemsize % 16 == 0 for stride in outer)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def require(condition: Any, *about: Any) -> None:
    if not condition:
        raise AssertionError(about)


def require_near(
    found: torch.Tensor, expected: torch.Tensor, most: float, *about: Any
) -> None:
    is_distance = distance(found, expected)
    # Not ">", which a NaN passes.
    require(is_distance <= most, f"the distance is {is_distance}, not {most}", *about)


def require_mirrored(found: torch.Tensor, *about: Any) -> None:
    """The tiles below the diagonal have the bits of those above. In a tile on the diagonal, a GPU adds all products in
    one order, and the interpreter does not.
    """
    tile = torch.arange(found.shape[-1]) // SMALL.side
    is_beside = tile[:, None] != tile
    mirrored = torch.where(is_beside, found.mT, found)
    require(torch.equal(found, mirrored), "not symmetric", *about)


def on_gpu(multiprocessors: int, many_loads: int = 1) -> Any:
    """As on a GPU with so many multiprocessors, whose products are cut into parts from ``many_loads`` on."""
    return mock.patch.multiple(
        kernels,
        _multiprocessors=lambda device: multiprocessors,
        _capability=lambda device: 9,
        _MANY_LOADS=many_loads,
        TILES=dict.fromkeys(kernels.TILES, SMALL),
    )


def cut(full: int, parts: int) -> Any:
    """Products whose first ``full`` tiles are made by one program each, and others by ``parts`` programs."""
    return mock.patch.multiple(
        kernels,
        _multiprocessors=lambda device: 1,
        _whole_tiles_and_parts=lambda tiles, loads, multiprocessors: (full, parts),
    )


# Shapes of factors, and how the tiles are cut. The tiles on and above the diagonal of a matrix of three rows of tiles
# are six.
CUTS: list[tuple[tuple[int, ...], int, int]] = [
    ((40, 24), 6, 1),
    # All tiles, or the last ones.
    ((40, 24), 0, 2),
    ((40, 24), 4, 2),
    # Rows, columns and loads that tiles do not divide.
    ((37, 24), 6, 1),
    ((40, 21), 5, 2),
    ((33, 17), 6, 1),
    ((33, 17), 0, 2),
    ((1, 8), 1, 1),
    # Parts with four, four and two loads. Then parts without a load.
    ((16, 160), 0, 3),
    ((16, 40), 0, 4),
    ((16, 8), 0, 4),
    # 45 tiles.
    ((136, 64), 42, 2),
    # Batches. The cut begins in the last matrix, or in the first one.
    ((2, 56, 24), 20, 1),
    ((2, 56, 24), 17, 2),
    ((3, 24, 40), 2, 3),
    ((3, 16, 16), 3, 1),
]


@triton.jit
def upper_tiles_kernel(rows, columns, count, TILES: tl.constexpr):
    """The row and the column of each of ``count`` tiles."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    row, column = kernels._upper_tile(tile)
    tl.store(rows + tile, row, mask=tile < count)
    tl.store(columns + tile, column, mask=tile < count)


def check_tiles_above_the_diagonal() -> None:
    """Of a matrix of a thousand rows of tiles, which has 128,000 rows."""
    expected = torch.triu_indices(1000, 1000).flip(0)
    # Column by column.
    columns, rows = expected[:, (expected[0] * 1000 + expected[1]).argsort()].int()
    found_rows, found_columns = torch.empty_like(rows), torch.empty_like(rows)
    kernel: Any = upper_tiles_kernel
    kernel[(triton.cdiv(len(rows), 4096),)](
        found_rows, found_columns, len(rows), TILES=4096
    )
    require(torch.equal(found_rows, rows), "rows")
    require(torch.equal(found_columns, columns), "columns")


def check_products_of_a_matrix_with_itself() -> None:
    for shape, full, parts in CUTS:
        x = drawn(*shape)
        expected = x.double() @ x.double().mT
        layouts = x, by_columns(x)
        for factor, by_descriptor in itertools.product(layouts, (True, False)):
            if by_descriptor and not descriptors_take(factor):
                continue
            about = shape, full, parts, by_descriptor, factor.stride()
            tiles = SMALL._replace(by_descriptor=by_descriptor)
            with cut(full, parts):
                found = kernels.symmetric_product(factor, factor, tiles=tiles)
            # The rounding of the result to float16.
            require_near(found, expected, 2**-11, *about)
            require_mirrored(found, *about)


def in_order(programs: Sequence[int]) -> Any:
    """The interpreter runs the programs of a kernel in this order."""
    from triton.runtime.interpreter import interpreter_builder

    begin = interpreter_builder.set_grid_idx
    return mock.patch.object(
        interpreter_builder, "set_grid_idx", lambda x, y, z: begin(programs[x], y, z)
    )


def check_parts_are_added_in_one_order() -> None:
    """Whichever of the programs comes last. So a product has the same bits each time."""
    # The interpreter takes float32, whose last bits tell the order.
    x = drawn(40, 160, dtype=torch.float32)

    def product() -> torch.Tensor:
        with cut(4, 4):
            return kernels.symmetric_product(x, x, tiles=SMALL)

    expected = product()
    # Four programs of one tile each, and four for each of two more tiles.
    for programs in (
        [11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0],
        [8, 4, 0, 9, 5, 1, 10, 7, 6, 2, 11, 3],
    ):
        with in_order(programs):
            require(torch.equal(product(), expected), programs)


def check_products_with_a_base() -> None:
    for shape, full, parts in (
        ((40, 40), 6, 1),
        ((37, 37), 2, 2),
        ((2, 24, 24), 6, 1),
        ((2, 24, 24), 1, 2),
    ):
        x = drawn(*shape) / 8
        symmetric = x + x.mT
        # Its rows are apart in memory, and so are its matrices.
        base = torch.full((*shape[:-1], shape[-1] + 24), UNTOUCHED).half()
        base = base[..., : shape[-1]]
        base.copy_(symmetric.flip(-2, -1))
        exact = symmetric.double()
        expected = -1.5 * base.double() + 0.25 * exact @ exact
        expected += 3 * torch.eye(shape[-1], dtype=torch.float64)
        for by_descriptor in (True, False):
            if by_descriptor and not descriptors_take(symmetric):
                continue
            about = shape, full, parts, by_descriptor
            with cut(full, parts):
                found = kernels.symmetric_product(
                    symmetric,
                    symmetric,
                    base,
                    beta=-1.5,
                    alpha=0.25,
                    diagonal=3,
                    tiles=SMALL._replace(by_descriptor=by_descriptor),
                )
            # Sums are in float32, and the result is rounded to float16.
            require(found.dtype == torch.float16, *about)
            require_near(found, expected, 2**-11, *about)
            require_mirrored(found, *about)


def check_waves() -> None:
    """Programs for full waves, and parts of the tiles that remain."""
    for expected, tiles, loads, multiprocessors in (
        ((528, 1), 528, 64, 132),
        ((132, 4), 136, 128, 132),
        ((264, 4), 272, 128, 132),
        ((0, 3), 36, 64, 132),
        ((0, 2), 66, 64, 132),
        # Short sums are not cut.
        ((136, 1), 136, 32, 132),
        ((136, 1), 136, 63, 132),
        # More than half of a wave remains.
        ((67, 1), 67, 64, 132),
        ((200, 1), 200, 128, 132),
        ((1, 1), 1, 64, 1),
    ):
        found = kernels._whole_tiles_and_parts(tiles, loads, multiprocessors)
        require(found == expected, expected, found)


def check_tiles_by_capability_and_size() -> None:
    device = torch.device("cpu")
    for expected, capability, nbytes in (
        ((8, False), 8, 1000),
        ((8, True), 8, 41 * 1024**2),
        ((9, False), 9, 40 * 1024**2),
        ((9, True), 9, 40 * 1024**2 + 1),
        # Newer ones have those of 9.
        ((9, False), 10, 1000),
        ((9, True), 12, 41 * 1024**2),
    ):
        with mock.patch.object(kernels, "_capability", lambda device: capability):
            found = kernels._tiles_for(device, nbytes)
        require(found == kernels.TILES[expected], capability, nbytes)


def check_scales() -> None:
    # More elements than a program takes.
    for shape in ((30, 7), (96, 80), (2, 30, 7), (3, 96, 80)):
        matrices = shape[0] if len(shape) == 3 else 1
        factors = torch.tensor([0.3, -2.0, 3.0])[:matrices].view(-1, 1, 1)
        if len(shape) == 2:
            factors = factors[0]
        for x in (drawn(*shape), drawn(*shape, dtype=torch.float32)):
            for each, dtype in itertools.product(
                (x, x.mT), (torch.float16, torch.float32)
            ):
                found = kernels.scaled(each, factors, dtype)
                # The product of two numbers is rounded once.
                expected = (each.double() * factors.double()).to(dtype)
                about = each.shape, each.dtype, dtype
                require(found.dtype == dtype, *about)
                require(torch.equal(found, expected), *about)
                require(found.stride() == each.stride(), *about)


def lerp_of_gpu(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
    """The formula of torch.lerp in float32."""
    start, end = start.float(), end.float()
    difference = end - start
    factor = torch.tensor(weight)
    if weight >= 0.5:
        start, difference, factor = end, -difference, 1 - factor
    product = difference.double() * factor.double()
    if not fuses():
        product = product.float()
    # With a product that is exact, in float64, the sum is rounded once.
    return (start.double() + product.double()).float()


def in_larger_memory(elements: torch.Tensor, aligned: bool) -> torch.Tensor:
    """A copy of a vector in the middle of a larger one, whose other elements are known."""
    whole = torch.full((len(elements) + 128,), UNTOUCHED, dtype=elements.dtype)
    first = 64 if aligned else 63
    whole[first : first + len(elements)] = elements
    return whole[first : first + len(elements)]


def require_nothing_else_changed(vector: torch.Tensor, *about: Any) -> None:
    """The memory before and behind a vector of :func:`in_larger_memory` must keep its values."""
    whole = vector._base
    require(whole is not None, *about)
    if whole is not None:
        others = (whole == whole.new_tensor(UNTOUCHED)).sum().item()
        require(others == len(whole) - len(vector), "elements beyond the end", *about)


# Smaller than a chunk, and empty; a chunk, and one more element; several chunks.
ODD = (100, 7, 511, 512, 513, 1100, 0, 1, 600, 0)
ALIGNED = (16, 512, 1024, 48, 1040)


def small_chunks() -> Any:
    return mock.patch.multiple(kernels, _CHUNK=512, _AT_ONCE=128)


def check_gradients_come_into_momentum() -> None:
    """The blend takes the momentum after it was rounded to its dtype."""
    half, single = torch.float16, torch.float32
    for momentum, nesterov, sizes in itertools.product(
        MOMENTA, (True, False), (ODD, ALIGNED, (700,))
    ):
        with small_chunks():
            compare_pass_before(momentum, nesterov, sizes)
    for nesterov, of_gradients in itertools.product((True, False), (half, single)):
        with small_chunks():
            compare_pass_before(MOMENTA[0], nesterov, ODD, half, of_gradients)
            compare_pass_before(MOMENTA[0], nesterov, ODD, has_gradients=False)


def check_chunks_of_their_real_size() -> None:
    chunk = kernels._CHUNK
    for sizes in ((chunk + 5, 3, 2 * chunk + 1), (chunk, 2 * chunk + 16)):
        compare_pass_before(MOMENTA[0], True, sizes)
        compare_pass_after(*FACTORS, FACTORS, sizes)


def is_aligned(sizes: Sequence[int]) -> bool:
    return all(size % 16 == 0 for size in sizes)


def compare_pass_before(
    momentum: float,
    nesterov: bool,
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
    of_gradients: torch.dtype = torch.float32,
    has_gradients: bool = True,
) -> None:
    """Compares the pass with the formulas. The second, the fifth and so on of the gradients are None."""
    aligned = is_aligned(sizes)
    momenta, targets = [], []
    gradients: list[torch.Tensor | None] = []
    for number, size in enumerate(sizes):
        momenta.append(in_larger_memory(drawn(size, dtype=dtype), aligned))
        gradient = None
        if has_gradients and number % 3 != 1:
            elements = drawn(size, dtype=of_gradients)
            gradient = in_larger_memory(elements, aligned)
        gradients.append(gradient)
        targets.append(in_larger_memory(torch.zeros(size).half(), aligned))
    own = [each.clone() for each in momenta]
    versions = [each._version for each in (*momenta, *targets)]
    kernels.accumulate_and_blend(
        momenta, gradients, targets, momentum, nesterov=nesterov
    )
    for number, gradient in enumerate(gradients):
        about = number, momentum, nesterov, sizes, dtype, of_gradients
        blended = own[number]
        if gradient is not None:
            taken_in = lerp_of_gpu(own[number], gradient, 1 - momentum)
            own[number] = blended = taken_in.to(dtype)
            if nesterov:
                blended = lerp_of_gpu(gradient, blended, momentum)
        require(torch.equal(momenta[number], own[number]), "momentum", *about)
        require(torch.equal(targets[number], blended.half()), "target", *about)
        require_nothing_else_changed(momenta[number], "momentum", *about)
        require_nothing_else_changed(targets[number], "target", *about)
    later = [each._version for each in (*momenta, *targets)]
    for number, (before, after) in enumerate(zip(versions, later, strict=True)):
        is_written = number >= len(momenta) or has_gradients
        require((after > before) == is_written, "version", number)


def check_lerp_is_torchs() -> None:
    """But for the rounding of what a CPU does not fuse: :func:`lerp_of_gpu` has the right formula."""
    start, end = (drawn(1000, dtype=torch.float32) for _ in range(2))
    for momentum in MOMENTA:
        for weight in (momentum, 1 - momentum):
            found = lerp_of_gpu(start, end, weight)
            expected = torch.lerp(start, end, weight)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@triton.jit
def fma_kernel(x, out):
    """The square of an element, less the next one."""
    tl.store(out, tl.fma(tl.load(x), tl.load(x), -tl.load(x + 1)))


def fuses() -> bool:
    """Whether ``tl.fma`` rounds once, as on a GPU. The interpreters of Triton up to 3.7 round twice."""
    # The square is 1 + 2**-11 + 2**-24, and float32 has no room for the last of these.
    x = torch.tensor([1 + 2**-12, 1 + 2**-11])
    out = torch.zeros(1)
    kernel: Any = fma_kernel
    kernel[(1,)](x, out)
    return out.item() == 2**-24


def check_tensors_of_other_shapes() -> None:
    """A kernel would write beyond the end of the smaller one."""
    large, small = torch.zeros(8, 6), torch.zeros(4, 6)
    calls = (
        lambda: kernels.apply_updates([large], [small], *FACTORS),
        lambda: kernels.accumulate_and_blend(
            [large], [small], [large], 0.9, nesterov=True
        ),
        lambda: kernels.accumulate_and_blend(
            [large], [None], [small], 0.9, nesterov=True
        ),
    )
    for call in calls:
        message = ""
        try:
            call()
        except ValueError as error:
            message = str(error)
        require("(8, 6) but got (4, 6)" in message, message)


def check_updates() -> None:
    decay, alpha = FACTORS
    for values in (
        (decay, alpha),
        (torch.tensor(decay), torch.tensor(alpha)),
        (torch.tensor([decay]), torch.tensor([alpha])),
        (torch.tensor(decay).double(), torch.tensor(alpha).double()),
        # Without weight decay, that is a number.
        (decay, torch.tensor(alpha)),
    ):
        for sizes in (ODD, ALIGNED, (700,)):
            with small_chunks():
                compare_pass_after(decay, alpha, values, sizes)


def check_updates_of_other_dtypes() -> None:
    dtypes = torch.float16, torch.float32
    for of_params, of_updates in itertools.product(dtypes, repeat=2):
        for sizes in (ODD, ALIGNED):
            with small_chunks():
                compare_pass_after(*FACTORS, FACTORS, sizes, of_params, of_updates)


def compare_pass_after(
    decay: float,
    alpha: float,
    values: Any,
    sizes: Sequence[int],
    of_params: torch.dtype = torch.float32,
    of_updates: torch.dtype = torch.float16,
) -> None:
    """``values`` are ``decay`` and ``alpha`` as the pass takes them."""
    params, updates = [], []
    for size in sizes:
        aligned = is_aligned(sizes)
        params.append(in_larger_memory(drawn(size, dtype=of_params), aligned))
        updates.append(in_larger_memory(drawn(size, dtype=of_updates), aligned))
    own = [param.clone() for param in params]
    fuses_once = fuses()
    versions = [param._version for param in params]
    kernels.apply_updates(params, updates, *values)
    for number, (param, update) in enumerate(zip(params, updates, strict=True)):
        about = number, values, sizes, of_params, of_updates
        # The decayed parameter is rounded to float32, and so is the sum, which has more bits in float64.
        decayed = own[number].float() * decay
        product = alpha * update.double()
        if not fuses_once:
            product = product.float()
        expected = (decayed.double() + product.double()).float().to(of_params)
        require(torch.equal(param, expected), *about)
        require_nothing_else_changed(param, *about)
        require(param._version > versions[number], "version", *about)


def exact_polynomial(x: torch.Tensor, coefficients: Any = COEFFICIENTS) -> torch.Tensor:
    if x.shape[-2] > x.shape[-1]:
        return exact_polynomial(x.mT, coefficients).mT
    x = x.double()
    x = x / torch.linalg.matrix_norm(x)[..., None, None].clamp(min=EPS)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def check_orthogonalization() -> None:
    small = drawn(24, 40).double()
    for name, values in {
        "wide": drawn(48, 96),
        "tall": drawn(96, 48),
        "square": drawn(40, 40),
        "columns first in memory": by_columns(drawn(24, 40)),
        "batch": drawn(3, 24, 40),
        "tall batch": drawn(2, 40, 24),
        # Each matrix of a batch has a norm of its own.
        "batch of sizes": torch.stack([small * 1e-3, small.flip(1) * 1e3]),
        "huge": small * 1e15,
        "tiny": small * 1e-6,
    }.items():
        for form in ("symmetric", "gram"):
            x = values.float()
            expected = exact_polynomial(x)
            with on_gpu(4, many_loads=3):
                found = forms.orthogonalized(x, COEFFICIENTS, EPS, form)
            require_near(found, expected, MOST[form], name, form)
            require(found.stride() == x.stride(), name, form)


def check_other_coefficients_for_each_step() -> None:
    """The Gram form shares Gram matrices otherwise, because the first steps let singular values grow more."""
    coefficients = POLAR_EXPRESS["ns_coefficients"]
    for shape in ((48, 96), (40, 24)):
        x = drawn(*shape).float()
        expected = exact_polynomial(x, coefficients)
        for form in ("symmetric", "gram"):
            with on_gpu(4):
                found = forms.orthogonalized(x, coefficients, EPS, form)
            require_near(found, expected, MOST[form], shape, form)


def check_nearly_low_rank_matrices() -> None:
    """Their smallest singular values get lost by the rounding, in float16 less than in bfloat16: the default's distance
    was 8 times as large or more.
    """
    strong = drawn(48, 4).double() @ drawn(4, 96).double()
    x = (strong + 1e-3 * drawn(48, 96).double()).bfloat16()
    expected = exact_polynomial(x)
    of_default = distance(quintic(x, COEFFICIENTS, EPS), expected)
    for form in ("symmetric", "gram"):
        with on_gpu(4, many_loads=3):
            found = forms.orthogonalized(x.float(), COEFFICIENTS, EPS, form)
        require_near(found, expected, of_default / 4, form)


def check_where_the_result_goes() -> None:
    for shape in ((24, 40), (40, 24), (2, 40, 24)):
        x = drawn(*shape).bfloat16()
        before, other, same = x.clone(), torch.empty_like(x), x.clone()
        turned = by_columns(x.clone())
        with on_gpu(4):
            alone = forms.orthogonalized(x, COEFFICIENTS, EPS, "gram")
            in_other = forms.orthogonalized(x, COEFFICIENTS, EPS, "gram", other)
            in_same = forms.orthogonalized(same, COEFFICIENTS, EPS, "gram", same)
            in_turned = forms.orthogonalized(turned, COEFFICIENTS, EPS, "gram", turned)
        expected = exact_polynomial(x)
        # The result is rounded to the 8 bits of bfloat16.
        require_near(alone, expected, MOST["gram"] + 2**-8, shape)
        require(alone.dtype == x.dtype and alone.stride() == x.stride(), shape)
        require(torch.equal(x, before), "the input changed", shape)
        require(in_other is other and torch.equal(other, alone), shape)
        require(in_same is same and torch.equal(same, alone), shape)
        # The interpreter adds the products of columns in another order.
        require_near(turned, expected, MOST["gram"] + 2**-8, shape)
        require(in_turned is turned, shape)
        require(turned.stride() == by_columns(x).stride(), shape)


def check_zeros() -> None:
    """And where ``eps`` divides, because it is larger than the norm."""
    zeros = torch.zeros(3, 24, 40)
    x = drawn(24, 40).float()
    batch = torch.stack([x, torch.zeros(24, 40)])
    for form in ("symmetric", "gram"):
        with on_gpu(4):
            found = forms.orthogonalized(zeros, COEFFICIENTS, EPS, form)
            mixed = forms.orthogonalized(batch, COEFFICIENTS, EPS, form)
            small = forms.orthogonalized(x, [COEFFICIENTS[0]], 1e3, form)
        require(torch.equal(found, zeros), form)
        require(torch.equal(mixed[1], zeros[1]), form)
        require_near(mixed[0], exact_polynomial(x), MOST[form], form)
        # Where all singular values are small, the polynomial is nearly its first term.
        require_near(small, DEFAULT_A * x.double() / 1e3, 0.01, form)


def check_steps_of_muon() -> None:
    """Steps with the kernels move parameters as steps without them."""

    def trained(fused: bool, **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        shapes = (8, 16), (16, 8), (5, 7)
        params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        muon = Muon(params, fused=fused, **options)
        for step in range(3):
            for param in params:
                param.grad = torch.randn_like(param)
            if step == 1:
                params[1].grad = None
            muon.step()
        momenta = [muon.state[param]["momentum_buffer"] for param in params]
        return [*(param.detach() for param in params), *momenta]

    patches = (
        mock.patch.object(_muon, "NS_DTYPE", torch.float16),
        mock.patch.object(_muon_formulas, "NS_DTYPE", torch.float16),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", bool),
        mock.patch.object(
            MuonFormulas, "has_kernels", lambda formulas, device: formulas.fused
        ),
    )
    for options in (
        {"lr": 0.1, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.3, "nesterov": False},
        {"lr": torch.tensor(0.1), "weight_decay": 0.1},
    ):
        for patch in patches:
            patch.start()
        try:
            with (
                mock.patch.object(
                    kernels, "apply_updates", wraps=kernels.apply_updates
                ) as after,
                mock.patch.object(
                    kernels, "accumulate_and_blend", wraps=kernels.accumulate_and_blend
                ) as before,
            ):
                expected = trained(False, **options)
                require(not before.called and not after.called, options)
                found = trained(True, **options)
                require(before.called and after.called, options)
        finally:
            for patch in patches:
                patch.stop()
        for one, other in zip(found, expected, strict=True):
            # Gradients and momenta differ in the last bit of float32, and sometimes in that of what is rounded to
            # float16. Each step moves a parameter by about 0.1 of its norm.
            require_near(one, other.double(), 1e-3, options)


def interpret() -> dict[str, str]:
    """The traceback of each check that failed, and "" for those that passed."""
    found: dict[str, str] = {}
    for name, check in globals().copy().items():
        if name.startswith("check_"):
            # Wrong addresses end the process, and only this output is left.
            print(name, file=sys.stderr, flush=True)
            torch.manual_seed(0)
            found[name] = ""
            try:
                check()
            except Exception:
                found[name] = traceback.format_exc()
    return found


def compiled() -> dict[str, dict[str, Any]]:
    """The shared memory and the instructions of each kernel on each GPU, by the kernel's name and constants."""
    found: dict[str, dict[str, Any]] = {}
    kinds = [(10 * major, tiles) for (major, _), tiles in kernels.TILES.items()]
    # GPUs with less shared memory, and newer ones.
    for capability in (86, 89, 100, 120):
        major = min(capability // 10, 9)
        kinds.append((capability, kernels.TILES[major, False]))
    for capability, tiles in kinds:
        for has_base, has_parts, in_columns in (
            # A Gram matrix, its polynomial, and a short product's polynomial.
            (False, False, False),
            (False, False, True),
            (False, True, False),
            (False, True, True),
            (True, False, False),
            (True, True, False),
        ):
            about = f"base={has_base} parts={has_parts} by columns={in_columns}"
            name = f"product for {capability}, {tiles}, {about}"
            if name not in found:
                found[name] = _product(
                    capability, tiles, has_base, has_parts, in_columns
                )
    for capability in (90, 80):
        found[f"scaled for {capability}"] = _usage(
            kernels.scale_kernel,
            capability,
            {"x": "*bf16", "factors": "*fp32", "out": "*fp16", "numel": "i32"},
            {"TILE": 4096},
        )
        found[f"pass before for {capability}"] = _usage(
            kernels.accumulate_and_blend_kernel,
            capability,
            {"jobs": "*i64", "count": "i32"}
            | dict.fromkeys(("gradient_weight", "momentum_weight"), "fp32"),
            {
                "NESTEROV": True,
                "GRADIENT_WEIGHT_IS_BELOW_HALF": True,
                "MOMENTUM_WEIGHT_IS_BELOW_HALF": False,
                "MOMENTUM": tl.float32,
                "GRADIENT": tl.float32,
                "TARGET": tl.bfloat16,
                "IS_ALIGNED": True,
                "CHUNK": kernels._CHUNK,
                "AT_ONCE": kernels._AT_ONCE,
            },
            num_warps=kernels._WARPS,
        )
        found[f"pass after for {capability}"] = _usage(
            kernels.apply_updates_kernel,
            capability,
            {"jobs": "*i64", "count": "i32", "decay": "fp32", "alpha": "fp32"},
            {
                "ON_DEVICE": False,
                "PARAM": tl.float32,
                "UPDATE": tl.bfloat16,
                "IS_ALIGNED": True,
                "CHUNK": kernels._CHUNK,
                "AT_ONCE": kernels._AT_ONCE,
            },
            num_warps=kernels._WARPS,
        )
    return found


def _product(
    capability: int,
    tiles: kernels.Tiles,
    has_base: bool,
    has_parts: bool,
    in_columns: bool,
) -> dict[str, Any]:
    block = [1, tiles.side, tiles.inner]
    if in_columns:
        block = [1, tiles.inner, tiles.side]
    factor = f"tensordesc<fp16{block}>" if tiles.by_descriptor else "*fp16"
    types = dict.fromkeys(kernels.symmetric_product_kernel.arg_names, "i32")
    types |= {"left": factor, "right": factor, "base": "*fp16", "out": "*fp16"}
    types |= {"partial": "*fp32", "arrivals": "*i32"}
    types |= dict.fromkeys(("alpha", "beta", "diagonal"), "fp32")
    along = "row" if in_columns else "column"
    constants = {
        "HAS_BASE": has_base,
        "HAS_PARTS": has_parts,
        "BY_DESCRIPTOR": tiles.by_descriptor,
        "LEFT_BY_COLUMNS": in_columns,
        "RIGHT_BY_COLUMNS": in_columns,
        "SIDE": tiles.side,
        "INNER": tiles.inner,
        # Triton makes a constant of an argument that is 1.
        f"left_{along}_stride": 1,
        f"right_{along}_stride": 1,
    }
    return _usage(
        kernels.symmetric_product_kernel,
        capability,
        types,
        constants,
        num_stages=tiles.stages,
        num_warps=tiles.warps,
    )


def _usage(
    kernel: Any,
    capability: int,
    types: dict[str, str],
    constants: dict[str, Any],
    **options: int,
) -> dict[str, Any]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, aligned = {}, {}
    for number, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types[name]
        # Triton knows of pointers, sizes and strides that are multiples of 16.
        is_size = name in ("side", "inner", "numel")
        is_stride = name.endswith("_stride")
        is_constant = name in constants
        if signature[name].startswith("*") or (
            (is_size or is_stride) and not is_constant
        ):
            aligned[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    result = triton.compile(source, target=target, options=options)
    ptx = result.asm["ptx"]
    return {
        "capability": capability,
        "shared": result.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "tcgen05": ptx.count("tcgen05.mma"),
        "bulk copies": ptx.count("cp.async.bulk"),
        "loads of four": len(re.findall(r"ld\.global\S*\.v4", ptx)),
        "stores of four": len(re.findall(r"st\.global\S*\.v4", ptx)),
    }


if __name__ == "__main__":
    outcome: Any = interpret() if sys.argv[-1] == "interpret" else compiled()
    print(json.dumps(outcome))

"""Checks of Muon's Triton kernels without a GPU.

``test/optim/test_muon_kernels.py`` runs each class in a process of its own, because Triton reads TRITON_INTERPRET
at import: ``TestInterpreted`` runs the kernels in Triton's interpreter, and ``TestCompiled`` compiles them for GPUs.

The interpreter cuts off the last bits of what is stored in bfloat16, and keeps arguments that are floats in float64.
Therefore the checks have float16 and float32, and factors that float32 has without rounding.
"""

import itertools
import unittest
from unittest import mock

import torch
import triton
import triton.language as tl
from torch.optim import (
    _muon,
    _muon_formulas,
    _muon_kernels as kernels,
    _newton_schulz_kernels as forms,
    Muon,
)
from torch.optim._muon_formulas import MuonFormulas
from torch.optim._newton_schulz import EPS, quintic
from torch.optim.muon import POLAR_EXPRESS
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed._muon.common_config import (
    COEFFICIENTS,
    MuonTestCase,
)


SMALL = kernels.Tiles(side=16, inner=16, stages=1, warps=1, by_descriptor=True)
HALF, SINGLE = torch.float16, torch.float32
# The products with these, or with what they lack to one, are exact. So bits do not depend on whether a multiplication
# and an addition are fused. The two formulas of torch.lerp differ.
MOMENTA = 0.75, 0.5, 0.25, 0.0
# The factors of a parameter and of its update. The product with the second one is exact.
FACTORS = 0.8125, -0.25
# The distance of each form of Newton-Schulz from the exact polynomial. Iterates and Gram matrices have the 11 bits of
# float16, and a step multiplies small singular values by 3.4. The largest distances of all shapes below and six seeds
# were 0.0020 and 0.0052. The default's products in bfloat16, of 8 bits, had 0.005 to 0.019.
MOST = {"symmetric": 0.003, "gram": 0.007}
# Shapes of factors; how many of the tiles on and above the diagonal are made by one program each, and by how many
# programs each other tile is made.
CUTS = [
    ((40, 24), 6, 1),
    # All tiles, or the last ones.
    ((40, 24), 0, 2),
    ((40, 24), 4, 2),
    # Rows, columns and loads that tiles do not divide.
    ((37, 24), 6, 1),
    ((40, 21), 5, 2),
    ((33, 17), 0, 2),
    ((1, 8), 1, 1),
    # Parts with four, four and two loads. The last part of the next one has no load.
    ((16, 160), 0, 3),
    ((16, 40), 0, 4),
    # Batches. The cut begins in the last matrix, or in the first one.
    ((2, 56, 24), 17, 2),
    ((3, 24, 40), 2, 3),
]
# Smaller than a chunk of the passes, and empty; a chunk, and one more element; several chunks.
SIZES = 100, 7, 511, 512, 513, 1100, 0, 1, 600, 0
CHUNK = kernels._CHUNK


def drawn(*shape, dtype=HALF):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def by_columns(x):
    """The same matrices, whose columns follow each other in memory."""
    return x.mT.contiguous().mT


def descriptors_take(x):
    """Whether the rows of a factor, or its columns, start at multiples of 16 bytes."""
    strides = {*x.stride()} - {1}
    return all(stride * x.itemsize % 16 == 0 for stride in strides)


def on_gpu(many_loads=1):
    """As on a GPU with four multiprocessors, whose products are cut into parts from ``many_loads`` on."""
    return mock.patch.multiple(
        kernels,
        _multiprocessors=lambda device: 4,
        _capability=lambda device: 9,
        _MANY_LOADS=many_loads,
        TILES=dict.fromkeys(kernels.TILES, SMALL),
    )


def cut(whole, parts):
    return mock.patch.multiple(
        kernels,
        _multiprocessors=lambda device: 1,
        _whole_tiles_and_parts=lambda *_: (whole, parts),
    )


def in_order(programs):
    """The interpreter runs the programs of a kernel in this order."""
    from triton.runtime.interpreter import interpreter_builder

    begin = interpreter_builder.set_grid_idx
    return mock.patch.object(
        interpreter_builder, "set_grid_idx", lambda x, y, z: begin(programs[x], y, z)
    )


def memory_for(sizes, dtype):
    return drawn(sum(sizes) + 64 * len(sizes), dtype=dtype)


def vectors_in(memory, sizes):
    """Vectors with gaps between them, which a kernel must not change."""
    vectors, start = [], 0
    for size in sizes:
        start += 64
        vectors.append(memory[start : start + size])
        start += size
    return vectors


@triton.jit
def upper_tiles_kernel(rows, columns, count, TILES: tl.constexpr):
    """The row and the column of each of ``count`` tiles."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    row, column = kernels._upper_tile(tile)
    tl.store(rows + tile, row, mask=tile < count)
    tl.store(columns + tile, column, mask=tile < count)


class KernelsTestCase(MuonTestCase):
    def assertNear(self, found, expected, most):
        distance = (found.double() - expected).norm() / expected.norm()
        # NaN fails, too.
        self.assertLessEqual(distance.item(), most)


class TestProducts(KernelsTestCase):
    def test_tiles_above_the_diagonal(self):
        """A matrix of a thousand rows of tiles has 128,000 rows. Tiles are counted column by column."""
        columns, rows = torch.tril_indices(1000, 1000).int()
        found_rows, found_columns = torch.empty_like(rows), torch.empty_like(rows)
        programs = triton.cdiv(len(rows), 4096)
        upper_tiles_kernel[(programs,)](
            found_rows, found_columns, len(rows), TILES=4096
        )
        self.assert_same_bits([found_rows, found_columns], [rows, columns])

    def test_products(self):
        # Each two of the three are together.
        kinds = (
            (False, True, False),
            (True, True, True),
            (False, False, True),
            (True, False, False),
        )
        for case, kind in itertools.product(CUTS, kinds):
            (shape, whole, parts), (in_columns, by_descriptor, has_base) = case, kind
            factor = drawn(*shape)
            factor = by_columns(factor) if in_columns else factor
            if by_descriptor and not descriptors_take(factor):
                continue
            side = shape[-2]
            expected, options = factor.double() @ factor.double().mT, {}
            if has_base:
                # Its rows are apart in memory, and so are its matrices.
                base = drawn(*shape[:-1], side + 24)[..., :side]
                base.copy_(base + base.mT)
                options = {"beta": -1.5, "alpha": 0.25, "diagonal": 3}
                expected = -1.5 * base.double() + 0.25 * expected
                expected += 3 * torch.eye(side)
            tiles = SMALL._replace(by_descriptor=by_descriptor)
            with self.subTest(case=case, kind=kind), cut(whole, parts):
                found = kernels.symmetric_product(
                    factor, factor, base if has_base else None, tiles=tiles, **options
                )
                # Sums are in float32, and the result is rounded to float16.
                self.assertEqual(found.dtype, HALF)
                self.assertNear(found, expected, 2**-11)

    def test_parts_are_added_in_one_order(self):
        """Whichever of the programs comes last. So a product has the same bits each time."""
        # The interpreter takes float32, whose last bits tell the order.
        x = drawn(40, 160, dtype=SINGLE)
        products = []
        # Four programs of one tile each, and four for each of two more tiles.
        for programs in (
            range(12),
            range(11, -1, -1),
            (8, 4, 0, 9, 5, 1, 10, 7, 6, 2, 11, 3),
        ):
            with in_order(programs), cut(4, 4):
                products.append(kernels.symmetric_product(x, x, tiles=SMALL))
        self.assert_same_bits(products, products[:1] * 3)

    def test_scales(self):
        # More elements than a program takes.
        for shape, dtype, of_result in itertools.product(
            ((30, 7), (96, 80), (3, 96, 80)), (HALF, SINGLE), (HALF, SINGLE)
        ):
            factors = torch.tensor([0.3, -2.0, 3.0])[: shape[0], None, None]
            factors = factors if len(shape) == 3 else factors[0]
            x = drawn(*shape, dtype=dtype)
            for each in (x, x.mT):
                found = kernels.scaled(each, factors, of_result)
                # The product of two numbers is rounded once.
                expected = (each.double() * factors.double()).to(of_result)
                self.assert_same_bits([found], [expected])


class TestPasses(KernelsTestCase):
    """The passes of ``fused``, with chunks of their real size and with small ones."""

    def setUp(self):
        super().setUp()
        small = mock.patch.multiple(kernels, _CHUNK=512, _AT_ONCE=128)
        small.start()
        self.addCleanup(mock.patch.stopall)

    def compare_pass_before(
        self, momentum, nesterov, sizes=SIZES, dtypes=(SINGLE,) * 2, has_gradients=True
    ):
        """Compares the pass with the formulas. The second, the fifth and so on of the gradients are None."""
        memories = [memory_for(sizes, dtype) for dtype in (*dtypes, HALF)]
        expected = [memory.clone() for memory in memories]
        momenta, gradients, targets = (vectors_in(m, sizes) for m in memories)
        for number in range(len(sizes)):
            if not has_gradients or number % 3 == 1:
                gradients[number] = None
        versions = [memory._version for memory in memories]
        kernels.accumulate_and_blend(
            momenta, gradients, targets, momentum, nesterov=nesterov
        )
        own, _, blends = (vectors_in(memory, sizes) for memory in expected)
        for buf, grad, blended in zip(own, gradients, blends):
            if grad is None:
                blended.copy_(buf)
                continue
            # The blend takes the momentum after it was rounded to its dtype.
            buf.copy_(buf.float().lerp(grad.float(), 1 - momentum))
            weight = momentum if nesterov else 1
            blended.copy_(grad.float().lerp(buf.float(), weight))
        self.assert_same_bits(memories, expected)
        is_written = [m._version > v for m, v in zip(memories, versions)]
        self.assertEqual(is_written, [has_gradients, False, True])

    def test_gradients_come_into_momentum(self):
        for momentum, nesterov in itertools.product(MOMENTA, (True, False)):
            with self.subTest(momentum=momentum, nesterov=nesterov):
                self.compare_pass_before(momentum, nesterov)
                for dtype in (HALF, SINGLE):
                    self.compare_pass_before(momentum, nesterov, dtypes=(HALF, dtype))
                self.compare_pass_before(momentum, nesterov, has_gradients=False)

    def compare_pass_after(self, values=FACTORS, sizes=SIZES, dtypes=(SINGLE, HALF)):
        """``values`` are the factors as the pass takes them."""
        memories = [memory_for(sizes, dtype) for dtype in dtypes]
        expected = memories[0].clone()
        params, updates = (vectors_in(memory, sizes) for memory in memories)
        version = memories[0]._version
        kernels.apply_updates(params, updates, *values)
        decay, alpha = FACTORS
        for param, update in zip(vectors_in(expected, sizes), updates):
            param.copy_(param.float().mul(decay).add(update.float(), alpha=alpha))
        self.assert_same_bits(memories[:1], [expected])
        self.assertGreater(memories[0]._version, version)

    def test_updates(self):
        decay, alpha = FACTORS
        for values in (
            FACTORS,
            (torch.tensor([decay]), torch.tensor([alpha])),
            (torch.tensor(decay).double(), torch.tensor(alpha).double()),
            # Without weight decay, that is a number.
            (decay, torch.tensor(alpha)),
        ):
            with self.subTest(values=values):
                self.compare_pass_after(values)
        for dtypes in itertools.product((HALF, SINGLE), repeat=2):
            with self.subTest(dtypes=dtypes):
                self.compare_pass_after(dtypes=dtypes)

    def test_chunks_of_their_real_size(self):
        mock.patch.stopall()
        for sizes in ((CHUNK + 5, 3, 2 * CHUNK + 1), (700,)):
            self.compare_pass_before(0.75, True, sizes)
            self.compare_pass_after(sizes=sizes)

    def test_tensors_of_other_shapes(self):
        """A kernel would write beyond the end of the smaller one."""
        large, small = [torch.zeros(8, 6)], [torch.zeros(4, 6)]
        before, after = kernels.accumulate_and_blend, kernels.apply_updates
        for call in (
            lambda: after(large, small, *FACTORS),
            lambda: before(large, [None], small, 0.5, nesterov=True),
        ):
            with self.assertRaisesRegex(ValueError, r"\(8, 6\) but got \(4, 6\)"):
                call()


class TestOrthogonalization(KernelsTestCase):
    def test_forms(self):
        default, polar = [COEFFICIENTS] * 5, POLAR_EXPRESS["ns_coefficients"]
        x, wide = drawn(24, 40).float(), drawn(48, 96).float()
        strong = drawn(48, 4).float() @ drawn(4, 96).float()
        for matrices, coefficients, wider in (
            (wide, default, 1),
            (wide.mT.contiguous(), default, 1),
            (drawn(40, 40).float(), default, 1),
            (by_columns(x), default, 1),
            (drawn(3, 24, 40).float(), default, 1),
            # The result is rounded to 8 bits.
            (drawn(2, 40, 24).bfloat16(), default, 3),
            # Each matrix of a batch has a norm of its own.
            (torch.stack([x * 1e-6, x.flip(1) * 1e15, x * 0]), default, 1),
            # The Gram form shares Gram matrices otherwise, because the first steps let singular values grow more.
            (wide, polar, 1),
            # The rounding loses the smallest singular values. By bfloat16 it was 8 times as far away.
            (strong + 1e-3 * wide, default, 30),
        ):
            for form, most in MOST.items():
                with (
                    self.subTest(shape=matrices.shape, form=form, wider=wider),
                    on_gpu(many_loads=3),
                ):
                    found = forms.orthogonalized(matrices, coefficients, EPS, form)
                    expected = quintic(matrices.double(), coefficients, EPS)
                    self.assertNear(found, expected, most * wider)
                    self.assertEqual(found.stride(), matrices.stride())
        # Where ``eps`` divides, because it is larger than the norm, the polynomial is nearly its first term.
        with on_gpu():
            found = forms.orthogonalized(x, default[:1], 1e3, "gram")
        self.assertNear(found, COEFFICIENTS[0] * x.double() / 1e3, 0.01)

    def test_where_the_result_goes(self):
        coefficients = [COEFFICIENTS] * 5
        for shape, in_columns in itertools.product(
            ((24, 40), (40, 24), (2, 40, 24)), (False, True)
        ):
            x = drawn(*shape).bfloat16()
            x = by_columns(x) if in_columns else x
            with self.subTest(shape=shape, in_columns=in_columns), on_gpu():
                alone = forms.orthogonalized(x, coefficients, EPS, "gram")
                # The last one goes into the input, which has not changed before.
                for out in (torch.empty_like(x), x):
                    found = forms.orthogonalized(x, coefficients, EPS, "gram", out)
                    self.assertIs(found, out)
                    self.assert_same_bits([found], [alone])

    def results(self, **options):
        shapes = (8, 16), (16, 8), (5, 7)
        options["has_grad"] = lambda step, index: (step, index) != (1, 1)
        params, momenta, _ = self.run_steps(Muon, shapes, **options)
        return params + momenta

    @mock.patch.object(_muon, "NS_DTYPE", HALF)
    @mock.patch.object(_muon_formulas, "NS_DTYPE", HALF)
    @mock.patch.object(torch.cuda, "is_current_stream_capturing", bool)
    @mock.patch.object(MuonFormulas, "has_kernels", lambda self, device: self.fused)
    def test_steps_of_muon(self):
        """Steps with the kernels move parameters as steps without them. A learning rate that is a tensor on a CPU becomes
        a number, because a GPU cannot read it.
        """
        for options in (
            {"lr": 0.1, "momentum": 0.3, "nesterov": False},
            {"lr": torch.tensor(0.1), "weight_decay": 0.1},
        ):
            passes = "accumulate_and_blend", "apply_updates"
            wrapped = {name: mock.Mock(wraps=getattr(kernels, name)) for name in passes}
            with self.subTest(options=options):
                expected = self.results(fused=False, **options)
                with mock.patch.multiple(kernels, **wrapped):
                    found = self.results(fused=True, **options)
                before, after = wrapped.values()
                self.assertTrue(before.called)
                kinds = {type(number) for number in after.call_args.args[2:]}
                self.assertEqual(kinds, {float})
                for one, other in zip(found, expected, strict=True):
                    # Gradients and momenta differ in the last bit of float32, and sometimes in that of what is rounded
                    # to float16. Each step moves a parameter by about 0.1 of its norm.
                    self.assertNear(one, other.double(), 1e-3)


# The memory that the programs of a multiprocessor share, in KiB, by the capability of the GPU.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


class TestCompiled(TestCase):
    def compile(self, capability, kernel, constants, options, **types):
        """The code of a kernel for a GPU. Arguments without a type are constants, or integers of 32 bits."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature, aligned = {}, {}
        for number, name in enumerate(kernel.arg_names):
            kind = "constexpr" if name in constants else types.get(name, "i32")
            signature[name] = kind
            # Triton knows of pointers, sizes and strides that are multiples of 16.
            is_size = name in ("side", "inner", "numel") or name.endswith("_stride")
            if kind[0] == "*" or (is_size and kind == "i32"):
                aligned[(number,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
        target = GPUTarget("cuda", capability, 32)
        result = triton.compile(source, target=target, options=options)
        self.assertLessEqual(result.metadata.shared, 1024 * SHARED[capability])
        return result.asm["ptx"]

    def test_products(self):
        cases = [(capability, 1000) for capability in SHARED]
        # Larger than the cache.
        cases.append((90, 41 * 1024**2))
        for (capability, nbytes), has_base, has_parts, in_columns in itertools.product(
            cases, *[(False, True)] * 3
        ):
            # A Gram matrix, its polynomial, and a short product's polynomial.
            if has_base and in_columns:
                continue
            # GPUs that differ in shared memory only compile the variant that has most to do.
            if capability not in (80, 90) and not (has_base and has_parts):
                continue
            major = capability // 10
            with mock.patch.object(kernels, "_capability", lambda device: major):
                tiles = kernels._tiles_for(torch.device("cpu"), nbytes)
            block = (
                [tiles.inner, tiles.side] if in_columns else [tiles.side, tiles.inner]
            )
            factor = "*fp16"
            if tiles.by_descriptor:
                factor = f"tensordesc<fp16{[1, *block]}>"
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
            with self.subTest(capability=capability, constants=constants):
                ptx = self.compile(
                    capability,
                    kernels.symmetric_product_kernel,
                    constants,
                    {"num_stages": tiles.stages, "num_warps": tiles.warps},
                    **dict.fromkeys(("left", "right"), factor),
                    **dict.fromkeys(("base", "out"), "*fp16"),
                    **dict.fromkeys(("alpha", "beta", "diagonal"), "fp32"),
                    partial="*fp32",
                    arrivals="*i32",
                )
                instructions = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
                self.assertIn(instructions.get(capability, "mma.sync"), ptx)
                if capability >= 90:
                    self.assertIn("cp.async.bulk", ptx)

    def test_passes(self):
        chunks = {
            "IS_ALIGNED": True,
            "CHUNK": CHUNK,
            "AT_ONCE": kernels._AT_ONCE,
        }
        before = {
            **chunks,
            "NESTEROV": True,
            "GRADIENT_WEIGHT_IS_BELOW_HALF": True,
            "MOMENTUM_WEIGHT_IS_BELOW_HALF": False,
            **dict.fromkeys(("MOMENTUM", "GRADIENT"), tl.float32),
            "TARGET": tl.bfloat16,
        }
        after = {
            **chunks,
            "ON_DEVICE": False,
            "PARAM": tl.float32,
            "UPDATE": tl.bfloat16,
        }
        numbers = "gradient_weight", "momentum_weight", "decay", "alpha"
        types = {"jobs": "*i64", **dict.fromkeys(numbers, "fp32")}
        types |= {"x": "*bf16", "factors": "*fp32", "out": "*fp16"}
        # They load and store 16 bytes at once.
        for kernel, constants, wide in (
            (kernels.accumulate_and_blend_kernel, before, "global.*v4"),
            (kernels.apply_updates_kernel, after, "global.*v4"),
            (kernels.scale_kernel, {"TILE": 4096}, "global"),
        ):
            options = {"num_warps": kernels._WARPS}
            for capability in (80, 90):
                with self.subTest(kernel=kernel, capability=capability):
                    ptx = self.compile(capability, kernel, constants, options, **types)
                    for word in ("ld", "st"):
                        self.assertRegex(ptx, rf"{word}\.{wide}")


if __name__ == "__main__":
    unittest.main(verbosity=2)

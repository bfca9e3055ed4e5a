# Owner(s): ["module: optimizer"]
"""Muon's Triton kernels: interpreted and compiled without a GPU, when they are taken, and on a GPU."""

import os
import subprocess
import sys
import tempfile
import unittest
import warnings
from importlib import metadata
from importlib.util import find_spec
from unittest import mock

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.optim import _newton_schulz as ns, _newton_schulz_kernels as forms, Muon
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_config import (
    COEFFICIENTS,
    MuonTestCase,
)
from torch.testing._internal.two_tensor import TwoTensor
from torch.torch_version import TorchVersion


CHECKS = "torch.testing._internal.distributed._muon.kernel_checks"


@unittest.skipIf(find_spec("triton") is None, "there is no Triton")
class KernelsTestCase(TestCase):
    def check(self, *classes, **variables):
        with tempfile.TemporaryDirectory() as cache:
            variables |= {"TRITON_CACHE_DIR": cache}
            for name, value in os.environ.items():
                # As a kernel is compiled by default.
                if not name.startswith("TRITON_"):
                    variables[name] = value
            command = [sys.executable, "-m", CHECKS, *classes]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=600, env=variables
            )
        self.assertEqual(done.returncode, 0, done.stderr)

    def interpret(self, *classes):
        triton, numpy = map(TorchVersion, map(metadata.version, ("triton", "numpy")))
        if triton < "3.7" and numpy >= "2.4":
            self.skipTest("Triton's interpreter takes NumPy 2.4 from 3.7 on")
        self.check(*classes, TRITON_INTERPRET="1")


class TestKernels(KernelsTestCase):
    def test_interpreted(self):
        self.interpret("TestProducts", "TestPasses")


class TestKernelsAtLength(KernelsTestCase):
    def test_interpreted(self):
        self.interpret("TestOrthogonalization")

    def test_compiled(self):
        self.check("TestCompiled")


class TestFormsOfNewtonSchulz(TestCase):
    def test_forms_by_shape(self):
        """Those that an H100 was measured to be faster with."""
        for expected, shape, matrices, algorithm in (
            ("", (4096, 4096), 1, "quintic"),
            # The Gram form pays for matrices that are at least one and a half times as long.
            ("symmetric", (4096, 6136), 1, "gram"),
            ("gram", (6144, 4096), 1, "gram"),
            # A step by plain products has 137 billion multiplications and additions, with two matrices 275 billion.
            ("", (2048, 7168), 1, "gram"),
            ("gram", (2048, 7168), 2, "gram"),
            # 232 billion are few for the Gram form.
            ("symmetric", (2048, 3584), 3, "gram"),
            # Rows must begin at multiples of 16 bytes.
            ("", (4096, 8196), 1, "gram"),
            # Few rows, and more elements than 32 bits count.
            ("", (248, 65536), 16, "gram"),
            ("gram", (256, 65536), 16, "gram"),
            ("symmetric", (46336, 46336), 1, "gram"),
            ("", (46344, 46344), 1, "gram"),
        ):
            with self.subTest(shape=shape, matrices=matrices, algorithm=algorithm):
                self.assertEqual(forms.form_of(shape, matrices, algorithm), expected)

    def form_on_gpu(self, x, algorithm="gram", kernels=True):
        """On a GPU with kernels or without, for a tensor that has no elements."""
        with (
            mock.patch.object(forms, "Tensor", FakeTensor),
            mock.patch.object(forms, "has_kernels", lambda device: kernels),
        ):
            return forms.form_for(x, algorithm)

    def test_forms_on_a_gpu(self):
        with FakeTensorMode():
            x, batch = (
                torch.empty(shape, dtype=torch.bfloat16, device="cuda")
                for shape in ((4096, 14336), (8, 2048, 4096))
            )
            self.assertEqual(self.form_on_gpu(x), "gram")
            self.assertEqual(self.form_on_gpu(x, "quintic"), "")
            self.assertEqual(self.form_on_gpu(x, kernels=False), "")
            # Columns that follow each other, and every other column.
            self.assertEqual(self.form_on_gpu(batch.mT), "gram")
            strided = torch.empty_strided(x.shape, (28672, 2), device="cuda")
            self.assertEqual(self.form_on_gpu(strided), "")
            # Autograd and compilers do not see through the kernels. Nor do wrappers of tensors take them.
            self.assertEqual(self.form_on_gpu(x.requires_grad_()), "")
            x = x.detach()
            with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
                self.assertEqual(self.form_on_gpu(x), "")
            with mock.patch.object(forms, "has_kernels", lambda device: True):
                self.assertEqual(forms.form_for(x, "gram"), "")

    def test_kernels_take_what_has_a_form(self):
        x = torch.empty(8, 16, dtype=torch.bfloat16, device="meta")
        out = torch.empty_like(x)
        with (
            mock.patch.object(forms, "form_for", lambda x, algorithm: algorithm),
            mock.patch.object(forms, "orthogonalized") as taken,
        ):
            found = ns.newton_schulz(x, COEFFICIENTS, 2, 1e-7, "gram", out=out)
            self.assertIs(found, taken.return_value)
            taken.assert_called_once_with(x, [COEFFICIENTS] * 2, 1e-7, "gram", out)
            # Not without steps, or on a CPU.
            ns.newton_schulz(x, COEFFICIENTS, 0, 1e-7, "gram")
            ns.newton_schulz(torch.randn(8, 16), COEFFICIENTS, 2, 1e-7, "gram")
            self.assertEqual(taken.call_count, 1)

    def test_gpus_without_kernels(self):
        device, broken = torch.device("cuda", 77), RuntimeError("no C compiler")
        self.addCleanup(forms.has_kernels.cache_clear)
        for expected, capability, is_available, hip, problem in (
            (True, (8, 0), True, None, None),
            (False, (7, 5), True, None, None),
            (False, (9, 0), False, None, None),
            (False, (9, 0), True, "6.4", None),
            (False, (9, 0), True, None, ImportError("no Triton")),
            (False, (9, 0), True, None, broken),
            # A GPU that is full for a moment says nothing about its kernels, so the answer is not kept.
            (True, (9, 0), True, None, [torch.OutOfMemoryError("full"), None]),
        ):
            forms.has_kernels.cache_clear()
            with (
                self.subTest(capability=capability, hip=hip, problem=problem),
                mock.patch.multiple(
                    torch.cuda,
                    is_available=lambda: is_available,
                    get_device_capability=lambda device: capability,
                ),
                mock.patch.object(torch.version, "hip", hip),
                mock.patch.object(forms, "_launch_once", side_effect=problem),
                warnings.catch_warnings(record=True) as warned,
            ):
                warnings.simplefilter("always")
                if isinstance(problem, list):
                    with self.assertRaisesRegex(torch.OutOfMemoryError, "full"):
                        forms.has_kernels(device)
                # It warns once.
                found = [forms.has_kernels(device) for _ in range(2)]
                self.assertEqual(found, [expected] * 2)
                self.assertEqual(len(warned), problem is broken)

    def test_versions_of_triton(self):
        triton = mock.Mock(__version__="3.5.1")
        with mock.patch.dict(sys.modules, {"triton": triton}):
            with self.assertRaisesRegex(ImportError, "3.6"):
                forms._launch_once(torch.device("cpu"))

    def test_lists_that_the_passes_take(self):
        matrix, elsewhere = torch.empty(4, 6), torch.empty(4, 6, device="meta")
        half = matrix.bfloat16()
        for expected, *lists in (
            (True, [matrix, torch.empty(3)]),
            (False, [matrix, half]),
            (False, [matrix.double()]),
            (False, [matrix.mT]),
            (False, [elsewhere, matrix]),
            (True, [nn.Parameter(matrix)]),
            (False, [TwoTensor(matrix, matrix)]),
            # Lists may differ in their dtypes, and not in their devices.
            (True, [matrix], [], [half]),
            (False, [matrix], [elsewhere]),
        ):
            with (
                self.subTest(lists=lists),
                mock.patch.object(
                    torch.cuda, "is_current_stream_capturing", side_effect=[False, True]
                ),
            ):
                found = [forms.pass_takes(*lists) for _ in range(2)]
                self.assertEqual(found, [expected, False])


class TestFusedOption(TestCase):
    def test_no_kernels_without_a_gpu(self):
        """Nor are they imported, or what a config needs. Triton is one of the slowest imports, and is not everywhere."""
        program = """
import sys, torch.optim
print("triton" in sys.modules, "torch.optim._muon_engine.plan" in sys.modules)
param = torch.nn.Parameter(torch.randn(512, 1024))
param.grad = torch.randn_like(param)
torch.optim.Muon([param], fused=True, ns_algorithm="gram").step()
print("torch.optim._muon_kernels" in sys.modules)
"""
        command = [sys.executable, "-c", program]
        found = subprocess.run(command, capture_output=True, text=True, timeout=100)
        self.assertEqual(found.stdout.split(), ["False"] * 3, found.stderr)


@unittest.skipIf(not torch.cuda.is_available(), "Need at least 1 CUDA device")
class TestMuonFusedOnGPU(MuonTestCase):
    device = "cuda"

    def results(self, dtype=torch.float32, absent=(), **options):
        shapes = (
            (64, 128),
            (128, 64),
            (96, 96),
            (33, 70),
            (256, 512),
            (256, 512),
            (8, 1000),
        )
        options["has_grad"] = lambda step, index: index not in absent or step % 2 == 0
        params, momenta, _ = self.run_steps(
            Muon, shapes, dtype=dtype, steps=4, lr=0.02, **options
        )
        return params, momenta

    def test_fused_has_the_bits_of_torchs_operations(self):
        """In float32, and where batches have the bits of single matrices, which the H100 of the page has shown."""
        single, half = torch.float32, torch.bfloat16
        for dtype, options in (
            (single, {}),
            (single, {"nesterov": False}),
            (single, {"momentum": 0.3, "absent": (1, 4)}),
            (half, {}),
        ):
            with self.subTest(dtype=dtype, options=options):
                expected, momenta = self.results(dtype, foreach=True, **options)
                found, own_momenta = self.results(dtype, fused=True, **options)
                self.assertEqual(own_momenta, momenta, rtol=0, atol=0)
                # In bfloat16, torch rounds a parameter before its addition, too: in four steps, by 8 bits each.
                most = 0 if dtype == single else 4 * 2**-8
                self.assertEqual(found, expected, rtol=most, atol=most)

    def test_symmetric_products(self):
        """Products in float16 are nearer to the exact polynomial than the default's in bfloat16."""
        for shape in ((4, 2048, 8192), (8192, 4096), (4, 2048, 4096), (4096, 4096)):
            x = torch.randn(shape, device="cuda").bfloat16()
            exact = ns.quintic(x.double(), [COEFFICIENTS] * 5, ns.EPS)
            for algorithm in ns.NS_ALGORITHMS:
                with self.subTest(shape=shape, algorithm=algorithm):
                    out = torch.empty_like(x)
                    options = {"ns_algorithm": algorithm, "out": out}
                    found = ns.newton_schulz(x, COEFFICIENTS, 5, ns.EPS, **options)
                    self.assertIs(found, out)
                    distance = (found.double() - exact).norm() / exact.norm()
                    # An H100 had 0.002 for symmetric products, with the rounding of the result, and 0.008 to 0.012.
                    most = 0.02 if algorithm == "quintic" else 0.004
                    self.assertLess(distance.item(), most)

    def test_steps_do_not_wait_for_the_device(self):
        param = nn.Parameter(torch.randn(2048, 8192, device="cuda"))
        param.grad = torch.randn_like(param)
        muon = Muon([param], fused=True, ns_algorithm="gram")
        muon.step()
        version = param._version
        torch.cuda.set_sync_debug_mode("error")
        try:
            muon.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.assertGreater(param._version, version)


if __name__ == "__main__":
    run_tests()

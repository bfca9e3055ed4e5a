# Owner(s): ["module: optimizer"]
"""Muon's Triton kernels without a GPU: interpreted, and compiled for GPUs."""

import json
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
from torch.optim import _newton_schulz_kernels as forms, Muon
from torch.optim._muon_formulas import MuonFormulas
from torch.optim._newton_schulz import newton_schulz
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_config import COEFFICIENTS
from torch.testing._internal.two_tensor import TwoTensor
from torch.torch_version import TorchVersion


CHECKS = "torch.testing._internal.distributed._muon.kernel_checks"


def has_old_interpreter():
    if find_spec("triton") is None:
        return False
    triton, numpy = map(TorchVersion, map(metadata.version, ("triton", "numpy")))
    return triton < "3.7" and numpy >= "2.4"


@unittest.skipIf(find_spec("triton") is None, "there is no Triton")
class TestKernels(TestCase):
    def outcomes_of(self, how):
        """What the checks print. They run in a process of their own, because Triton reads at import how to run."""
        with tempfile.TemporaryDirectory() as cache:
            variables = dict(os.environ)
            for name in os.environ:
                # As a kernel is compiled by default.
                if name.startswith("TRITON_"):
                    del variables[name]
            variables["TRITON_CACHE_DIR"] = cache
            result = subprocess.run(
                [sys.executable, "-m", CHECKS, how],
                capture_output=True,
                text=True,
                timeout=600,
                env=variables,
            )
        self.assertEqual(result.returncode, 0, result.stderr)
        *_, last = result.stdout.splitlines()
        return json.loads(last)

    @unittest.skipIf(
        has_old_interpreter(), "Triton's interpreter takes NumPy 2.4 from 3.7 on"
    )
    def test_interpreted(self):
        outcomes = self.outcomes_of("interpret")
        self.assertGreater(len(outcomes), 15)
        for name, failure in outcomes.items():
            with self.subTest(name=name):
                self.assertEqual(failure, "")

    def test_compiled(self):
        outcomes = self.outcomes_of("compile")
        kinds = {name.partition(" for ")[0] for name in outcomes}
        self.assertEqual(kinds, {"product", "scaled", "pass before", "pass after"})
        # What a program may have, by the capability of the GPU.
        kib = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
        # A thread has 16 elements, and loads and stores 16 bytes at once: four of float32, eight of other types. The
        # pass before reads momentum and gradient and writes momentum and target. The pass after reads the
        # parameter and the update, and writes the parameter.
        least_loads = {"pass before": 4 + 4, "pass after": 4 + 2}
        least_stores = {"pass before": 4 + 2, "pass after": 4}
        for name, used in outcomes.items():
            with self.subTest(name=name, used=used):
                kind = name.partition(" for ")[0]
                capability = used["capability"]
                self.assertLessEqual(used["shared"], 1024 * kib[capability])
                if kind == "product":
                    instruction = {90: "wgmma", 100: "tcgen05"}.get(capability, "mma")
                    self.assertGreater(used[instruction], 0)
                    if capability >= 90:
                        self.assertGreater(used["bulk copies"], 0)
                elif kind != "scaled":
                    self.assertGreaterEqual(used["loads of four"], least_loads[kind])
                    self.assertGreaterEqual(used["stores of four"], least_stores[kind])


class TestFormsOfNewtonSchulz(TestCase):
    def test_forms_by_shape(self):
        """Those that an H100 was measured to be faster with."""
        for expected, shape, matrices, algorithm in (
            ("", (4096, 4096), 1, "quintic"),
            ("symmetric", (4096, 4096), 1, "symmetric"),
            # The Gram form saves nothing of square matrices.
            ("symmetric", (4096, 4096), 1, "gram"),
            ("gram", (4096, 14336), 1, "gram"),
            ("gram", (14336, 4096), 1, "gram"),
            ("symmetric", (4096, 14336), 1, "symmetric"),
            ("gram", (2048, 8192), 2, "gram"),
            ("", (2048, 8192), 1, "gram"),
            ("", (2048, 2048), 1, "symmetric"),
            ("symmetric", (2048, 2048), 8, "symmetric"),
            ("", (512, 2048), 32, "gram"),
            # Rows must begin at multiples of 16 bytes.
            ("", (4098, 8192), 1, "gram"),
            ("", (4096, 8193), 1, "gram"),
            # Few rows, and more elements than 32 bits count.
            ("", (248, 65536), 8, "gram"),
            ("gram", (256, 65536), 16, "gram"),
            ("symmetric", (46336, 46336), 1, "gram"),
            ("", (46344, 46344), 1, "gram"),
        ):
            with self.subTest(shape=shape, matrices=matrices, algorithm=algorithm):
                self.assertEqual(forms.form_of(shape, matrices, algorithm), expected)

    def test_limits(self):
        """A step of 1024 x 1024 by plain products has 6 * 1024 ** 3 multiplications, and one of 1024 x 1536 has 8."""
        square, long = 6 * 1024**3, 8 * 1024**3
        for expected, least, least_of_gram_form, shape, algorithm in (
            ("symmetric", square, 0, (1024, 1024), "symmetric"),
            ("", square + 1, 0, (1024, 1024), "symmetric"),
            # At least one and a half times as long.
            ("gram", 0, long, (1024, 1536), "gram"),
            ("gram", 0, long, (1536, 1024), "gram"),
            ("symmetric", 0, 0, (1024, 1528), "gram"),
            ("symmetric", 0, long + 1, (1024, 1536), "gram"),
            ("symmetric", 0, 0, (1024, 1536), "symmetric"),
            ("", long + 1, 0, (1024, 1536), "gram"),
        ):
            with (
                self.subTest(expected=expected, shape=shape, algorithm=algorithm),
                mock.patch.object(forms, "_LEAST_FLOPS", least),
                mock.patch.object(
                    forms, "_LEAST_FLOPS_OF_GRAM_FORM", least_of_gram_form
                ),
            ):
                self.assertEqual(forms.form_of(shape, 1, algorithm), expected)

    def form_on_gpu(self, x, algorithm="gram", kernels=True):
        """On a GPU with kernels or without, for a tensor that has no elements."""
        with (
            mock.patch.object(forms, "Tensor", FakeTensor),
            mock.patch.object(forms, "has_kernels", lambda device: kernels),
        ):
            return forms.form_for(x, algorithm)

    def test_forms_on_a_gpu(self):
        def empty(*shape):
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

        with FakeTensorMode():
            x = empty(4096, 14336)
            self.assertEqual(self.form_on_gpu(x), "gram")
            self.assertEqual(self.form_on_gpu(x, "symmetric"), "symmetric")
            self.assertEqual(self.form_on_gpu(x, "quintic"), "")
            self.assertEqual(self.form_on_gpu(x, kernels=False), "")
            # Columns that follow each other, and a batch of both kinds.
            self.assertEqual(self.form_on_gpu(x.mT), "gram")
            self.assertEqual(self.form_on_gpu(empty(8, 2048, 2048)), "symmetric")
            self.assertEqual(self.form_on_gpu(empty(8, 2048, 4096).mT), "gram")
            # Every other column.
            strided = torch.empty_strided(x.shape, (28672, 2), device="cuda")
            self.assertEqual(self.form_on_gpu(strided), "")
            self.assertEqual(self.form_on_gpu(empty(2048, 2048)), "")
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
            found = newton_schulz(x, COEFFICIENTS, 2, 1e-7, "gram", out=out)
            self.assertIs(found, taken.return_value)
            taken.assert_called_once_with(x, [COEFFICIENTS] * 2, 1e-7, "gram", out)
            # Not without steps, or on a CPU.
            newton_schulz(x, COEFFICIENTS, 0, 1e-7, "gram")
            newton_schulz(torch.randn(8, 16), COEFFICIENTS, 2, 1e-7, "gram")
            self.assertEqual(taken.call_count, 1)

    def test_gpus_without_kernels(self):
        device, cuda = torch.device("cuda", 77), torch.cuda
        self.addCleanup(forms.has_kernels.cache_clear)
        for expected, capability, is_available, hip, problem in (
            (True, (9, 0), True, None, None),
            (True, (8, 0), True, None, None),
            (False, (7, 5), True, None, None),
            (False, (9, 0), False, None, None),
            (False, (9, 0), True, "6.4", None),
            (False, (9, 0), True, None, ImportError("no Triton")),
            (False, (9, 0), True, None, RuntimeError("no C compiler")),
        ):
            forms.has_kernels.cache_clear()
            launch = mock.Mock(side_effect=problem)
            with (
                self.subTest(
                    capability=capability,
                    is_available=is_available,
                    hip=hip,
                    problem=problem,
                ),
                mock.patch.object(cuda, "is_available", lambda: is_available),
                mock.patch.object(
                    cuda, "get_device_capability", lambda device: capability
                ),
                mock.patch.object(torch.version, "hip", hip),
                mock.patch.object(forms, "_launch_once", launch),
                warnings.catch_warnings(record=True) as warned,
            ):
                warnings.simplefilter("always")
                self.assertEqual(forms.has_kernels(device), expected)
                # Once.
                self.assertEqual(forms.has_kernels(device), expected)
            texts = [str(warning.message) for warning in warned]
            self.assertEqual(len(texts), isinstance(problem, RuntimeError))
            self.assertEqual(
                any("no C compiler" in text for text in texts), bool(texts)
            )

    def test_gpu_that_is_full_for_a_moment(self):
        """That says nothing about its kernels, so the answer is not kept."""
        self.addCleanup(forms.has_kernels.cache_clear)
        forms.has_kernels.cache_clear()
        launch = mock.Mock(side_effect=[torch.OutOfMemoryError("full"), None])
        with (
            mock.patch.object(torch.cuda, "is_available", lambda: True),
            mock.patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0)),
            mock.patch.object(torch.version, "hip", None),
            mock.patch.object(forms, "_launch_once", launch),
        ):
            with self.assertRaisesRegex(torch.OutOfMemoryError, "full"):
                forms.has_kernels(torch.device("cuda", 78))
            self.assertTrue(forms.has_kernels(torch.device("cuda", 78)))

    def test_versions_of_triton(self):
        for version, is_taken in (("3.5.1", False), ("3.6.0", True), ("3.10.0", True)):
            triton, kernels = mock.Mock(__version__=version), mock.Mock()
            modules = {"triton": triton, "torch.optim._muon_kernels": kernels}
            with (
                self.subTest(version=version),
                mock.patch.dict(sys.modules, modules),
                mock.patch.object(torch.cuda, "device", mock.MagicMock()),
            ):
                if is_taken:
                    forms._launch_once(torch.device("cpu"))
                else:
                    with self.assertRaisesRegex(ImportError, "3.6"):
                        forms._launch_once(torch.device("cpu"))
                self.assertEqual(kernels.scaled.called, is_taken)

    def test_lists_that_the_passes_take(self):
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", bool):
            for expected, tensors in (
                (True, [torch.empty(4, 6), torch.empty(3)]),
                (True, [torch.empty(4, 6).bfloat16()]),
                (False, [torch.empty(4, 6), torch.empty(3).bfloat16()]),
                (False, [torch.empty(4, 6).double()]),
                (False, [torch.empty(4, 6).mT]),
                (False, [torch.empty(4, 6, device="meta"), torch.empty(4)]),
                (True, [nn.Parameter(torch.empty(4, 6))]),
                (False, [TwoTensor(torch.empty(4, 6), torch.empty(4, 6))]),
            ):
                with self.subTest(tensors=tensors):
                    self.assertEqual(forms.pass_takes(tensors), expected)
            # Lists may differ in their dtypes, and not in their devices.
            momenta, targets = [torch.empty(4)], [torch.empty(4).bfloat16()]
            self.assertTrue(forms.pass_takes(momenta, [], targets))
            elsewhere = [torch.empty(4, device="meta")]
            self.assertFalse(forms.pass_takes(momenta, elsewhere))
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            self.assertFalse(forms.pass_takes([torch.empty(4)]))


class TestFusedOption(TestCase):
    def test_a_single_process_takes_the_kernels(self):
        kernels = mock.Mock()
        param = nn.Parameter(torch.randn(4, 6))
        param.grad = torch.randn(4, 6)
        with (
            mock.patch.object(MuonFormulas, "takes_kernels", lambda *_: True),
            mock.patch.dict(sys.modules, {"torch.optim._muon_kernels": kernels}),
        ):
            Muon([param], fused=True).step()
        self.assertEqual(kernels.accumulate_and_blend.call_count, 1)
        self.assertEqual(kernels.apply_updates.call_count, 1)

    def test_learning_rate_as_a_tensor_on_a_cpu(self):
        """A GPU cannot read it, so the kernel gets numbers."""
        formulas = MuonFormulas.of_group(
            Muon([nn.Parameter(torch.randn(4, 6))], lr=torch.tensor(0.5)).param_groups[
                0
            ]
        )
        step_size = formulas.step_size((4, 6), torch.device("cpu"))
        step_size = step_size._replace(alpha=torch.tensor(-0.5))
        kernels = mock.Mock()
        with (
            mock.patch.object(MuonFormulas, "takes_kernels", lambda *_: True),
            mock.patch.dict(sys.modules, {"torch.optim._muon_kernels": kernels}),
        ):
            formulas.apply([torch.ones(4, 6)], [torch.ones(4, 6)], step_size)
        _, _, *numbers = kernels.apply_updates.call_args.args
        for number in numbers:
            self.assertIs(type(number), float)

    def test_no_kernels_without_a_gpu(self):
        """Nor are they imported. Triton is one of the slowest imports, and is not everywhere."""
        program = """
import sys, torch.optim
print("triton" in sys.modules)
param = torch.nn.Parameter(torch.randn(512, 1024))
param.grad = torch.randn_like(param)
torch.optim.Muon([param], fused=True, ns_algorithm="gram").step()
print("torch.optim._muon_kernels" in sys.modules)
"""
        command = [sys.executable, "-c", program]
        found = subprocess.run(command, capture_output=True, text=True, timeout=100)
        self.assertEqual(found.stdout.split(), ["False", "False"], found.stderr)


if __name__ == "__main__":
    run_tests()

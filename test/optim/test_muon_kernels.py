# Owner(s): ["module: optimizer"]
"""Muon's Triton kernels without a GPU: interpreted, and compiled for GPUs."""

import copy
import json
import subprocess
import sys
import tempfile
import unittest
from importlib.util import find_spec
from unittest import mock

import torch
from torch import nn
from torch.optim import _newton_schulz_kernels as forms, Muon
from torch.optim._muon_formulas import MuonFormulas
from torch.testing._internal.common_utils import run_tests, TestCase


CHECKS = "torch.testing._internal.distributed._muon.kernel_checks"


@unittest.skipIf(find_spec("triton") is None, "there is no Triton")
class TestKernels(TestCase):
    def outcomes_of(self, how):
        """What the checks print. They run in a process of their own, because Triton reads at import how to run."""
        with tempfile.TemporaryDirectory() as cache:
            command = ["env", f"TRITON_CACHE_DIR={cache}", sys.executable, "-m"]
            result = subprocess.run(
                [*command, CHECKS, how], capture_output=True, text=True, timeout=300
            )
        self.assertEqual(result.returncode, 0, result.stderr)
        *_, last = result.stdout.splitlines()
        return json.loads(last)

    def test_interpreted(self):
        outcomes = self.outcomes_of("interpret")
        self.assertGreater(len(outcomes), 8)
        for name, failure in outcomes.items():
            with self.subTest(name=name):
                self.assertEqual(failure, "")

    def test_compiled(self):
        """The limits are those of the GPUs. A few bytes of spills cost nothing that was measured."""
        most_shared = {"90": 227 * 1024, "80": 163 * 1024}
        for name, used in self.outcomes_of("compile").items():
            with self.subTest(name=name, used=used):
                gpu = "90" if " 90" in name else "80"
                self.assertLessEqual(used["shared"], most_shared[gpu])
                self.assertLessEqual(used.get("registers", 0), 255)
                self.assertLessEqual(used.get("stack", 0), 64)
                if name.startswith("pass"):
                    # The pass before loads and stores momentum, gradients and targets.
                    least = 14 if "before" in name else 10
                    self.assertGreaterEqual(used["vectors of four"], least)
                elif gpu == "90":
                    self.assertGreater(used["wgmma"], 0)
                    self.assertGreater(used["bulk copies"], 0)
                else:
                    self.assertGreater(used["mma"], 0)


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
        ):
            with self.subTest(shape=shape, matrices=matrices, algorithm=algorithm):
                self.assertEqual(forms.form_of(shape, matrices, algorithm), expected)

    def test_smaller_ones_in_graphs(self):
        for expected, shape, matrices in (
            ("symmetric", (2048, 2048), 1),
            ("gram", (1024, 4096), 4),
            ("", (1024, 1024), 1),
        ):
            with self.subTest(shape=shape, matrices=matrices):
                found = forms.form_of(shape, matrices, "gram", in_graph=True)
                self.assertEqual(found, expected)

    def test_no_form_without_a_gpu(self):
        x = torch.empty(4096, 14336, dtype=torch.bfloat16, device="meta")
        for algorithm in ("quintic", "symmetric", "gram"):
            self.assertEqual(forms.form_for(x, algorithm), "")

    def test_gpus_without_kernels(self):
        device = torch.device("cuda", 77)
        cuda = torch.cuda
        self.addCleanup(forms.has_kernels.cache_clear)
        for expected, capability, modules in (
            (True, (9, 0), {"torch.optim._muon_kernels": mock.Mock()}),
            (False, (7, 5), {"torch.optim._muon_kernels": mock.Mock()}),
            # The import fails.
            (False, (9, 0), {"torch.optim._muon_kernels": None}),
        ):
            forms.has_kernels.cache_clear()
            with (
                self.subTest(capability=capability, modules=modules),
                mock.patch.object(cuda, "is_available", lambda: True),
                mock.patch.object(
                    cuda, "get_device_capability", lambda device: capability
                ),
                mock.patch.dict(sys.modules, modules),
            ):
                self.assertEqual(forms.has_kernels(device), expected)

    def test_lists_that_the_passes_take(self):
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", bool):
            for expected, tensors in (
                (True, [torch.empty(4, 6), torch.empty(3)]),
                (True, [torch.empty(4, 6).bfloat16()]),
                (False, [torch.empty(4, 6), torch.empty(3).bfloat16()]),
                (False, [torch.empty(4, 6).double()]),
                (False, [torch.empty(4, 6).mT]),
                (False, [torch.empty(4, 6, device="meta"), torch.empty(4)]),
            ):
                with self.subTest(tensors=tensors):
                    self.assertEqual(forms.pass_takes(tensors), expected)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            self.assertFalse(forms.pass_takes([torch.empty(4)]))


class TestFusedOption(TestCase):
    def trained(self, **options):
        torch.manual_seed(0)
        params = [
            nn.Parameter(torch.randn(shape)) for shape in ((4, 6), (6, 4), (5, 5))
        ]
        muon = Muon(params, lr=0.1, **options)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn_like(param)
            muon.step()
        return [param.detach() for param in params]

    def test_bits_of_torchs_operations_without_a_gpu(self):
        for config in (None, "auto"):
            with self.subTest(config=config):
                expected = self.trained(distributed_config=config)
                found = self.trained(distributed_config=config, fused=True)
                self.assertEqual(found, expected, rtol=0, atol=0)

    def test_not_with_foreach(self):
        param = nn.Parameter(torch.randn(4, 6))
        for config in (None, "auto"):
            with self.subTest(config=config):
                with self.assertRaisesRegex(ValueError, "exclude each other"):
                    Muon([param], fused=True, foreach=True, distributed_config=config)

    def test_in_groups_checkpoints_and_signatures(self):
        muon = Muon([nn.Parameter(torch.randn(4, 6))], fused=True)
        self.assertTrue(muon.defaults["fused"])
        self.assertTrue(muon.state_dict()["param_groups"][0]["fused"])
        self.assertTrue(copy.deepcopy(muon).param_groups[0]["fused"])
        formulas = MuonFormulas.of_group(muon.param_groups[0])
        self.assertEqual(formulas.signature()["fused"], "True")
        self.assertNotEqual(formulas.digest, formulas._replace(fused=None).digest)


if __name__ == "__main__":
    run_tests()

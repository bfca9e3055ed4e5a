# Owner(s): ["oncall: distributed"]
"""The tests of the tests: checks that compare with a tolerance find wrong updates, and ranks on GPUs start and end."""

import os
import subprocess
import sys
import time
import unittest
from unittest import mock

import torch
from torch.optim._muon import MuonFormulas
from torch.optim._muon_engine.runtime.compute import MuonCompute
from torch.testing._internal import common_utils
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed._muon import common_muon, common_parallel
from torch.testing._internal.distributed._muon.common_muon import (
    everyone,
    OnCPU,
    OnGPUs,
)


class Swapped:
    """Gives the last update of the same shape, which is that of another matrix."""

    def __init__(self):
        self.last = {}

    def __call__(self, update):
        before = self.last.get(update.shape, update)
        self.last[update.shape] = update
        return before


def rounded(update):
    noise = torch.randn_like(update)
    return update + 0.02 * update.norm() / noise.norm() * noise


def transposed(update):
    rows, columns = update.shape
    return update.mT if rows == columns else update


# What happens to each update, and whether it is wrong then.
CHANGES = {
    "zero": (torch.zeros_like, True),
    "negated": (torch.neg, True),
    "swapped": (Swapped(), True),
    "transposed": (transposed, True),
    "rounded": (rounded, False),
}
# The checks that GPUs compare with a tolerance.
CHECKS = (
    common_parallel.check_dtensor_shard_correctness,
    common_parallel.check_dtensor_vs_single_device,
    common_parallel.check_dtensor_placements,
    common_parallel.check_dtensor_2d_mesh,
    common_parallel.check_fsdp_correctness,
    common_parallel.check_fsdp_vs_single_device,
    common_parallel.check_fully_shard_vs_single_device,
    common_parallel.check_process_groups,
    common_parallel.check_flat_parameters,
    common_parallel.check_ddp_vs_single_device,
    common_parallel.check_per_parameter_tp_dims,
    common_parallel.check_fsdp_plus_tp,
    common_parallel.check_expert_parallel_independence,
    common_parallel.check_expert_parallel_with_fsdp,
)


@common_utils.instantiate_parametrized_tests
class TestMuonComparison(OnCPU):
    """The checks on GPUs fail with a wrong update, and pass with one that is rounded differently."""

    world_size = 2

    @common_utils.parametrize("change", CHANGES)
    def test_update(self, change):
        for check in CHECKS:
            with self.subTest(check.__name__):
                self.check_change(change, check)

    def check_change(self, name, check):
        change, is_wrong = CHANGES[name]
        outcome, is_changed = self.outcome_with(change, check)
        # A change may leave all updates of a check as they are.
        changed_anywhere = any(everyone(is_changed))
        with self.everywhere():
            if not (is_wrong and changed_anywhere):
                self.assertIsNone(outcome)
            else:
                self.assertIsNotNone(outcome)
                kind, _ = outcome
                self.assertEqual(kind, "AssertionError")

    def outcome_with(self, change, check):
        """The error of ``check`` on this rank with changed updates, and whether some update was another one."""
        orthogonalize, compute = MuonFormulas.orthogonalize, MuonCompute.compute
        found = []

        def changed_update(*args, out):
            right = orthogonalize(*args)
            made = change(right)
            found.append(not torch.equal(made, right))
            return out.copy_(made)

        def changed_compute(*args):
            # The single process keeps the right ones.
            with mock.patch.object(MuonFormulas, "orthogonalize", changed_update):
                compute(*args)

        with (
            mock.patch.object(common_muon, "is_exact", return_value=False),
            mock.patch.object(MuonCompute, "compute", changed_compute),
        ):
            outcome = self.outcome(lambda: check(self))
        return outcome, any(found)


class Stuck(OnGPUs, MultiProcessTestCase):
    __test__ = False
    world_size = 2
    seconds = 1

    def test_sleep(self):
        time.sleep(600 * self.rank)


# As in a process with one GPU and NVML.
ONE_GPU = """
import sys
import torch

def count():
    sys.exit("CUDA was asked for its devices")

torch.cuda._is_compiled = lambda: True
# A torch for CPUs lacks them.
for name in "getDeviceCount", "init", "getCurrentRawStream":
    setattr(torch._C, f"_cuda_{name}", count)
torch.cuda._device_count_nvml = lambda: 1
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.common_utils import TEST_CUDA
print(TEST_CUDA)
"""


class TestMuonProcesses(common_utils.TestCase):
    """How the ranks of OnGPUs start and end."""

    def run_python(self, code, **variables):
        command = [sys.executable, "-c", code]
        how = {"capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(command, env={**os.environ, **variables}, **how)

    def test_imports_ask_no_device(self):
        """A test of four ranks took 10 s, because a server that asks for GPUs cannot be forked."""
        name = "PYTORCH_NVML_BASED_CUDA_CHECK"
        done = self.run_python(ONE_GPU, **{name: "1"})
        self.assertEqual(done.stdout, "True\n", done.stderr)
        done = self.run_python(ONE_GPU, **{name: "0"})
        self.assertIn("CUDA was asked", done.stderr)

    def test_start(self):
        decide, gpus = common_muon.process_type.__wrapped__, torch.cuda.is_available()
        for may, has_gpus, name in (
            (True, True, "ForkServerProcess"),
            (False, True, "SpawnProcess"),
            (False, False, "ForkServerProcess"),
        ):
            with (
                self.subTest(may=may, has_gpus=has_gpus),
                mock.patch.object(common_muon, "forks_may_use_gpus", lambda: may),
                mock.patch.object(torch.cuda, "is_available", lambda: has_gpus),
            ):
                self.assertEqual(decide().__name__, name)
        self.assertTrue(common_muon.forks_may_use_gpus() or not gpus)

    def test_a_test_is_bounded(self):
        result = unittest.TestResult()
        with self.assertLogs("torch.testing._internal.common_distributed") as logged:
            Stuck("test_sleep").run(result)
        ((_, error),) = result.errors
        self.assertIn("Process 1 terminated or timed out after", error)
        self.assertIn("in test_sleep", "\n".join(logged.output))


if __name__ == "__main__":
    common_utils.run_tests()

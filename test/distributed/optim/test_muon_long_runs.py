# Owner(s): ["oncall: distributed"]
"""Long runs equal one process to the end, and use no more memory, threads, or groups over time."""

import gc
import os
import weakref

import torch
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
    requires_nccl,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_fsdp1 import Run
from torch.testing._internal.distributed._muon.common_modules import (
    make_model,
    tensor_parallel,
)
from torch.testing._internal.distributed._muon.common_muon import (
    device,
    GlooOnCPU,
    grid_of,
    OnGPUs,
    ParityAssertions,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)


# With MUON_TEST_LONG=1, runs have a realistic length.
LONG = os.environ.get("MUON_TEST_LONG") == "1"
STEPS, OPTIMIZERS = (1000, 200) if LONG else (30, 20)
# After that many steps or optimizers, everything that is made once exists.
WARM = 10


def usage():
    """The amount of each resource that this process holds."""
    gc.collect()
    objects = gc.get_objects()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found = {
        "tensors": sum(issubclass(type(o), torch.Tensor) for o in objects),
        "threads": len(os.listdir("/proc/self/task")),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "process groups": len(distributed_c10d._world.pg_map),
        "keys in the store": distributed_c10d._get_default_store().num_keys(),
        "objects": len(objects),
        "resident": resident,
    }
    if device().type == "cuda":
        torch.cuda.synchronize()
        found["bytes on the GPU"] = torch.cuda.memory_allocated()
    return found


class LongRuns(ParityAssertions):
    """To be put before a TestCase whose methods run on every rank."""

    world_size = 4

    def run_flat(self, call, times, rebuilds=0):
        """No resource grows in each call, except a few small entries for each of its ``rebuilds``."""
        for number in range(times):
            call(number)
            if number == WARM:
                before = usage()
        after, counted = usage(), times - WARM
        few = rebuilds * counted
        allowed = {
            "objects": counted // 2 + few,
            "keys in the store": 12 * few,
            "resident": 2**23,
        }
        grown = {what: after[what] - before[what] for what in before}
        found = [f"{n} {what}" for what, n in grown.items() if n > allowed.get(what, 0)]
        self.assertEverywhere(found, f"more after {counted} times")

    def run_twins(self, model):
        params = model.parameters()
        specs = [Spec(p.shape, p.device_mesh, p.placements) for p in params]
        twins = Twins(specs)
        # Some lack a gradient now and then, as unused experts do.
        self.run_flat(lambda step: twins.step([step % 3] if step % 7 else ()), STEPS)
        if device().type == "cpu":
            self.assertParity(twins)

    def test_fsdp2_tp(self):
        model, mesh = make_model(width=9, bias=False), grid_of(2, 2)
        self.run_twins(fully_shard(tensor_parallel(model, mesh["b"]), mesh=mesh["a"]))


@requires_gloo()
class TestMuonLongRuns(GlooOnCPU, LongRuns, MultiProcContinuousTest):
    def test_fsdp1(self):
        run = Run(False)
        self.run_flat(lambda step: run.step(), STEPS)
        self.assertEverywhere(run.problems())

    def test_optimizers_made_and_dropped(self):
        mesh, engines = grid_of(2, 2), weakref.WeakSet()

        def make_one(number):
            twins = Twins(specs(mesh, [(S0, S1), (R, S0)]))
            engines.add(twins.optimizer._engine)
            # A frozen parameter makes the next step rebuild the engine.
            twins.params[0].requires_grad_(False)
            twins.step(missing=[0])
            engines.add(twins.optimizer._engine)

        self.run_flat(make_one, OPTIMIZERS, rebuilds=1)
        with self.everywhere():
            self.assertEqual(len(engines), 0)


@requires_nccl()
class TestMuonLongRunsOnGPUs(OnGPUs, LongRuns, MultiProcContinuousTest):
    pass


if __name__ == "__main__":
    run_tests()

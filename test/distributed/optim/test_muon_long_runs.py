# Owner(s): ["oncall: distributed"]
"""Long runs equal one process to the end, and use no more memory, threads, or groups over time."""

import gc
import os
import sys
import weakref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard
from torch.optim.muon import create_auto_config
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
    Cut,
    device,
    GlooOnCPU,
    grid_of,
    OnGPUs,
    ParityAssertions,
    Spec,
    Twins,
)


if not dist.is_available():
    print("torch.distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


# With MUON_TEST_LONG=1, runs have a realistic length.
LONG = os.environ.get("MUON_TEST_LONG") == "1"
STEPS, OPTIMIZERS = (1000, 200) if LONG else (30, 20)
# After that many steps or optimizers, everything that is made once exists.
WARM = 10


class Gradients:
    """Sets of gradients that are made once and given in turn. Making one takes longer than a step."""

    COUNT = 7

    def __init__(self, params, make):
        self.params, self.sets = params, []
        for number in range(self.COUNT):
            make(number)
            self.sets.append([param.grad for param in params])
            for param in params:
                param.grad = None

    def give(self, step):
        for param, grad in zip(self.params, self.sets[step % self.COUNT], strict=True):
            param.grad = grad


def usage():
    """The amount of each resource that this process holds."""
    gc.collect()
    # It keeps up to 4096 attributes that were looked up by new strings.
    sys._clear_type_cache()
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
        "blocks": sys.getallocatedblocks(),
        "resident": resident,
    }
    if device().type == "cuda":
        torch.cuda.synchronize()
        found["bytes on the GPU"] = torch.cuda.memory_allocated()
    return found


class LongRuns(ParityAssertions):
    """To be put before a TestCase whose methods run on every rank."""

    world_size = 4
    # In each of the counted times.
    rebuilds = 0

    def assertFlat(self, before, after, times):
        """No resource grows each of ``times`` times, except a few small entries per rebuild."""
        few = self.rebuilds * times
        allowed = {
            "objects": times // 2 + few,
            "blocks": times // 2 + 8 * few,
            "keys in the store": 12 * few,
            "resident": 2**23,
        }
        grown = {what: after[what] - before[what] for what in before}
        found = [f"{n} {what}" for what, n in grown.items() if n > allowed.get(what, 0)]
        self.assertEverywhere(found, f"more after {times} times")

    def run_long(self, optimizers, params, make):
        gradients = Gradients(params, make)
        for step in range(STEPS):
            gradients.give(step)
            for optimizer in optimizers:
                optimizer.step()
            if step == WARM:
                before = usage()
        self.assertFlat(before, usage(), STEPS - WARM)

    def run_twins(self, twins):
        def make(number):
            # Some lack a gradient now and then, as unused experts do.
            twins.set_gradients([number] if number % 3 == 0 else ())

        optimizers = [twins.optimizer, twins.single]
        self.run_long(optimizers, [*twins.params, *twins.singles], make)

    def check(self, twins):
        start = [param.detach().clone() for param in twins.singles]
        self.run_twins(twins)
        self.assertParity(twins)
        with self.everywhere():
            for param, old in zip(twins.singles, start, strict=True):
                self.assertTrue(param.isfinite().all())
                self.assertFalse(torch.equal(param, old))

    def specs_of(self, model):
        return [Spec(p.shape, p.device_mesh, p.placements) for p in model.parameters()]

    def fsdp2_tp(self):
        model, mesh = make_model(width=9, bias=False), grid_of(2, 2)
        return self.specs_of(
            fully_shard(tensor_parallel(model, mesh["b"]), mesh=mesh["a"])
        )

    def hsdp(self):
        model = make_model(width=9, bias=False)
        return self.specs_of(fully_shard(model, mesh=grid_of(2, 2)))

    def experts(self):
        """Each rank of "b" has two experts of its own. All ranks share dense matrices."""
        first = 2 * grid_of(2, 2).get_coordinate()[1]
        places = [(None, (8, 16)), (None, (7, 5)), (first, (6, 4)), (first + 1, (6, 4))]
        config = create_auto_config(
            expert_assignments={
                i: expert for i, (expert, _) in enumerate(places) if expert is not None
            },
            ddp_process_group=grid_of(2, 2).get_group("a"),
            ep_process_group=grid_of(2, 2).get_group("b"),
        )
        seeds = [
            i if expert is None else 10 + expert for i, (expert, _) in enumerate(places)
        ]
        return Twins([Cut(shape) for _, shape in places], config, seeds=seeds)


@requires_gloo()
class TestMuonLongRuns(GlooOnCPU, LongRuns, MultiProcContinuousTest):
    def test_fsdp2_tp(self):
        self.check(Twins(self.fsdp2_tp()))

    def test_hsdp(self):
        self.check(Twins(self.hsdp()))

    def test_experts_ddp(self):
        self.check(self.experts())

    def test_fsdp1(self):
        run = Run(False)
        params = [*run.matrices, *run.single.parameters()]
        optimizers = [run.optimizer, *run.single_optimizers]
        self.run_long(optimizers, params, lambda number: run.backward())
        self.assertEverywhere(run.problems())

    def test_optimizers_made_and_dropped(self):
        specs, engines = self.fsdp2_tp(), weakref.WeakSet()
        self.rebuilds = 1
        for number in range(OPTIMIZERS):
            twins = self.experts() if number % 2 else Twins(specs)
            engines.add(twins.optimizer._engine)
            # A frozen parameter makes the next step rebuild the engine.
            twins.params[0].requires_grad_(False)
            twins.step(missing=[0])
            engines.add(twins.optimizer._engine)
            self.assertIn(twins.optimizer._engine, engines)
            self.assertParity(twins, f"{number}")
            del twins
            if number == WARM:
                before = usage()
        self.assertFlat(before, usage(), OPTIMIZERS - WARM)
        with self.everywhere():
            self.assertEqual(len(engines), 0)


@requires_nccl()
class TestMuonLongRunsOnGPUs(OnGPUs, LongRuns, MultiProcContinuousTest):
    def test_memory(self):
        for twins in (Twins(self.fsdp2_tp()), Twins(self.hsdp()), self.experts()):
            self.run_twins(twins)


if __name__ == "__main__":
    run_tests()

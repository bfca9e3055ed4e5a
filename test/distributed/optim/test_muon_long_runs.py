# Owner(s): ["oncall: distributed"]
"""Long runs: the bits of one process to the end, and nothing that grows."""

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
    everyone,
    GlooOnCPU,
    grid_of,
    held,
    local,
    OnGPUs,
    ParityAssertions,
    Spec,
    Twins,
)


if not dist.is_available():
    print("torch.distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


# MUON_TEST_LONG=1 asks for runs as long as they are in life.
LONG = os.environ.get("MUON_TEST_LONG") == "1"
STEPS, OPTIMIZERS = (1000, 200) if LONG else (100, 40)
# After so many, all that is made once has been made.
WARM = 10


class Gradients:
    """Some sets of gradients, made once and given in turn: to make one takes longer than a step."""

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
    """How much of everything this process holds."""
    gc.collect()
    # Of attributes that were looked up by a new string each time, it has kept up to 4096.
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

    def assertFlat(self, before, after, times):
        """What each of ``times`` times leaves behind is there as often."""
        allowed = {"objects": times // 2, "blocks": times // 2, "resident": 2**23}
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
            # Some are without a gradient now and then, as unused experts are.
            twins.set_gradients([number] if number % 3 == 0 else ())

        optimizers = [twins.optimizer, twins.single]
        self.run_long(optimizers, [*twins.params, *twins.singles], make)

    def check(self, twins, replicas):
        start = [param.detach().clone() for param in twins.singles]
        self.run_twins(twins)
        self.assertParity(twins)
        with self.everywhere():
            for param, old in zip(twins.singles, start, strict=True):
                self.assertTrue(param.isfinite().all())
                self.assertFalse(torch.equal(param, old))
        self.assertEqual(self.equal_replicas(twins), replicas)

    def equal_replicas(self, twins):
        """How often another rank has the same elements that this one has."""
        mine = {
            (seed, frozenset(held(spec))): local(param.detach()).tolist()
            for seed, spec, param in zip(twins.seeds, twins.specs, twins.params)
        }
        others = [its for rank, its in enumerate(everyone(mine)) if rank != self.rank]
        return sum(
            its.get(key) == value for its in others for key, value in mine.items()
        )

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
        """Two of its own for each rank of "b", and dense matrices that all share."""
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
        self.check(Twins(self.fsdp2_tp()), 0)

    def test_hsdp(self):
        self.check(Twins(self.hsdp()), 4)

    def test_experts_ddp(self):
        self.check(self.experts(), 8)

    def test_fsdp1(self):
        run = Run(False)
        params = [*run.matrices, *run.single.parameters()]
        optimizers = [run.optimizer, *run.single_optimizers]
        self.run_long(optimizers, params, lambda number: run.backward())
        self.assertEverywhere(run.problems())

    def test_optimizers_made_and_dropped(self):
        specs, engines = self.fsdp2_tp(), weakref.WeakSet()
        for number in range(OPTIMIZERS):
            twins = self.experts() if number % 2 else Twins(specs)
            engines.add(twins.optimizer._engine)
            # A frozen parameter has the next step build another one.
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

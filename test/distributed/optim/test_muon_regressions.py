# Owner(s): ["oncall: distributed"]
"""Incidents of the distributed Muon, each with a case that lacks the incident's cause; and long runs.

Long runs equal one process to the end, and use no more memory, threads or groups over time.
"""

import gc
import os
import weakref
from unittest import mock

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial
from torch.optim import Muon
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_modules, common_muon
from torch.testing._internal.distributed._muon.common_muon import (
    full,
    mesh_of,
    place,
    R,
    S0,
    S1,
    Spec,
    specs,
    Strategy,
    Twins,
)


# Steps and optimizers of a long run. With MUON_TEST_LONG=1, they have a realistic number.
STEPS, OPTIMIZERS = (3000, 500) if os.environ.get("MUON_TEST_LONG") == "1" else (20, 20)
# After that many of them, everything that is made once exists.
WARM = 10


def usage():
    gc.collect()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "tensors": sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()),
        "threads": len(os.listdir("/proc/self/task")),
        "process groups": len(distributed_c10d._world.pg_map),
        "keys in the store": distributed_c10d._get_default_store().num_keys(),
        "resident": resident,
    }


class TestMuonRegressions(common_muon.OnCPU):
    def test_out_of_memory_in_an_exchange(self):
        """It was told as another rank's failure."""
        error = torch.OutOfMemoryError("of a device")
        work = mock.Mock(**{"wait.side_effect": error})
        for fails in ({"side_effect": error}, {"return_value": work}):
            twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)]))
            with mock.patch("torch.distributed.all_to_all_single", **fails):
                step = twins.optimizer.step
                self.assertRaisesEverywhere(step, type(error), "of a device")

    def test_experts_in_another_order(self):
        """DTensor's collectives for one expert's gradient and momentum met those for another expert."""
        mesh, order = mesh_of(4), (0, 1) if self.rank % 2 else (1, 0)
        config = create_auto_config(expert_assignments=dict(enumerate(order)))
        placed = [Spec((6, 4), mesh, (R,), gradients=(Partial(),))] * 2
        twins = Twins(placed, config, seeds=order)
        for index, expert in enumerate(order):
            momentum = full(4 + expert, (6, 4))
            sharded = place(momentum, Spec((6, 4), mesh, (S0,)))
            for optimizer, param, buffer in (
                (twins.optimizer, twins.params[index], sharded),
                (twins.single, twins.singles[index], momentum),
            ):
                optimizer.state[param]["momentum_buffer"] = buffer
        self.assertTrainsAlike(twins, 1)

    def test_mesh_whose_ranks_do_not_ascend(self):
        """DTensor's redistribute() mixes up shards there, so gradients and momentum were those of others."""
        # Only the second dimension of the grid descends.
        line = DeviceMesh("cpu", [3, 1, 0, 2])
        grid = DeviceMesh("cpu", [[1, 0], [3, 2]])
        for mesh, placement, other in (
            (line, (R,), (S0,)),
            (grid, (R, S0), (R, S1)),
        ):
            with self.subTest(mesh=mesh, placement=placement, other=other):
                spec = Spec((8, 8), mesh, placement)
                twins = Twins([spec._replace(gradients=other)])
                twins.set_gradients()
                step, (param,) = twins.optimizer.step, twins.params
                pattern = "gradient's .*ascend"
                self.assertRaisesEverywhere(step, RuntimeError, pattern)
                twins.optimizer.state[param]["momentum_buffer"] = param.grad
                param.grad = place(twins.singles[0].grad, spec)
                pattern = "momentum buffer.*ascend"
                self.assertRaisesEverywhere(step, RuntimeError, pattern)
        # Each rank has all of it.
        twins = Twins([Spec((8, 8), line, (S0,), gradients=(R,))])
        self.assertTrainsAlike(twins, 1)

    def test_optimizers_of_one_config(self):
        """A config served one optimizer at a time."""
        config = create_dtensor_config()
        common_muon.wrap_functions(config, "assign_fn")
        placed = specs(mesh_of(4), [(S0,), (R,)], [(8, 8)])
        first, second = Twins(placed, config), Twins(placed, config, seeds=[10, 11])
        self.assertTrainsAlike(second, 1)
        self.assertTrainsAlike(first, 1)
        # It builds a new engine.
        first.params[0].requires_grad_(False)
        first.step([0])
        self.assertParity(first)
        # Another world may give this process another rank.
        self.assertNotIn("rank", config.state)


class TestMuonLongRuns(common_muon.OnCPU):
    def run_flat(self, call, times, rebuilds=0):
        """No resource grows in each call, except a few small entries for each of its ``rebuilds``."""
        for number in range(times):
            call(number)
            if number == WARM:
                before = usage()
        after, counted = usage(), times - WARM
        few = rebuilds * counted
        allowed = {
            "keys in the store": 12 * few,
            "resident": 2**23,
        }
        grown = {what: after[what] - before[what] for what in before}
        found = [f"{n} {what}" for what, n in grown.items() if n > allowed.get(what, 0)]
        self.assertEverywhere(found, f"more after {counted} times")

    def test_fsdp2_tp(self):
        mesh = common_muon.grid_of(2, 2)
        model = common_modules.make_model(width=9, bias=False)
        common_modules.tensor_parallel(model, mesh["b"])
        params = fully_shard(model, mesh=mesh["a"]).parameters()
        twins = Twins(
            [Spec(param.shape, param.device_mesh, param.placements) for param in params]
        )

        def step(number):
            # Some lack a gradient now and then, as unused experts do.
            missing = () if number % 7 == 0 else [number % 3]
            twins.step(missing)

        self.run_flat(step, STEPS)
        self.assertParity(twins)

    def test_optimizers_made_and_dropped(self):
        mesh, optimizers = common_muon.grid_of(2, 2), weakref.WeakSet()

        def make_one(number):
            twins = Twins(specs(mesh, [(S0, S1), (R, S0)]))
            optimizers.add(twins.optimizer)
            # A frozen parameter makes the next step rebuild the engine.
            twins.params[0].requires_grad_(False)
            twins.step(missing=[0])

        self.run_flat(make_one, OPTIMIZERS, rebuilds=1)
        with self.everywhere():
            self.assertEqual(len(optimizers), 0)


class TestMuonReplaced(common_muon.OnCPU):
    """Parameters that frameworks change under a Muon. The single process makes the same changes."""

    def test_parameter_keeps_its_entry_of_the_config(self):
        """A parameter that came back elsewhere was cut along another one's dimension, without an error."""
        strategy, dims = Strategy(mesh_of(4), "tp"), {0: 0, 1: 1}
        placed = [strategy.cut((8, 8), dims.get(index)) for index in range(4)]
        twins = Twins(placed, strategy.config(tp_dim_per_param=dims))
        twins.step()
        lists = [o.param_groups[0]["params"] for o in (twins.optimizer, twins.single)]
        lists += [twins.specs, twins.seeds, twins.params, twins.singles]
        left = [each.pop(0) for each in lists]
        twins.step()
        for each, one in zip(lists, left):
            each.append(one)
        self.assertTrainsAlike(twins, 2)

    def test_marks_say_the_tp_dim_if_the_user_does_not(self):
        strategy, dims = Strategy(mesh_of(4), "tp"), (0, 1, None)
        given = {"tp_dim_per_param": {0: 0, 1: 1}}
        for options in {}, given:
            with self.subTest(options=options):
                placed = [strategy.cut((8, 12), dim) for dim in dims]
                twins = Twins(placed, strategy.config(**given))
                # No mark counts for what the user leaves out.
                for param, dim in zip(twins.params, (0, 1, 0 if options else -1)):
                    param.tp_dim = dim
                config = strategy.config(**options)
                twins.optimizer = Muon(twins.params, distributed_config=config)
                self.assertTrainsAlike(twins, 1)

    def test_plain_matrix_next_to_tensor_parallelism(self):
        """An int is for models without placements. PyTorch's tensor parallelism left this matrix whole."""
        mesh = mesh_of(4)
        config = Strategy(mesh, "tp").config(tp_dim_per_param=0)
        placed = [Spec((8, 12), mesh, (S0,)), Spec((8, 12), None, None)]
        self.assertTrainsAlike(Twins(placed, config), 2)


if __name__ == "__main__":
    run_tests()

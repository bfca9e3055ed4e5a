# Owner(s): ["oncall: distributed"]
"""Incidents of the distributed Muon, each with a case that lacks the incident's cause; and long runs.

Long runs equal one process to the end, and use no more memory, threads or groups over time.
"""

import gc
import os
import sys
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.optim import Muon
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcessTestCase,
)
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
    Twins,
)


# Steps and optimizers of a long run. With MUON_TEST_LONG=1, they have a realistic number.
STEPS, OPTIMIZERS = (3000, 500) if os.environ.get("MUON_TEST_LONG") == "1" else (20, 20)
# After that many of them, everything that is made once exists.
WARM = 10


def usage():
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
    if common_muon.device().type == "cuda":
        torch.cuda.synchronize()
        found["bytes on the GPU"] = torch.cuda.memory_allocated()
    return found


class TestMuonRegressions(common_muon.OnCPU):
    def test_autocast_does_not_reach_the_iteration(self):
        twins = Twins(specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5)]))
        twins.set_gradients()
        twins.single.step()
        with torch.autocast("cpu", dtype=torch.float16):
            twins.optimizer.step()
        self.assertParity(twins)

    def test_construction_without_numpy(self):
        """torch's all_gather_object needs NumPy, and ranks said that one of them had ended."""
        missing = RuntimeError("Numpy is not available")
        with (
            mock.patch.object(torch.Tensor, "numpy", side_effect=missing),
            mock.patch.dict(sys.modules, {"numpy": None}),
        ):
            twins = Twins(specs(mesh_of(4), [(S0,), (R,)], [(8, 8)]))
            twins.step()
        self.assertParity(twins)

    def test_checkpoint_after_a_step_of_the_experts_only(self):
        """Ranks without momentum made the step that a checkpoint asks for; others had some, and did not."""
        for missing in ((), (0,), (0, 1)):
            with self.subTest(missing=missing):
                placed = [
                    Spec((8, 8), mesh_of(4), (S0,)),
                    Spec((9, 6), mesh_of(2), (S0,)),
                ]
                # Only ranks 2 and 3 hold the expert.
                twins = Twins(placed if self.rank >= 2 else placed[:1])
                twins.step(missing)
                for param in twins.params:
                    param.grad = None
                module = torch.nn.ParameterList(twins.params)
                state = get_optimizer_state_dict(module, twins.optimizer)["state"]
                with self.everywhere():
                    self.assertEqual(
                        sorted(state), sorted(dict(module.named_parameters()))
                    )
                    for kept in state.values():
                        self.assertIn("momentum_buffer", kept)
                twins.step()
                self.assertParity(twins, f"missing at first: {missing}")

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
        for names in ((), ("gather_fn",)):
            with self.subTest(names=names):
                config = create_auto_config(expert_assignments=dict(enumerate(order)))
                common_muon.wrap_functions(config, *names)
                twins = Twins([Spec((6, 4), mesh, (R,))] * 2, config, seeds=order)
                # Ranks may name an expert differently.
                named = [(f"{self.rank}.{i}", p) for i, p in enumerate(twins.params)]
                twins.optimizer = Muon(named, distributed_config=config)
                twins.set_gradients()
                for index, expert in enumerate(order):
                    param, single = twins.params[index], twins.singles[index]
                    # All of the gradient on one rank.
                    term = torch.zeros_like(single.grad)
                    if self.rank == 0:
                        term = single.grad
                    param.grad = DTensor.from_local(term, mesh, [Partial()])
                    momentum = full(4 + expert, (6, 4))
                    sharded = place(momentum, Spec((6, 4), mesh, (S0,)))
                    twins.optimizer.state[param]["momentum_buffer"] = sharded
                    twins.single.state[single]["momentum_buffer"] = momentum
                twins.single.step()
                twins.optimizer.step()
                self.assertParity(twins, f"wrapped: {names}")

    def test_order_across_meshes(self):
        """Matrices of a mesh and of a part of it meet in one grid, and ranks compare the order on each mesh alone."""
        mesh, order = common_muon.grid_of(2, 2), (0, 1) if self.rank % 2 else (1, 0)
        placed = [Spec((4, 8, 6), mesh, (S0, S1)), Spec((8, 6), mesh["b"], (S0,))]
        in_order = [placed[number] for number in order]
        twins = Twins(in_order, seeds=order, allow_batched_matrices=True)
        self.assertTrainsAlike(twins, 2)

    def test_unusable_momentum_everywhere(self):
        """A rank with an empty shard left the step, and the others compared values of replicas."""
        mesh = common_muon.grid_of(2, 2)
        twins = Twins([Spec((8, 6), mesh, (R, S0)), Spec((1, 6), mesh, (R, S0))])
        twins.set_gradients()
        state = twins.optimizer.state[twins.params[0]]
        state["momentum_buffer"] = torch.ones(6, 8)
        for _ in range(2):
            self.assertRaisesEverywhere(
                twins.optimizer.step,
                RuntimeError,
                r"momentum buffer has shape \(6, 8\)",
            )
        del state["momentum_buffer"]
        twins.optimizer.step()
        twins.single.step()
        # The steps that were broken off count as steps, and moved nothing.
        self.assertParity(twins)

    def test_mesh_whose_ranks_do_not_ascend(self):
        """DTensor's redistribute() mixes up shards there, so gradients and momentum were those of others."""
        line = DeviceMesh(common_muon.device().type, [3, 1, 0, 2])
        # Only the second dimension descends.
        grid = DeviceMesh(common_muon.device().type, [[1, 0], [3, 2]])
        for mesh, placement, of_grad in (
            (line, (S0,), (S1,)),
            (line, (R,), (S0,)),
            (line, (S0,), (Partial(),)),
            (line, (S0,), (R,)),
            (grid, (R, S0), (R, S1)),
        ):
            with self.subTest(mesh=mesh, placement=placement, of_grad=of_grad):
                spec, moved = (Spec((8, 8), mesh, p) for p in (placement, of_grad))
                twins = Twins([spec])
                twins.set_gradients()
                (param,), grad, muon = (
                    twins.params,
                    twins.singles[0].grad,
                    twins.optimizer,
                )
                param.grad = place(grad, moved)
                if of_grad == (R,):
                    twins.single.step()
                    muon.step()
                    self.assertParity(twins)
                    continue
                self.assertRaisesEverywhere(
                    muon.step, RuntimeError, "gradient's .*ascend"
                )
                param.grad = place(grad, spec)
                muon.state[param]["momentum_buffer"] = place(grad, moved)
                pattern = "momentum buffer.*ascend"
                self.assertRaisesEverywhere(muon.step, RuntimeError, pattern)

    def test_optimizers_of_one_config(self):
        """A config served one optimizer at a time."""
        config = create_dtensor_config()
        common_muon.wrap_functions(config, "assign_fn")
        placed = specs(mesh_of(4), [(S0,), (R,)], [(8, 8)])
        first, second = Twins(placed, config), Twins(placed, config, seed=10)

        def step(*order, missing=()):
            for twins in order:
                twins.step(missing)
                self.assertParity(twins)

        step(second, first)
        step(first, second)
        # Both build a new engine.
        first.params[0].requires_grad_(False)
        second.params[1].requires_grad_(False)
        step(second, missing=[1])
        step(first, missing=[0])
        step(first, missing=[0])
        step(second, missing=[1])
        with self.everywhere():
            # Another world may give this process another rank.
            self.assertNotIn("rank", config.state)


class LongRuns(common_muon.ParityAssertions):
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


class TestMuonLongRuns(LongRuns, common_muon.OnCPU):
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


class TestMuonLongRunsOnGPUs(common_muon.OnGPUs, LongRuns, MultiProcessTestCase):
    gpus = 4
    seconds = 300

    @common_muon.with_process_group
    def test_fsdp2_tp(self):
        super().test_fsdp2_tp()


# Even, uneven, and with empty pieces on four ranks.
SHAPES = [(8, 8), (7, 5), (3, 9)]


class TestMuonReplaced(common_muon.OnCPU):
    """Parameters that frameworks change under a Muon. The single process makes the same changes."""

    def placed(self, *placements, mesh=None):
        """Matrices on a mesh; plain ones, whole on each rank, without placements."""
        mesh = (mesh or mesh_of(4)) if placements else None
        return [Spec(shape, mesh, placements) for shape in SHAPES]

    def trained(self, placed, config=None):
        twins = Twins(placed, config, lr=0.1)
        twins.step()
        return twins

    def replacement(self, twins, index, spec):
        """Other values for number ``index``, which is ``spec`` from now on."""
        twins.specs[index] = spec
        twins.seeds[index] += 500
        whole = full(twins.seeds[index], spec.shape, spec.dtype)
        twins.singles[index].data.copy_(whole)
        return place(whole, spec)

    def replace(self, twins, index, spec):
        value = self.replacement(twins, index, spec)
        twins.params[index] = nn.Parameter(value)
        twins.optimizer.param_groups[0]["params"] = list(twins.params)

    def test_placements(self):
        """Local shapes stay the same."""
        grid = common_muon.grid_of(2, 2)
        twins = self.trained([Spec((8, 8), grid, (S0, S1))])
        (param,), twins.specs = twins.params, [Spec((8, 8), grid, (S1, S0))]
        other = place(twins.singles[0].detach(), twins.specs[0])
        param._local_tensor, param._spec = other._local_tensor, other._spec
        self.assertTrainsAlike(twins, 2)

    def test_model_on_meta_is_filled_later(self):
        with torch.device("meta"):
            layers = [nn.Linear(*shape[::-1], bias=False) for shape in SHAPES]
        model = fully_shard(nn.Sequential(*layers), mesh=mesh_of(4))
        optimizer = Muon(model.parameters(), lr=0.1, distributed_config="auto")
        model.to_empty(device="cpu")
        twins = Twins(self.placed(S0), lr=0.1)
        for param, filled in zip(model.parameters(), twins.params, strict=True):
            with torch.no_grad():
                param.to_local().copy_(filled.to_local())
        twins.params, twins.optimizer = list(model.parameters()), optimizer
        self.assertTrainsAlike(twins, 2)

    def test_change_on_one_rank_only(self):
        """Rank 3 waits for the ranks that shared matrices with it, even if it shares none any more."""
        for becomes_plain in (False, True):
            with self.subTest(becomes_plain=becomes_plain):
                # This breaks the group. DTensor's caches tell its mesh from others by its name.
                group = dist.new_group()
                name = f"changed {becomes_plain}"
                mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))
                twins = self.trained(self.placed(S0, mesh=mesh))
                if self.rank == 3 and becomes_plain:
                    for index, shape in enumerate(SHAPES):
                        self.replace(twins, index, Spec(shape, None, ()))
                elif self.rank == 3:
                    self.replace(twins, 1, twins.specs[1])
                self.assertNothingMovesAfterAChange(twins, group)

    def assertNothingMovesAfterAChange(self, twins, group):
        """Rank 3 has changed parameters, and the others have not."""
        before = [common_muon.local(param.detach()).clone() for param in twins.params]
        found = common_muon.everyone(self.outcome(twins.step))
        with self.everywhere(f"{found}"):
            self.assertEqual([kind for kind, _ in found], ["RuntimeError"] * 4)
            for _, text in found:
                self.assertRegex(text, "changed on some of the ranks.* of shape")
            for param, old in zip(twins.params, before, strict=True):
                self.assertTrue(torch.equal(common_muon.local(param.detach()), old))


if __name__ == "__main__":
    run_tests()

# Owner(s): ["oncall: distributed"]
"""The functions of a config outside of a step, and functions of users on several ranks."""

import copy
import itertools
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_modules import (
    check_module,
    make_units,
    wrap,
)
from torch.testing._internal.distributed._muon.common_muon import (
    full,
    grid_of,
    local,
    mesh_of,
    OnCPU,
    piece_of,
    place,
    R,
    S0,
    Spec,
    specs,
    Twins,
    wrap_functions,
)


class TestMuonRoundTrip(OnCPU):
    def check_round_trip(self, config, tensor, spec):
        whole = config.gather_fn(tensor, 3, config.state)
        self.assertNotIsInstance(whole, DTensor)
        self.assertEqual(tuple(whole.shape), spec.shape)
        for other in common_muon.everyone(whole):
            self.assertTrue(torch.equal(local(place(other, spec)), local(tensor)))
        # Each rank cuts its own tensor, whatever the other ranks have.
        given = whole + self.rank
        with Recorder() as seen:
            mine = config.redistribute_fn(given, 0, config.state)
            again = config.redistribute_fn(whole, 3, config.state)
        self.assertEqual(seen.names, [])
        self.assertTrue(torch.equal(local(mine), piece_of(given, spec)))
        self.assertEqual(common_muon.placed(again), common_muon.placed(tensor))
        self.assertTrue(torch.equal(local(again), local(tensor)))

    def test_gather_then_redistribute_is_the_identity(self):
        placed = []
        for mesh in (grid_of(2, 2), mesh_of(2), mesh_of(1)):
            placed += specs(mesh, common_muon.all_placements(mesh), [(7, 5)])
        strided = _StridedShard(0, split_factor=2)
        placed.append(Spec((8, 5), grid_of(2, 2), (strided, S0)))
        placed.append(Spec((6, 3, 5), mesh_of(2), (S0,)))
        dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.float64))
        placed = [spec._replace(dtype=next(dtypes)) for spec in placed]
        twins = Twins(placed, lr=0.1, allow_batched_matrices=True)
        # An unused config, and one before and after a step.
        for config in (create_dtensor_config(), twins.config, twins.config):
            with self.subTest(config=config):
                for index, (param, spec) in enumerate(zip(twins.params, twins.specs)):
                    config.state["current_param_idx"] = index
                    with self.everywhere(f"{spec}"):
                        self.check_round_trip(config, param.detach(), spec)
                del config.state["current_param_idx"]
                self.assertTrainsAlike(twins, 1)

    def test_gather_of_another_tensor(self):
        """Only some ranks' pieces have another shape than before."""
        config = create_auto_config(fsdp_process_group=dist.group.WORLD)
        whole = torch.ones(8, 3)
        with self.everywhere():
            with self.assertRaisesRegex(ValueError, "call gather_fn before"):
                config.redistribute_fn(whole, 0, config.state)
        for rows in (7, 8):
            with self.subTest(rows=rows):
                whole = torch.arange(3.0 * rows).view(rows, 3)
                piece = whole.tensor_split(4)[self.rank]
                found = config.gather_fn(piece, 0, config.state)
                with self.everywhere(f"{rows} rows"):
                    self.assertTrue(torch.equal(found, whole))
        with self.everywhere():
            # These were silently cut to this rank's shape, and to this rank's matrices.
            with self.assertRaisesRegex(ValueError, r"of shape \(8, 3\), not \(3, 8\)"):
                config.redistribute_fn(whole.T, 0, config.state)
            with self.assertRaisesRegex(ValueError, "other matrices of a stack"):
                config.gather_fn(torch.ones(2, 3, 4), 0, config.state)


class TestMuonUserFunctions(OnCPU):
    def test_each_rank_goes_by_its_own_gradient(self):
        """Muon makes no collective of its own here, so it cannot compare the ranks."""
        config = create_dtensor_config()
        wrap_functions(config, "gather_fn", "redistribute_fn")
        twins = Twins(specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5)]), config)
        twins.set_gradients([1] if self.rank == 2 else [])
        param = local(twins.params[1].detach())
        before = param.clone()
        with Recorder() as seen:
            twins.optimizer.step()
        with self.everywhere():
            self.assertNotIn("all_reduce", seen.names)
            self.assertEqual(torch.equal(param, before), self.rank == 2)

    def test_gather_over_fsdp1(self):
        """No optimizer has read the parameters, and all of them come as the first one. Some ranks have as many elements of
        two of them, and other ranks have not.
        """
        torch.manual_seed(0)
        one = nn.Sequential(*(nn.Linear(4, 8, bias=False) for _ in range(3)))
        model = wrap(copy.deepcopy(one), True, units=None)
        config = create_auto_config(module=model)
        for shard, whole in zip(model.parameters(), one.parameters(), strict=True):
            found = config.gather_fn(shard, 0, config.state)
            with self.everywhere():
                self.assertEqual(found, whole, rtol=0, atol=0)

    def test_wrapped_functions_over_fsdp1(self):
        """They give the bits of the engine, and cannot tell apart the matrices of a flat parameter."""
        one = make_units()
        model = wrap(make_units(), True)
        config = create_auto_config(module=model)
        wrap_functions(config, "gather_fn")
        pieces = {"one": one, "fsdp": model.process_group}
        inputs = partial(full, shape=(5, 9))
        check_module(self, model, config, inputs=inputs, **pieces)
        flat = wrap(make_units(), units=None)
        (given,) = flat.parameters()
        config = create_auto_config(fsdp_process_group=flat.process_group)
        config.assign_fn([given], config.state)
        gather = partial(config.gather_fn, given.detach(), 0, config.state)
        pattern = "parameter 0 .*holds 6 matrices"
        self.assertRaisesEverywhere(gather, ValueError, pattern)
        wrap_functions(config, "gather_fn")
        build = partial(Muon, [given], distributed_config=config)
        self.assertRaisesEverywhere(build, ValueError, pattern)

    def test_versions_after_an_error(self):
        """Nobody hears of a problem here, so the other parameters move."""
        config = create_dtensor_config()
        wrap_functions(config, "gather_fn")
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8), (8, 8)]), config)
        twins.set_gradients()
        twins.optimizer.step()
        moves, lost = twins.params
        twins.optimizer.state[lost]["momentum_buffer"] = "lost"
        version = moves._version
        pattern = "must be a Tensor but is a str"
        self.assertRaisesEverywhere(twins.optimizer.step, RuntimeError, pattern)
        with self.everywhere():
            self.assertGreater(moves._version, version)


if __name__ == "__main__":
    run_tests()

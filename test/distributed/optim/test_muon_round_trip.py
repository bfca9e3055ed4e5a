# Owner(s): ["oncall: distributed"]
"""The functions of a config outside of a step, and functions of users on several ranks."""

import functools
import itertools
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    DistributedConfig,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_modules import Run
from torch.testing._internal.distributed._muon.common_muon import (
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
)


class TestMuonFunctions(OnCPU):
    def placed(self):
        placed = []
        for mesh in (grid_of(2, 2), mesh_of(2), mesh_of(1)):
            placed += specs(mesh, common_muon.all_placements(mesh), [(7, 5)])
        strided = _StridedShard(0, split_factor=2)
        placed.append(Spec((8, 5), grid_of(2, 2), (strided, S0)))
        return placed

    def check_round_trip(self, config, tensor, spec):
        whole = config.gather_fn(tensor, 3, config.state)
        self.assertNotIsInstance(whole, DTensor)
        self.assertEqual(tuple(whole.shape), spec.shape)
        self.assertTrue(torch.equal(local(place(whole, spec)), local(tensor)))
        # Each rank cuts its own tensor, whatever the other ranks have.
        given = whole + self.rank
        with Recorder() as seen:
            mine = config.redistribute_fn(given, 0, config.state)
            again = config.redistribute_fn(whole, 3, config.state)
        self.assertEqual(seen.names, [])
        self.assertTrue(torch.equal(local(mine), piece_of(given, spec)))
        self.assertEqual(common_muon.placed(again), common_muon.placed(tensor))
        self.assertTrue(torch.equal(local(again), local(tensor)))

    def check_round_trips(self, twins, unused):
        """An unused config, and one before and after a step."""
        for config in (unused, twins.config, twins.config):
            with self.subTest(config=config):
                for index, (param, spec) in enumerate(zip(twins.params, twins.specs)):
                    config.state["current_param_idx"] = index
                    with self.everywhere(f"{spec}"):
                        self.check_round_trip(config, param.detach(), spec)
                del config.state["current_param_idx"]
                twins.step()
                self.assertParity(twins)

    def test_gather_then_redistribute_is_the_identity(self):
        dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.float64))
        placed = [spec._replace(dtype=next(dtypes)) for spec in self.placed()]
        self.check_round_trips(Twins(placed), create_dtensor_config())

    def test_gather_of_another_tensor(self):
        """Only some ranks' pieces have another shape than before."""
        config = create_auto_config(fsdp_process_group=dist.group.WORLD)
        for rows in (7, 8, 6, 8):
            with self.subTest(rows=rows):
                full = torch.arange(3.0 * rows).view(rows, 3).neg()
                piece = full.tensor_split(4)[self.rank]
                if rows == 6:
                    config.assign_fn([piece], config.state)
                whole = config.gather_fn(piece, 0, config.state)
                with self.everywhere(f"{rows} rows"):
                    self.assertTrue(torch.equal(whole, full))
                    # The first zero is negative.
                    self.assertTrue(torch.equal(whole.signbit(), full.signbit()))
        # The first reader needs this rank's matrices of a stack only.
        stack, other = torch.arange(60.0).view(5, 4, 3), create_dtensor_config()
        piece = place(stack, Spec((5, 4, 3), mesh_of(4), (S0,)))
        other.assign_fn([piece], other.state)
        whole = other.gather_fn(piece, 0, other.state)
        with self.everywhere():
            self.assertTrue(torch.equal(whole, stack))
        # These were silently cut to this rank's shape, and to this rank's matrices.
        with self.everywhere():
            with self.assertRaisesRegex(ValueError, r"of shape \(8, 3\), not \(3, 8\)"):
                config.redistribute_fn(full.T, 0, config.state)
            with self.assertRaisesRegex(ValueError, "other matrices of a stack"):
                config.gather_fn(torch.ones(2, 3, 4), 0, config.state)

    def test_each_rank_goes_by_its_own_gradient(self):
        """Muon makes no collective of its own here, so it cannot compare the ranks."""
        placed = specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5)])
        config = create_dtensor_config()
        common_muon.wrap_functions(config, "gather_fn", "redistribute_fn")
        twins = Twins(placed, config)
        twins.set_gradients()
        if self.rank == 2:
            twins.params[1].grad = None
        before = [local(p.detach()).clone() for p in twins.params]
        with Recorder() as seen:
            twins.optimizer.step()
        with self.everywhere():
            self.assertNotIn("all_reduce", seen.names)
            for index, (param, old) in enumerate(zip(twins.params, before)):
                stayed = torch.equal(local(param.detach()), old)
                self.assertEqual(stayed, (self.rank, index) == (2, 1))

    def test_functions_that_return_their_argument(self):
        """Without a broadcast, the update stays with its owner."""

        def sent(update, owner, state):
            dist.broadcast(update, owner)
            return update

        for redistribute in (sent, lambda update, owner, state: update):
            with self.subTest(redistribute=redistribute):
                functions = lambda p, s: {0: [0]}, lambda t, owner, s: t, redistribute
                param = nn.Parameter(torch.ones(4, 4))
                param.grad = torch.eye(4)
                muon = Muon(
                    [param], distributed_config=DistributedConfig(*functions, {})
                )
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    muon.step()
                warned = any("diverge" in str(w.message) for w in caught)
                with self.everywhere():
                    self.assertEqual(warned, redistribute is not sent and self.rank > 0)

    def test_piece_of_a_parameter_that_nothing_is_known_of(self):
        config = create_dtensor_config()
        with self.everywhere():
            with self.assertRaisesRegex(ValueError, "call gather_fn before"):
                config.redistribute_fn(torch.ones(8, 6), 0, config.state)

    def test_owner_that_hands_on_something_else(self):
        """The other rank of each pair waits for the owner until the timeout of their group."""
        pairs = [(0, 1), (2, 3)]
        groups = [dist.new_group(pair, timeout=timedelta(seconds=2)) for pair in pairs]
        mesh = DeviceMesh.from_group(groups[self.rank // 2], "cpu")
        config = create_dtensor_config()
        built = config.redistribute_fn

        def redistribute(full, rank, state):
            if rank == self.rank:
                full = None if rank < 2 else full[:4]
            return built(full, rank, state)

        config.redistribute_fn = redistribute
        twins = Twins([Spec((8, 8), mesh, (S0,))], config)
        twins.set_gradients()
        (owner,) = [r for r, own in twins.optimizer.assignments.items() if own]
        pattern = ""
        if owner == self.rank:
            given = "None" if owner < 2 else r"\(4, 8\)"
            pattern = f"redistribute_fn was given {given}"
        self.assertRaisesEverywhere(twins.optimizer.step, RuntimeError, pattern)

    def test_wrapped_functions_over_fsdp1(self):
        """They give the bits of the engine, and cannot tell apart the matrices of a flat parameter."""
        flat, orig = Run(False, units=None), Run(True)
        for run in (flat, orig):
            common_muon.wrap_functions(run.config, "gather_fn")
        orig.build()
        for step in range(2):
            orig.step()
            self.assertEverywhere(orig.alone.problems(), f"step {step}")
        pattern = "parameter 0 .*holds 8 matrices"
        self.assertRaisesEverywhere(flat.build, ValueError, pattern)
        flat = Run(False, units=None)
        config, (given,) = flat.config, flat.model.parameters()
        config.assign_fn([given], config.state)
        gather = functools.partial(config.gather_fn, given.detach(), 0, config.state)
        pattern = "parameter 0 holds 8 matrices"
        self.assertRaisesEverywhere(gather, ValueError, pattern)


if __name__ == "__main__":
    run_tests()

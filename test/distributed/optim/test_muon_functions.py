# Owner(s): ["oncall: distributed"]
"""The functions of a DistributedConfig: a factory's, wrapped, replaced, and written from scratch."""

import logging
import re
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    all_placements,
    Collectives,
    everyone,
    full,
    GlooOnCPU,
    grid_of,
    local,
    mesh_of,
    NewtonSchulzCalls,
    ParityAssertions,
    piece_of,
    place,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)


class Recorder:
    """Wraps the two functions of ``config`` that move data, and records their calls."""

    def __init__(self, config, gather=True, redistribute=True):
        self.config = config
        self.calls = []
        self.given = {}
        self._gather, self._redistribute = config.gather_fn, config.redistribute_fn
        if gather:
            config.gather_fn = self.gather
        if redistribute:
            config.redistribute_fn = self.redistribute

    def note(self, kind, tensor, rank, state):
        index = state["current_param_idx"]
        self.calls.append((kind, index, rank, state["current_owner"]))
        self.given[kind, index] = None if tensor is None else tensor.clone()

    def gather(self, tensor, rank, state):
        self.note("gather", tensor, rank, state)
        return self._gather(tensor, rank, state)

    def redistribute(self, tensor, rank, state):
        self.note("redistribute", tensor, rank, state)
        return self._redistribute(tensor, rank, state)


@requires_gloo()
class TestMuonFunctions(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def placed(self):
        """Every placement on a mesh of all ranks, on pairs and on single ranks."""
        return [
            spec
            for mesh in (grid_of(2, 2), mesh_of(2), mesh_of(1))
            for spec in specs(mesh, all_placements(mesh), [(7, 5)])
        ]

    # Outside of step()

    def check_round_trip(self, config, tensors, placed):
        for i, (tensor, spec) in enumerate(zip(tensors, placed)):
            config.state["current_param_idx"] = i
            whole = config.gather_fn(tensor, 3, config.state)
            self.assertNotIsInstance(whole, DTensor)
            self.assertEqual(tuple(whole.shape), spec.shape)
            self.assertTrue(torch.equal(local(place(whole, spec)), local(tensor)))
            piece = config.redistribute_fn(whole, 3, config.state)
            self.assertEqual(piece.placements, tensor.placements)
            self.assertEqual(piece.device_mesh, tensor.device_mesh)
            self.assertEqual(piece.shape, tensor.shape)
            self.assertTrue(torch.equal(local(piece), local(tensor)), f"{spec}")

    def test_gather_then_redistribute_is_the_identity(self):
        placed = self.placed()
        dtypes = (torch.float32, torch.bfloat16, torch.float64)
        tensors = [
            place(full(i, spec.shape, dtypes[i % 3]), spec)
            for i, spec in enumerate(placed)
        ]
        config = create_dtensor_config()
        config.assign_fn(tensors, config.state)
        self.check_round_trip(config, tensors, placed)
        # Between steps too.
        twins = Twins(placed)
        twins.step()
        params = [param.detach() for param in twins.params]
        self.check_round_trip(twins.config, params, placed)
        twins.step()
        self.assertParity(twins)

    def test_redistribute_outside_of_step_does_not_communicate(self):
        placed = self.placed()
        tensors = [place(full(0, spec.shape), spec) for spec in placed]
        config = create_dtensor_config()
        with Collectives() as seen:
            config.assign_fn(tensors, config.state)
            for i, spec in enumerate(placed):
                config.state["current_param_idx"] = i
                # Each rank cuts its own tensor, whatever the other ranks have.
                given = full(100 * self.rank + i, spec.shape)
                piece = config.redistribute_fn(given, 0, config.state)
                self.assertTrue(torch.equal(local(piece), piece_of(given, spec)))
        self.assertEqual(seen.calls, [])

    # Replaced and wrapped

    def test_wrappers_that_delegate_give_the_bits_of_the_engine(self):
        cases = (
            ((True, False), 0, torch.float32),
            ((False, True), 1, torch.bfloat16),
            ((True, True), 2, torch.float64),
        )
        for (gather, redistribute), prefetch, dtype in cases:
            placed = [spec._replace(dtype=dtype) for spec in self.placed()]
            config = create_dtensor_config(prefetch_count=prefetch)
            recorder = Recorder(config, gather, redistribute)
            twins = Twins(placed, config, nesterov=prefetch != 1, lr=0.02)
            with NewtonSchulzCalls() as calls:
                self.assertTrainsAlike(twins, 2, f"{gather} {redistribute} {dtype}")
            kinds = gather + redistribute
            self.assertEqual(len(recorder.calls), 2 * len(placed) * kinds)
            owned = twins.optimizer.assignments.get(self.rank, [])
            # This process also runs the single one.
            self.assertEqual(len(calls.shapes), 2 * (len(owned) + len(placed)))

    def test_wrappers_without_gradients(self):
        placed = specs(mesh_of(4), [(S0,), (S1,), (R,)], [(8, 8), (3, 9)])
        config = create_dtensor_config()
        recorder = Recorder(config)
        twins = Twins(placed, config)
        absent = [range(6), (1, 4), (), (0, 5)]
        self.assertTrainsAlike(twins, 4, missing=absent.__getitem__)
        self.assertEqual(len(recorder.calls), 4 * 2 * 6)

    def test_each_rank_goes_by_its_own_gradient(self):
        """Muon makes no collective of its own here, so it cannot compare the ranks."""
        placed = specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5)])
        config = create_dtensor_config()
        Recorder(config)
        twins = Twins(placed, config)
        twins.set_gradients()
        if self.rank == 2:
            twins.params[1].grad = None
        before = [local(p.detach()).clone() for p in twins.params]
        with Collectives() as seen:
            twins.optimizer.step()
        with self.everywhere():
            self.assertNotIn("allreduce_", {call.name for call in seen.calls})
            for i, (param, old) in enumerate(zip(twins.params, before)):
                stayed = torch.equal(local(param.detach()), old)
                self.assertEqual(stayed, (self.rank, i) == (2, 1))

    def test_owner_that_hands_on_something_else(self):
        """The other rank of each pair waits for the owner until the timeout of their group."""
        pairs = [(0, 1), (2, 3)]
        groups = [dist.new_group(p, timeout=timedelta(seconds=2)) for p in pairs]
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
        outcome = self.outcome(twins.optimizer.step)
        (owner,) = [r for r, own in twins.optimizer.assignments.items() if own]
        outcomes = everyone(outcome)
        with self.everywhere(f"{outcomes}"):
            self.assertEqual([kind for kind, _ in outcomes], ["RuntimeError"] * 4)
            given = "None" if owner < 2 else r"\(4, 8\)"
            self.assertRegex(outcomes[owner][1], f"redistribute_fn was given {given}")

    def test_assign_fn_replaced_runs_on_the_engine(self):
        placed = specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5), (3, 9)])
        config = create_dtensor_config()
        config.assign_fn = lambda params, state: {1: list(range(len(params)))}
        twins = Twins(placed, config)
        twins.set_gradients()
        with NewtonSchulzCalls() as calls, Collectives() as seen:
            twins.optimizer.step()
        twins.single.step()
        self.assertParity(twins)
        self.assertEqual(everyone(len(calls.shapes)), [0, 6, 0, 0])
        self.assertEqual(twins.optimizer.assignments, {1: list(range(6))})
        # Packed by buckets, and to and from rank 1 only.
        self.assertLessEqual(len(seen.calls), 9)
        for call in seen.calls:
            for peer, elements in enumerate(call.sent):
                if 1 not in (peer, self.rank):
                    self.assertEqual(elements, 0)

    def test_assign_fn_that_calls_the_factory_s(self):
        placed = specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5), (3, 9)])
        config = create_dtensor_config()
        built, usual = config.assign_fn, {}

        def reverse(params, state):
            self.assertEqual((state["rank"], state["world_size"]), (self.rank, 4))
            usual.update(built(params, state))
            return {3 - rank: own for rank, own in usual.items()}

        config.assign_fn = reverse
        twins = Twins(placed, config)
        self.assertTrainsAlike(twins)
        expected = {3 - rank: own for rank, own in usual.items()}
        self.assertEqual(twins.optimizer.assignments, expected)

    # Debugging

    def test_debug_mode_goes_owner_by_owner_and_says_so(self):
        mesh = mesh_of(4)
        placed = specs(mesh, [(S0,), (S1,)], [(8, 8), (7, 5), (16, 24)])
        twins = Twins(placed, create_dtensor_config(False, 0), nesterov=False)
        for step in range(2):
            twins.set_gradients()
            with self.assertLogs("torch.optim.muon", logging.DEBUG) as logs:
                twins.optimizer.step()
            twins.single.step()
            self.assertParity(twins, f"step {step}")
            with self.everywhere(f"step {step}"):
                owner_of = {
                    i: r for r, own in twins.optimizer.assignments.items() for i in own
                }
                self.assertEqual(set(owner_of.values()), {0, 1, 2, 3})
                found = []
                for line in logs.output:
                    match = re.search(
                        r"rank (\d+): (\w+) parameter (\d+) .*owner (\d+)", line
                    )
                    self.assertIsNotNone(match, line)
                    rank, index, owner = (int(match[i]) for i in (1, 3, 4))
                    self.assertEqual(rank, self.rank)
                    self.assertEqual(owner, owner_of[index])
                    found.append((match[2], index))
                self.assertEqual(len(found), len(set(found)))
                orthogonalized = [i for phase, i in found if phase == "orthogonalize"]
                self.assertEqual(
                    sorted(orthogonalized), twins.optimizer.assignments[self.rank]
                )
                applied = [i for phase, i in found if phase == "apply"]
                self.assertEqual(sorted(applied), list(range(len(placed))))
                # Each owner finishes before the next one starts.
                turns = [owner_of[i] for phase, i in found if phase == "apply"]
                self.assertEqual(turns, sorted(turns))

    def test_debug_mode_is_quiet_unless_asked(self):
        twins = Twins(specs(mesh_of(4), [(S0,)]), create_dtensor_config(False, 0))
        with self.assertNoLogs("torch.optim.muon", logging.INFO):
            twins.step()


if __name__ == "__main__":
    run_tests()

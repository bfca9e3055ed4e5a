# Owner(s): ["oncall: distributed"]
"""Mistakes around the distributed Muon: every rank hears of them, and none waits for ever."""

import dataclasses
import re
import sys
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Muon
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    everyone,
    full,
    GlooOnCPU,
    grid_of,
    local,
    mesh_of,
    ParityAssertions,
    place,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)


def parameter(spec, seed=0):
    return torch.nn.Parameter(place(full(seed, spec.shape, spec.dtype), spec))


def snapshot(params):
    return [local(p.detach()).clone() for p in params]


@requires_gloo()
class TestMuonAgreement(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def build(self, placed, change=None, named=True, **options):
        """Makes an optimizer; ``change`` gets the list of (name, parameter) pairs."""
        pairs = [(f"w{i}", parameter(spec, i)) for i, spec in enumerate(placed)]
        if change is not None:
            pairs = change(pairs)
        options.setdefault("distributed_config", create_dtensor_config())
        self.before = [p.detach() for _, p in pairs]
        return Muon(pairs if named else [p for _, p in pairs], **options)

    def assertRefused(self, kind, pattern, placed=None, change=None, **options):
        """:meth:`build` raises the same error on all ranks."""
        if placed is None:
            placed = self.placed()
        self.assertRaisesEverywhere(
            lambda: self.build(placed, change, **options), kind, pattern
        )

    def mesh_of_its_own(self, name, ranks=None):
        """A mesh over a new group, which a test may break. DTensor's caches know meshes by their names."""
        group = dist.new_group(ranks, timeout=timedelta(seconds=2))
        if ranks is not None and self.rank not in ranks:
            return None
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))

    def placed(self):
        return specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5)])

    def test_different_parameters(self):
        for field, value, pattern in [
            ("shape", (7, 6), r"shape is \(7, 5\) on rank 0 and \(7, 6\) on rank 2"),
            ("dtype", torch.bfloat16, "dtype is torch.float32 on rank 0"),
            ("placements", (S1,), "rank 0.*rank 2"),
            ("placements", (R,), "rank 0.*rank 2"),
        ]:
            placed = self.placed()
            if self.rank == 2:
                placed[1] = placed[1]._replace(**{field: value})
            self.assertRefused(ValueError, f"parameter 1 'w1'.*{pattern}", placed)
        placed = self.placed()[self.rank == 3 :]
        self.assertRefused(ValueError, "ranks disagree", placed)

        def freeze(pairs):
            pairs[2][1].requires_grad_(self.rank != 1)
            return pairs

        pattern = "'w2'.*requires_grad is True on rank 0 and False on rank 1"
        self.assertRefused(ValueError, pattern, change=freeze)

    def reverse(self, pairs):
        return pairs[::-1] if self.rank == 1 else pairs

    def test_different_order(self):
        self.assertRefused(
            ValueError,
            "ranks disagree about parameter 0 'w0'.*name is w0 on rank 0 and w3 on rank 1",
            change=self.reverse,
        )
        # Without names, replicas of equal shapes differ in their values alone.
        placed = specs(mesh_of(4), [(R,)], [(8, 8)] * 2)
        optimizer = self.build(placed, self.reverse, named=False)
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        self.assertRaisesEverywhere(optimizer.step, RuntimeError, "different values")

    def test_different_hyperparameters(self):
        coefficients = (3.4, -4.7, 2.0), (3.4, -4.7, 2.1)
        for field, usual, other in [
            ("lr", 0.1, 0.2),
            ("weight_decay", 0.0, 0.2),
            ("momentum", 0.9, 0.8),
            ("nesterov", True, False),
            ("ns_coefficients", *coefficients),
            ("ns_steps", 5, 4),
            ("eps", 1e-7, 1e-6),
            ("adjust_lr_fn", None, "match_rms_adamw"),
            ("foreach", None, True),
            ("ns_algorithm", "quintic", "gram"),
        ]:
            value = other if self.rank == 2 else usual
            self.assertRefused(
                ValueError,
                f"parameter 0 'w0'.*{field} is {re.escape(f'{usual} on rank 0 and {other} on rank 2')}",
                **{field: value},
            )

    def test_different_flags_of_the_config(self):
        for flag, value, pattern in (
            ("prefetch_count", 3, "is 1 on rank 0 and 3 on rank 1"),
            ("async_gpu_parallelism", False, "is True on rank 0 and False on rank 1"),
            # Ranks compare words, which are equal here.
            ("prefetch_count", "1", "must be an int >= 0 but is '1'"),
        ):
            config = create_dtensor_config()
            if self.rank == 1:
                setattr(config, flag, value)
            self.assertRefused(
                ValueError, f"{flag} {pattern}", distributed_config=config
            )

    def test_one_rank_with_a_destroyed_parameter(self):
        def change(pairs):
            destroyed = torch.nn.Parameter(torch.ones(8, 8))
            destroyed.data = pairs[2][1].data
            return [*pairs[:2], ("w2", destroyed)] if self.rank == 1 else pairs

        self.assertRefused(ValueError, r"param\.data = dtensor", change=change)

    def assign(self, assignments):
        """A config of the factory whose assign_fn gives ``assignments``, or raises it."""

        def assign_fn(params, state):
            if isinstance(assignments, Exception):
                raise assignments
            return assignments

        return dataclasses.replace(create_dtensor_config(), assign_fn=assign_fn)

    def test_one_rank_with_a_bad_assign_fn(self):
        good = {0: [0, 1], 1: [2, 3]}
        for bad, kind, pattern in [
            ({0: [0], 1: [2, 3]}, AssertionError, r"missing \[1\].*'w1'"),
            ({0: [0, 1, 2], 9: [3]}, ValueError, "rank 9"),
            ({0: [0, 1], 2: [2, 3]}, ValueError, "'w2'.*owner is 1.*and 2 on rank 3"),
            (ValueError("no idea"), ValueError, "no idea"),
            (IndexError("no idea"), IndexError, "no idea"),
        ]:
            config = self.assign(bad if self.rank == 3 else good)
            self.assertRefused(kind, pattern, distributed_config=config)

    def test_owner_that_holds_no_piece(self):
        placed = [Spec((8, 8), mesh, (S0,)) for mesh in (mesh_of(4), mesh_of(2))]
        # Rank 2 holds no piece of what the first pair shares.
        config = self.assign({2: [0, 1]})
        self.assertRefused(
            ValueError,
            r"parameter 1 'w1'.*rank 2.*\[0, 1\]",
            placed,
            distributed_config=config,
        )

    def test_disagreement_in_one_group_reaches_those_who_share_another(self):
        """The ranks of that group cannot build. Others learn of it at their first step, at the latest."""
        grid, nested = grid_of(2, 2), (mesh_of(4), mesh_of(2))
        # Four pairs and no group of all: (0, 1), (2, 3), (0, 2), (1, 3).
        overlapping = (grid["a"], grid["b"])
        for meshes, which, culprit in (
            (nested, 1, 1),
            (nested, 0, 2),
            (overlapping, 1, 0),
            (overlapping, 0, 3),
        ):
            placed = [Spec((8, 8), mesh, (S0,)) for mesh in meshes]
            if self.rank == culprit:
                placed[which] = placed[which]._replace(shape=(8, 9))
            built = []
            outcome = self.outcome(lambda: built.append(self.build(placed)))
            dist.barrier()
            for optimizer in built:
                before = snapshot(self.before)
                for param in optimizer.param_groups[0]["params"]:
                    param.grad = torch.ones_like(param)
                outcome = self.outcome(optimizer.step)
                self.assertEqual(snapshot(self.before), before)
            outcomes = everyone((len(built), outcome))
            for count, (kind, text) in outcomes:
                self.assertEqual(kind, "RuntimeError" if count else "ValueError")
                told = "another rank failed before this step.*" * count
                self.assertRegex(text, f"{told}ranks disagree about parameter {which}")

    def test_error_at_an_end_of_a_chain_of_groups(self):
        """Rank 0 shares nothing with rank 2 or 3. Its step fails within the timeout."""
        placed = []
        for pair in ([0, 1], [1, 2], [2, 3]):
            mesh = self.mesh_of_its_own(f"chain {pair}", pair)
            if mesh is not None:
                placed.append(Spec((8, 8), mesh, (S0,)))
        options = {"named": False}
        if self.rank == 3:
            options["distributed_config"] = self.assign({})
        built = []
        outcome = self.outcome(lambda: built.append(self.build(placed, **options)))
        for optimizer in built:
            for param in self.before:
                param.grad = torch.ones_like(param)
            outcome = self.outcome(optimizer.step)
        found = everyone((len(built), outcome))
        self.assertEqual([count for count, _ in found], [1, 1, 0, 0], f"{found}")
        self.assertEqual(found[0][1][0], "RuntimeError", f"{found}")
        for _, outcome in found[1:]:
            self.assertRegex(outcome[1], r"missing \[0\]", f"{found}")

    def test_nothing_changes_before_an_error_and_all_works_after_it(self):
        placed = self.placed()
        wrong = list(placed)
        if self.rank == 2:
            wrong[0] = wrong[0]._replace(shape=(9, 9))
        config = create_dtensor_config()
        self.assertRefused(
            ValueError, "ranks disagree", wrong, distributed_config=config
        )
        expected = [parameter(spec, i) for i, spec in enumerate(wrong)]
        self.assertEqual(snapshot(self.before), snapshot(expected))
        # The config was not used up.
        self.assertTrainsAlike(Twins(placed, config))

    def test_failed_add_param_group_leaves_the_optimizer_as_it_was(self):
        mesh = mesh_of(4)
        twins = Twins(self.placed())
        twins.step()
        shapes = [(6, 6), (6, 6 + (self.rank == 1))]
        more = [parameter(Spec(shape, mesh, (S0,)), 9) for shape in shapes]
        self.assertRaisesEverywhere(
            lambda: twins.optimizer.add_param_group({"params": more}),
            ValueError,
            "parameter 5 .*shape is",
        )
        self.assertEqual(len(twins.optimizer.param_groups), 1)
        self.assertTrainsAlike(twins)

    # Several optimizers

    def two_optimizers(self, shapes, counts=(1, 1), mesh=None):
        mesh = mesh_of(4) if mesh is None else mesh
        return [
            Twins([Spec(shape, mesh, (S0,))] * count, seed=10 * i)
            for i, (shape, count) in enumerate(zip(shapes, counts, strict=True))
        ]

    def test_optimizers_stepped_in_different_orders(self):
        for shapes, counts in (
            ([(8, 8), (8, 8)], (1, 1)),
            ([(8, 8), (4, 4)], (2, 260)),
        ):
            both = self.two_optimizers(shapes, counts)
            for twins in both:
                twins.step()
                self.assertParity(twins)
            before = [snapshot(twins.params) for twins in both]
            for twins in both:
                twins.set_gradients()
            order = both[::-1] if self.rank == 2 else both
            for twins in order:
                self.assertRaisesEverywhere(
                    twins.optimizer.step,
                    RuntimeError,
                    "step different optimizers.*in the same order",
                )
            with self.everywhere(f"{shapes}"):
                for twins, old in zip(both, before, strict=True):
                    self.assertEqual(snapshot(twins.params), old)

    def test_failure_of_another_optimizer_over_the_same_ranks(self):
        """A rank that fails in one optimizer's step and then stays away is missed in the other's."""
        mesh = self.mesh_of_its_own("another")
        first, second = self.two_optimizers([(8, 8), (8, 8)], mesh=mesh)
        for twins in (first, second):
            twins.step()
            twins.set_gradients()
        first.optimizer.param_groups[0]["ns_steps"] = 100
        self.assertRaisesEverywhere(first.optimizer.step, ValueError, "less than 100")
        if self.rank != 3:
            outcome = self.outcome(second.optimizer.step)
        else:
            outcome = "RuntimeError", "Ranks [3] did not come. Use ShardedGradScaler"
        for kind, text in everyone(outcome):
            self.assertEqual(kind, "RuntimeError")
            self.assertRegex(text, r"Ranks \[3\] did not come.*ShardedGradScaler")
            self.assertNotIn("less than 100", text)

    def test_construction_without_numpy(self):
        """torch's all_gather_object needs NumPy, and ranks said that one of them had ended."""
        missing = RuntimeError("Numpy is not available")
        with (
            mock.patch.object(torch.Tensor, "numpy", side_effect=missing),
            mock.patch.dict(sys.modules, {"numpy": None}),
        ):
            with self.assertRaisesRegex(RuntimeError, "not available"):
                dist.all_gather_object([None] * 4, self.rank)
            twins = Twins(self.placed())
            twins.step()
        self.assertParity(twins)

    def test_mismatch_names_the_first_parameters_and_counts_the_others(self):
        optimizer = self.build([Spec((8, 8), mesh_of(4), (S0,))] * 9)
        for i, param in enumerate(optimizer.param_groups[0]["params"]):
            if self.rank != 1 or i == 0:
                param.grad = torch.ones_like(param)
        self.assertRaisesEverywhere(
            optimizer.step,
            RuntimeError,
            r"some have none.*parameter 1 'w1' of shape \(8, 8\).*parameter 4 'w4'.* 4 more$",
        )

    def test_state_dict_of_a_failed_optimizer_is_a_warning(self):
        optimizer = self.build([Spec((8, 8), mesh_of(4), (S0,))])
        (param,) = optimizer.param_groups[0]["params"]
        param.grad = torch.ones_like(param)
        optimizer.step()
        if self.rank == 2:
            param.grad = None
        self.assertRaisesEverywhere(optimizer.step, RuntimeError, "gradient.*'w0'")
        buffer = optimizer.state[param]["momentum_buffer"]
        with self.everywhere():
            for _ in range(2):
                with self.assertLogs("torch.optim.muon", "WARNING") as seen:
                    saved = optimizer.state_dict()
                self.assertRegex(seen.output[0], "gradient.*'w0'")
                self.assertIs(saved["state"][0]["momentum_buffer"], buffer)
        # It still does not go on, with another parameter neither.
        param.grad = torch.ones_like(param)
        more = parameter(Spec((6, 6), mesh_of(4), (S0,)), 9)
        optimizer.add_param_group({"params": [("more", more)]})
        before = snapshot([param])
        self.assertRaisesEverywhere(optimizer.step, RuntimeError, "[Rr]ebuild")
        self.assertEqual(snapshot([param]), before)

    def test_errors_that_sent_nothing_are_forgotten(self):
        twins = Twins(self.placed())
        twins.step()
        flags, group = vars(twins.config), twins.optimizer.param_groups[0]
        for where, name, wrong, pattern in (
            (flags, "prefetch_count", -1, "prefetch_count must be"),
            (flags, "prefetch_count", 3, "Set them before you build"),
            (flags, "async_gpu_parallelism", False, "Set them before"),
            (group, "ns_steps", 100, "less than 100"),
        ):
            right, where[name] = where[name], wrong
            twins.set_gradients()
            self.assertRaisesEverywhere(twins.optimizer.step, ValueError, pattern)
            with self.everywhere():
                with self.assertNoLogs("torch.optim.muon", "WARNING"):
                    twins.optimizer.state_dict()
            where[name] = right
            twins.optimizer.step()
            twins.single.step()
            self.assertParity(twins, name)

    def test_plain_gradient_of_a_dtensor(self):
        optimizer = self.build([Spec((8, 8), mesh_of(4), (S0,))])
        (param,) = optimizer.param_groups[0]["params"]
        before = snapshot([param])
        with mock.patch.object(type(param), "grad", new=torch.ones(2, 8), create=True):
            self.assertRaisesEverywhere(optimizer.step, RuntimeError, "DTensor")
        self.assertEqual(snapshot([param]), before)


if __name__ == "__main__":
    run_tests()

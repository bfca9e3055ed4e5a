# Owner(s): ["oncall: distributed"]
"""Mistakes around the distributed Muon: every rank hears of them, and none waits for ever."""

import faulthandler
import os
import re
import sys
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import distribute_tensor
from torch.optim import _newton_schulz, Muon
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    MultiProcessTestCase,
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
    # A test that hangs here fails soon.
    timeout = timedelta(seconds=30)

    def outcome(self, build):
        try:
            build()
        except Exception as error:
            return type(error).__name__, str(error)
        return None

    def assertRaisesEverywhere(self, build, kind, pattern, ranks=range(4)):
        """``build`` raises the same error on all of ``ranks``, and none on the others."""
        outcomes = everyone(self.outcome(build))
        for rank, outcome in enumerate(outcomes):
            if rank not in ranks:
                self.assertIsNone(outcome, f"rank {rank}")
                continue
            self.assertIsNotNone(outcome, f"rank {rank} of {outcomes}")
            self.assertEqual(outcome[0], kind.__name__, f"rank {rank}: {outcome}")
            self.assertRegex(outcome[1], pattern)
        # The rank that found it says so in the first person.
        texts = {
            re.sub(r"^rank \d+ reports: ", "", outcomes[rank][1]) for rank in ranks
        }
        self.assertEqual(len(texts), 1, texts)

    def build(self, placed, change=None, named=True, **options):
        """Makes an optimizer; ``change`` gets the list of (name, parameter) pairs."""
        pairs = [(f"w{i}", parameter(spec, i)) for i, spec in enumerate(placed)]
        if change is not None:
            pairs = change(pairs)
        options.setdefault("distributed_config", create_dtensor_config())
        self.before = [p.detach() for _, p in pairs]
        return Muon(pairs if named else [p for _, p in pairs], **options)

    def mesh_of_its_own(self, name, ranks=None):
        """A mesh over a new group, which a test may break. DTensor's caches know meshes by their names."""
        group = dist.new_group(ranks, timeout=timedelta(seconds=3))
        if ranks is not None and self.rank not in ranks:
            return None
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))

    def assertNobodyTrains(self, build, kind, pattern):
        """``build`` fails on the ranks that share a group with the culprit. The others learn of it at
        their first step, before anything moves."""
        built = []
        outcome = self.outcome(lambda: built.append(build()))
        dist.barrier()
        for optimizer in built:
            params = optimizer.param_groups[0]["params"]
            before = snapshot(params)
            for param in params:
                param.grad = torch.ones_like(param)
            outcome = self.outcome(optimizer.step)
            self.assertEqual(snapshot(params), before)
        outcomes = everyone((len(built), outcome))
        for rank, (count, found) in enumerate(outcomes):
            self.assertIsNotNone(found, f"rank {rank} of {outcomes}")
            expected = "RuntimeError" if count else kind.__name__
            self.assertEqual(found[0], expected, f"rank {rank} of {outcomes}")
            told = (
                f"another rank failed before this step.*{pattern}" if count else pattern
            )
            self.assertRegex(found[1], told, f"rank {rank} of {outcomes}")

    def placed(self):
        return specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5)])

    def test_different_shapes(self):
        placed = self.placed()
        if self.rank == 2:
            placed[1] = placed[1]._replace(shape=(7, 6))
        self.assertRaisesEverywhere(
            lambda: self.build(placed),
            ValueError,
            r"parameter 1 'w1'.*shape is \(7, 5\) on rank 0 and \(7, 6\) on rank 2",
        )

    def groups(self, wrong=False):
        """Two groups of two; ``wrong``: of another shape in the second one on rank 2."""
        placed = self.placed()
        if wrong and self.rank == 2:
            placed[3] = placed[3]._replace(shape=(7, 6))
        pairs = [(f"w{i}", parameter(spec, i)) for i, spec in enumerate(placed)]
        return [{"params": pairs[:2]}, {"params": pairs[2:]}]

    def test_indices_count_over_all_groups(self):
        pattern = r"parameter 3 'w3'.*\(7, 5\) on rank 0 and \(7, 6\) on rank 2"
        self.assertRaisesEverywhere(
            lambda: Muon(
                self.groups(wrong=True), distributed_config=create_dtensor_config()
            ),
            ValueError,
            pattern,
        )
        optimizer = Muon(self.groups()[:1], distributed_config=create_dtensor_config())
        self.assertRaisesEverywhere(
            lambda: optimizer.add_param_group(self.groups(wrong=True)[1]),
            ValueError,
            pattern,
        )
        optimizer.add_param_group(self.groups()[1])
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for i, param in enumerate(params):
            if i != 3 or self.rank != 1:
                param.grad = torch.ones_like(param)
        self.assertRaisesEverywhere(
            optimizer.step, RuntimeError, r"gradient.*parameter 3 'w3'"
        )

    def test_different_order(self):
        def change(pairs):
            return pairs[::-1] if self.rank == 1 else pairs

        self.assertRaisesEverywhere(
            lambda: self.build(self.placed(), change),
            ValueError,
            "ranks disagree about parameter 0 'w0'.*name is w0 on rank 0 and w3 on rank 1",
        )

    def test_different_order_without_names(self):
        def change(pairs):
            return pairs[::-1] if self.rank == 1 else pairs

        self.assertRaisesEverywhere(
            lambda: self.build(self.placed(), change, named=False),
            ValueError,
            "ranks disagree about parameter 0 .*rank 0.*rank 1.*same order",
        )

    def test_different_number_of_parameters(self):
        def change(pairs):
            return pairs[:-1] if self.rank == 3 else pairs

        self.assertRaisesEverywhere(
            lambda: self.build(self.placed(), change), ValueError, "ranks disagree"
        )

    def test_different_number_of_equal_parameters(self):
        placed = [Spec((8, 8), mesh_of(4), (S0,))] * 3
        if self.rank == 0:
            placed = placed[:2]
        self.assertRaisesEverywhere(
            lambda: self.build(placed), ValueError, "ranks disagree"
        )

    def test_different_dtypes_and_placements(self):
        for field, value, pattern in [
            ("dtype", torch.bfloat16, "w0.*dtype is torch.float32 on rank 0"),
            ("placements", (S1,), "w0.*rank 0.*rank 3"),
            ("placements", (R,), "w0.*rank 0.*rank 3"),
        ]:
            placed = self.placed()
            if self.rank == 3:
                placed[0] = placed[0]._replace(**{field: value})
            self.assertRaisesEverywhere(lambda: self.build(placed), ValueError, pattern)

    def test_different_hyperparameters(self):
        for field, usual, other in [
            ("nesterov", True, False),
            ("momentum", 0.9, 0.8),
            ("weight_decay", 0.0, 0.2),
            ("ns_steps", 5, 4),
            ("adjust_lr_fn", None, "match_rms_adamw"),
        ]:
            value = other if self.rank == 2 else usual
            self.assertRaisesEverywhere(
                lambda: self.build(self.placed(), **{field: value}),
                ValueError,
                f"parameter 0 'w0'.*{field} is {usual} on rank 0 and {other} on rank 2",
            )

    def test_different_flags_of_the_config(self):
        for flags in ({"prefetch_count": 3}, {"async_gpu_parallelism": False}):
            config = create_dtensor_config(**(flags if self.rank == 1 else {}))
            self.assertRaisesEverywhere(
                lambda: self.build(self.placed(), distributed_config=config),
                ValueError,
                f"{next(iter(flags))} is .* on rank 0 and .* on rank 1",
            )

    def test_flags_changed_after_construction(self):
        twins = Twins(self.placed())
        twins.step()
        for name, value in (("prefetch_count", 3), ("async_gpu_parallelism", False)):
            usual = getattr(twins.config, name)
            setattr(twins.config, name, value)
            twins.set_gradients()
            before = snapshot(twins.params)
            self.assertRaisesEverywhere(
                twins.optimizer.step, ValueError, "Set them before you build Muon"
            )
            with self.everywhere(name):
                self.assertEqual(snapshot(twins.params), before)
            setattr(twins.config, name, usual)
            twins.single.step()
            twins.optimizer.step()
            self.assertParity(twins, name)

    def test_flags_changed_on_one_rank_only(self):
        mesh = self.mesh_of_its_own("flags")
        twins = Twins(specs(mesh, [(S0,)], [(8, 8), (16, 4), (4, 4)]))
        twins.step()
        before = snapshot(twins.params)
        dist.barrier()
        if self.rank == 2:
            twins.config.async_gpu_parallelism = False
        outcomes = everyone(self.outcome(twins.step))
        for rank, outcome in enumerate(outcomes):
            kind = "ValueError" if rank == 2 else "RuntimeError"
            self.assertEqual((outcome or ("",))[0], kind, f"{rank} {outcomes}")
            self.assertRegex(outcome[1], "Set them before you build Muon")
        self.assertEqual(snapshot(twins.params), before)

    def test_flags_of_another_type_on_one_rank(self):
        """Rank 3 alone had an error, because ranks compare "2" and 2 as equal words."""
        config = create_dtensor_config()
        config.prefetch_count = "2" if self.rank == 3 else 2
        self.assertRaisesEverywhere(
            lambda: self.build(self.placed(), distributed_config=config),
            ValueError,
            "prefetch_count must be an int >= 0 but is '2'",
        )

    def test_frozen_on_one_rank_only(self):
        def change(pairs):
            pairs[2][1].requires_grad_(self.rank != 1)
            return pairs

        self.assertRaisesEverywhere(
            lambda: self.build(self.placed(), change),
            ValueError,
            "parameter 2 'w2'.*requires_grad is True on rank 0 and False on rank 1",
        )

    def test_one_rank_with_a_parameter_that_is_no_matrix(self):
        def change(pairs):
            if self.rank == 1:
                cube = distribute_tensor(
                    torch.ones(4, 4, 4), mesh_of(4), [S0], src_data_rank=None
                )
                pairs[2] = ("w2", torch.nn.Parameter(cube))
            return pairs

        self.assertRaisesEverywhere(
            lambda: self.build(self.placed(), change),
            ValueError,
            r"only supports 2D parameters.*\[4, 4, 4\]",
        )

    def assign(self, assignments):
        """A config of the factory whose assign_fn gives ``assignments``."""
        config = create_dtensor_config()

        def assign_fn(params, state):
            if isinstance(assignments, Exception):
                raise assignments
            return assignments

        config.assign_fn = assign_fn
        return config

    def test_assignments_that_are_wrong_on_every_rank(self):
        for assignments, kind, pattern in [
            ({0: [0, 1], 1: [3]}, AssertionError, r"missing \[2\].*'w2'"),
            ({0: [0, 1], 1: [1, 2, 3]}, AssertionError, r"more than once \[1\].*'w1'"),
            ({}, AssertionError, r"missing \[0, 1, 2, 3\]"),
            ({0: [0, 1, 2, 3, 4]}, AssertionError, r"\[4\]"),
            ({0: [0, 1, 2], 4: [3]}, ValueError, "rank 4.*0 to 3"),
            ({0: [0, 1, 2], -1: [3]}, ValueError, "rank -1.*0 to 3"),
        ]:
            self.assertRaisesEverywhere(
                lambda: self.build(
                    self.placed(), distributed_config=self.assign(assignments)
                ),
                kind,
                pattern,
            )

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
            self.assertRaisesEverywhere(
                lambda: self.build(self.placed(), distributed_config=config),
                kind,
                pattern,
            )

    def test_one_rank_with_an_error_of_a_kind_of_its_own(self):
        class Unheard(ValueError):
            pass

        config = self.assign(
            Unheard("no idea") if self.rank == 3 else {0: [0, 1, 2, 3]}
        )
        found = everyone(
            self.outcome(lambda: self.build(self.placed(), distributed_config=config))
        )
        told = ("RuntimeError", "rank 3 reports: no idea")
        self.assertEqual(found, [told] * 3 + [("Unheard", "no idea")])

    def test_owner_that_holds_no_piece(self):
        pair = mesh_of(2)
        placed = [Spec((8, 8), mesh_of(4), (S0,)), Spec((8, 8), pair, (S0,))]
        # Rank 2 holds no piece of what the first pair shares.
        config = self.assign({2: [0, 1]})
        outcome = self.outcome(lambda: self.build(placed, distributed_config=config))
        for kind, text in everyone(outcome):
            self.assertEqual(kind, "ValueError")
            self.assertRegex(text, r"parameter 1 'w1'.*rank 2.*\[0, 1\]")

    def test_destroyed_parameter_on_one_rank(self):
        def change(pairs):
            mesh = mesh_of(4)
            if self.rank == 1:
                plain = torch.nn.Parameter(torch.ones(8, 8))
                plain.data = distribute_tensor(
                    torch.ones(8, 8), mesh, [S0], src_data_rank=None
                )
                pairs[1] = ("w1", plain)
            return pairs

        self.assertRaisesEverywhere(
            lambda: self.build(self.placed(), change),
            ValueError,
            r"param\.data = dtensor.*nn\.Parameter\(distribute_tensor\(",
        )

    def test_mesh_without_this_rank(self):
        mesh = mesh_of(4)
        first_half = DeviceMesh("cpu", [0, 1])

        def change(pairs):
            foreign = distribute_tensor(torch.ones(8, 8), first_half, [S0])
            return [*pairs, ("foreign", torch.nn.Parameter(foreign))]

        self.assertRaisesEverywhere(
            lambda: self.build([Spec((8, 8), mesh, (S0,))], change),
            ValueError,
            "parameter 1 .*this rank is not in the mesh",
        )

    def test_disagreement_stays_among_those_who_share(self):
        # Another pipeline stage goes on.
        placed = specs(mesh_of(2), [(S0,)], [(8, 8), (7, 5)])
        if self.rank == 1:
            placed[0] = placed[0]._replace(shape=(8, 9))
        self.assertRaisesEverywhere(
            lambda: self.build(placed), ValueError, "'w0'.*rank 0.*rank 1", ranks=[0, 1]
        )

    def test_disagreement_in_one_group_reaches_those_who_share_another(self):
        for group, culprit in [("pair", 1), ("pair", 3), ("all", 2)]:
            placed = [
                Spec((8, 8), mesh_of(4), (S0,)),
                Spec((8, 8), mesh_of(2), (S0,)),
            ]
            if self.rank == culprit:
                at = 0 if group == "all" else 1
                placed[at] = placed[at]._replace(shape=(8, 9))
            self.assertNobodyTrains(
                lambda: self.build(placed), ValueError, "ranks disagree.*shape is"
            )

    def test_disagreement_among_overlapping_groups(self):
        # Four pairs and no group of all: (0, 1), (2, 3), (0, 2), (1, 3).
        grid = grid_of(2, 2)
        for which, culprit in ((1, 0), (0, 3)):
            placed = [Spec((8, 8), grid["a"], (S0,)), Spec((8, 8), grid["b"], (S0,))]
            if self.rank == culprit:
                placed[which] = placed[which]._replace(shape=(8, 9))
            self.assertNobodyTrains(
                lambda: self.build(placed),
                ValueError,
                f"ranks disagree about parameter {which}",
            )

    def test_error_on_one_rank_among_overlapping_groups(self):
        grid = grid_of(2, 2)
        placed = [Spec((8, 8), grid["a"], (S0,)), Spec((8, 8), grid["b"], (S0,))]
        for culprit in (0, 3):
            config = self.assign({0: [0]}) if self.rank == culprit else None
            options = {} if config is None else {"distributed_config": config}
            self.assertNobodyTrains(
                lambda: self.build(placed, **options), AssertionError, r"missing \[1\]"
            )

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
        self.assertRaisesEverywhere(
            lambda: self.build(wrong, distributed_config=config),
            ValueError,
            "ranks disagree",
        )
        for i, (param, spec) in enumerate(zip(self.before, wrong)):
            expected = parameter(spec, i).detach()
            self.assertTrue(torch.equal(param.to_local(), expected.to_local()))
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
        self.assertEqual(
            sorted(i for o in twins.optimizer.assignments.values() for i in o),
            list(range(4)),
        )
        self.assertTrainsAlike(twins)

    def test_add_param_group_does_not_make_a_failed_optimizer_good_again(self):
        mesh = mesh_of(4)
        optimizer = self.build([Spec((8, 8), mesh, (S0,))])
        (param,) = optimizer.param_groups[0]["params"]
        param.grad = None if self.rank == 2 else torch.ones_like(param)
        self.assertRaisesEverywhere(optimizer.step, RuntimeError, "'w0'")
        more = [("more", parameter(Spec((6, 6), mesh, (S0,)), 9))]
        outcome = self.outcome(lambda: optimizer.add_param_group({"params": more}))
        everyone(outcome)
        param.grad = torch.ones_like(param)
        before = snapshot([param])
        self.assertRaisesEverywhere(optimizer.step, RuntimeError, "[Rr]ebuild")
        self.assertEqual(snapshot([param]), before)

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
            ([(8, 8), (7, 5)], (1, 1)),
            ([(8, 8), (12, 4)], (2, 5)),
        ):
            both = self.two_optimizers(shapes, counts)
            for _ in range(2):
                for twins in both:
                    twins.step()
                    self.assertParity(twins)
            before = [snapshot(twins.params) for twins in both]
            for twins in both:
                twins.set_gradients()
            order = both[::-1] if self.rank == 2 else both
            for twins in order:
                self.assertRaisesEverywhere(
                    lambda: self.step_of(twins),
                    RuntimeError,
                    "step different optimizers.*in the same order",
                )
            with self.everywhere(f"{shapes}"):
                for twins, old in zip(both, before, strict=True):
                    self.assertEqual(snapshot(twins.params), old)

    def step_of(self, twins):
        """The step, whose error lacks what this rank's optimizer has."""
        try:
            twins.optimizer.step()
        except RuntimeError as error:
            raise RuntimeError(str(error).split(". This rank's")[0]) from error

    def test_failure_of_another_optimizer_over_the_same_ranks(self):
        """One rank failed in the step of the first. The others waited for it in the second one's, and
        said that the second one had failed for the first one's reason."""
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
            outcome = "RuntimeError", "stayed away"
        for rank, (kind, text) in enumerate(everyone(outcome)):
            self.assertEqual(kind, "RuntimeError")
            self.assertNotIn("less than 100", text)
            if rank != 3:
                self.assertRegex(text, r"Ranks \[3\] did not come")

    def test_construction_without_numpy(self):
        """torch's all_gather_object needs NumPy, and ranks said that one of them had ended."""
        missing = RuntimeError("Numpy is not available")
        placed = self.placed()
        if self.rank == 2:
            placed[1] = placed[1]._replace(shape=(7, 6))
        with (
            mock.patch.object(torch.Tensor, "numpy", side_effect=missing),
            mock.patch.dict(sys.modules, {"numpy": None}),
        ):
            with self.assertRaisesRegex(RuntimeError, "not available"):
                dist.all_gather_object([None] * 4, self.rank)
            twins = Twins(self.placed())
            twins.step()
            outcome = self.outcome(lambda: self.build(placed))
        self.assertParity(twins)
        for kind, text in everyone(outcome):
            self.assertEqual(kind, "ValueError")
            self.assertRegex(text, "ranks disagree about parameter 1")

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
        # It still does not go on.
        param.grad = torch.ones_like(param)
        self.assertRaisesEverywhere(optimizer.step, RuntimeError, "[Rr]ebuild")

    def test_errors_that_sent_nothing_are_forgotten(self):
        twins = Twins(self.placed())
        twins.step()
        group = twins.optimizer.param_groups[0]
        for where, name, wrong, right, pattern in (
            (vars(twins.config), "prefetch_count", -1, 1, "prefetch_count"),
            (group, "ns_steps", 100, 5, "less than 100"),
        ):
            where[name] = wrong
            twins.set_gradients()
            self.assertRaisesEverywhere(twins.optimizer.step, ValueError, pattern)
            with self.everywhere():
                with self.assertNoLogs("torch.optim.muon", "WARNING"):
                    twins.optimizer.state_dict()
            where[name] = right
            twins.optimizer.step()
            twins.single.step()
            self.assertParity(twins, name)
        self.assertTrainsAlike(twins)

    def test_unsupported_gradients(self):
        mesh = mesh_of(4)
        optimizer = self.build([Spec((8, 8), mesh, (S0,))])
        param = optimizer.param_groups[0]["params"][0]
        before = snapshot([param])
        # A plain gradient of the local shape is no gradient of a DTensor.
        with mock.patch.object(type(param), "grad", new=torch.ones(2, 8), create=True):
            self.assertRaisesEverywhere(optimizer.step, RuntimeError, "DTensor")
        self.assertEqual(snapshot([param]), before)


@requires_gloo()
class TestMuonPeerFailure(MultiProcessTestCase):
    """A peer dies, or stalls, in the middle of a step."""

    @property
    def world_size(self):
        return 3

    @property
    def destroy_pg_upon_exit(self):
        # It would wait for the peer as well.
        return False

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def lose_rank_1(self, leave, prefetch_count):
        # An interpreter that hangs says where, and fails the test.
        faulthandler.dump_traceback_later(100, exit=True)
        torch.set_num_threads(1)
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            # The ranks still import torch, which takes long on a busy machine.
            timeout=timedelta(seconds=60),
        )
        mesh = init_device_mesh("cpu", (self.world_size,))
        params = [
            parameter(Spec((9, 8), mesh, (placement,)), i)
            for i, placement in enumerate((S0, S1, R, S0, R, S1))
        ]
        optimizer = Muon(
            params, distributed_config=create_dtensor_config(True, prefetch_count)
        )
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        # All ranks are here. From now on only the lost peer makes the others wait.
        dist.barrier()
        _set_pg_timeout(timedelta(seconds=4), mesh.get_group())

        if self.rank == 1:
            with mock.patch.object(
                _newton_schulz,
                "_zeropower_via_newtonschulz",
                side_effect=lambda *a: leave(store),
            ):
                optimizer.step()
            self.fail("it should have left")
        with self.assertRaises(RuntimeError):
            optimizer.step()
        with self.assertRaisesRegex(RuntimeError, "[Rr]ebuild"):
            optimizer.step()
        store.set(f"rank {self.rank} is through", "yes")
        faulthandler.cancel_dump_traceback_later()

    def test_peer_that_exits_is_an_error_on_the_others(self):
        def leave(store):
            os._exit(0)

        self.lose_rank_1(leave, 1)

    def test_peer_that_stalls_is_an_error_on_the_others(self):
        def leave(store):
            others = ["rank 0 is through", "rank 2 is through"]
            store.wait(others, timedelta(seconds=90))
            os._exit(0)

        self.lose_rank_1(leave, 0)


if __name__ == "__main__":
    run_tests()

# Owner(s): ["oncall: distributed"]
"""Mistakes around the distributed Muon: every rank hears of them, and none waits for ever."""

import faulthandler
import os
import re
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import distribute_tensor
from torch.optim import _muon, Muon
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
    return [p.detach().to_local().clone() for p in params]


@requires_gloo()
class TestMuonAgreement(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4
    # What hangs here is a bug, and should be one soon.
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

    def test_flags_changed_on_one_rank_only(self):
        # A group of its own: it is of no use afterwards.
        group = dist.new_group()
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("flags",))
        twins = Twins(specs(mesh, [(S0,)], [(8, 8), (16, 4), (4, 4), (8, 2), (4, 8)]))
        twins.step()
        # All may change them, but alike.
        twins.config.prefetch_count = 2 if self.rank else 0
        self.assertRaisesEverywhere(
            twins.step,
            ValueError,
            r"changed alike on all ranks.*\b0: '\(True, 0\)', 1: '\(True, 2\)'",
        )
        twins = Twins(twins.specs, create_dtensor_config(prefetch_count=1))
        twins.step()
        dist.barrier()
        _set_pg_timeout(timedelta(seconds=3), group)
        if self.rank == 2:
            twins.config.async_gpu_parallelism = False
        outcomes = everyone(self.outcome(twins.step))
        for rank, outcome in enumerate(outcomes):
            self.assertEqual(
                (outcome or ("",))[0], "RuntimeError", f"{rank} {outcomes}"
            )
        self.assertRegex(outcomes[2][1], r"config changed, and .* ranks \[0, 1, 3\]")

    def shards_on(self, *meshes):
        """A parameter, with a gradient, on each of these meshes that this rank is in."""
        params = []
        for seed, ranks in enumerate(meshes):
            # Every rank makes every mesh.
            mesh = DeviceMesh("cpu", ranks)
            if mesh.get_coordinate() is not None:
                _set_pg_timeout(timedelta(seconds=10), mesh.get_group())
                placed = distribute_tensor(full(seed, (8, 8)), mesh, [S0])
                params.append(torch.nn.Parameter(placed))
                params[-1].grad = torch.ones_like(params[-1])
        return params

    def assertFlagsRefused(self, muon, config, wrong):
        """Rank ``wrong`` has other flags than all others, which all hear of, and then go on."""
        config.prefetch_count = 3 if self.rank == wrong else 2
        self.assertRaisesEverywhere(
            muon.step,
            ValueError,
            rf"changed alike on all ranks.*\b{wrong}: '\(True, 3\)'",
        )
        config.prefetch_count = 2
        with self.everywhere("with the right flags"):
            muon.step()

    def test_flags_that_ranks_of_a_further_group_changed_otherwise(self):
        """Rank 3 waited for ranks 1 and 2, which had left with an error of the group that they met before."""
        config = create_dtensor_config()
        params = self.shards_on([0, 1, 2], [1, 2, 3])
        muon = Muon(params, distributed_config=config)
        muon.step()
        self.assertFlagsRefused(muon, config, 0)

    def test_flags_that_ranks_at_an_end_of_a_winding_path_changed_otherwise(self):
        """Rank 3 made the step: what rank 1 had went through groups in no order of theirs."""
        config = create_dtensor_config()
        params = self.shards_on([0, 2], [0, 3], [1, 2])
        muon = Muon(params, distributed_config=config)
        muon.step()
        self.assertFlagsRefused(muon, config, 1)

    def test_flags_that_some_groups_only_have_to_ask_about(self):
        """Rank 0 made the step: it had agreed with rank 1 on its flags when they added a parameter."""
        config = create_dtensor_config()
        chain = [0, 1], [1, 2], [2, 3]
        muon = Muon(self.shards_on(*chain), distributed_config=config)
        muon.step()
        config.prefetch_count = 3 if self.rank == 3 else 2
        added = self.shards_on(*chain)[0]
        if self.rank < 2:
            muon.add_param_group({"params": [added]})
        self.assertFlagsRefused(muon, config, 3)

    def test_flags_that_some_ranks_stepped_with_before_they_share(self):
        """Ranks 2 and 3 waited for the others about flags that all four had agreed on."""
        config = create_dtensor_config()
        muon = Muon(self.shards_on([0, 1], [2, 3]), distributed_config=config)
        muon.step()
        config.prefetch_count += self.rank // 2
        muon.step()
        config.prefetch_count = 1
        muon.add_param_group({"params": self.shards_on(range(4))})
        muon.step()
        # The second pair has agreed on these before, and the first pair and all four have not.
        config.prefetch_count = 2
        muon.step()

    def test_flags_of_another_type_on_one_rank(self):
        """Rank 3 alone had an error: "2" and 2 look alike where ranks compare."""
        config = create_dtensor_config()
        config.prefetch_count = "2" if self.rank == 3 else 2
        self.assertRaisesEverywhere(
            lambda: self.build(self.placed(), distributed_config=config),
            ValueError,
            "prefetch_count has to be an int >= 0 but is '2'",
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

    def test_no_rank_with_matrices_only(self):
        def change(pairs):
            bias = distribute_tensor(torch.ones(8), mesh_of(4), [S0])
            return [*pairs, ("bias", torch.nn.Parameter(bias))]

        self.assertRaisesEverywhere(
            lambda: self.build(self.placed(), change),
            ValueError,
            "only supports 2D parameters",
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
            (NotImplementedError("no idea"), NotImplementedError, "no idea"),
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

    def test_destroyed_parameters_on_every_rank(self):
        def change(pairs):
            destroyed = []
            for name, param in pairs:
                plain = torch.nn.Parameter(torch.ones(*param.shape))
                plain.data = param.data
                destroyed.append((name, plain))
            return destroyed

        outcome = self.outcome(lambda: self.build(self.placed()[:2], change))
        for kind, text in everyone(outcome):
            self.assertEqual(kind, "ValueError")
            self.assertIn("param.data = dtensor", text)

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
            self.assertRaisesEverywhere(
                lambda: self.build(placed), ValueError, "ranks disagree.*shape is"
            )

    def test_disagreement_among_overlapping_groups(self):
        # Four pairs and no group of all: (0, 1), (2, 3), (0, 2), (1, 3).
        grid = grid_of(2, 2)
        for field, which, culprit in [
            ("shape", 1, 0),
            ("shape", 0, 0),
            ("shape", 1, 3),
            ("shape", 0, 3),
        ]:
            placed = [Spec((8, 8), grid["a"], (S0,)), Spec((8, 8), grid["b"], (S0,))]
            if self.rank == culprit:
                placed[which] = placed[which]._replace(shape=(8, 9))
            outcomes = everyone(self.outcome(lambda: self.build(placed)))
            mesh = (grid["a"], grid["b"])[which]
            sharing = [
                rank
                for rank, ranks in enumerate(
                    everyone(dist.get_process_group_ranks(mesh.get_group()))
                )
                if culprit in ranks
            ]
            for rank in sharing:
                kind, text = outcomes[rank]
                self.assertEqual(kind, "ValueError", f"{outcomes}")
                self.assertRegex(text, f"ranks disagree about parameter {which}")
            # Nobody is left with an optimizer whose peers have none.
            self.assertNotIn(None, outcomes)

    def test_error_on_one_rank_among_overlapping_groups(self):
        grid = grid_of(2, 2)
        for culprit in range(4):
            placed = [Spec((8, 8), grid["a"], (S0,)), Spec((8, 8), grid["b"], (S0,))]
            config = self.assign({0: [0]}) if self.rank == culprit else None
            options = {} if config is None else {"distributed_config": config}
            self.assertRaisesEverywhere(
                lambda: self.build(placed, **options),
                AssertionError,
                r"missing \[1\]",
            )

    def test_error_at_an_end_of_a_chain_of_groups(self):
        # Pairs (0, 1), (1, 2), (2, 3), compared in that order: rank 0 is done before rank 3 begins.
        placed = [Spec((8, 8), mesh_of(2), (S0,))]
        middle = DeviceMesh("cpu", [1, 2])
        if self.rank in (1, 2):
            placed.append(Spec((7, 5), middle, (S0,)))
        for culprit in (0, 3):
            config = self.assign({}) if self.rank == culprit else None
            options = {} if config is None else {"distributed_config": config}
            self.assertRaisesEverywhere(
                lambda: self.build(placed, **options),
                AssertionError,
                r"missing \[0\]",
            )

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

    def test_one_config_serves_several_optimizers(self):
        config = create_dtensor_config()
        grid = specs(grid_of(2, 2), [(S0, S1), (R, S0)], [(9, 7), (4, 6)])
        both = Twins(self.placed(), config), Twins(grid, config, seed=50)
        wrong = self.placed()
        if self.rank == 2:
            wrong[0] = wrong[0]._replace(shape=(9, 9))
        for step in range(3):
            for twins in both:
                twins.step()
                self.assertParity(twins, f"step {step}")
            # Nor does a third one, that fails, leave anything behind.
            self.assertRaisesEverywhere(
                lambda: self.build(wrong, distributed_config=config),
                ValueError,
                "ranks disagree",
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
            (vars(twins.config), "prefetch_count", -1, 2, "prefetch_count"),
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
                _muon,
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

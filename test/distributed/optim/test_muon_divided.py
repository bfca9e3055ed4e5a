# Owner(s): ["oncall: distributed"]
"""Matrices that several owners orthogonalize together."""

import math
import sys
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim import _newton_schulz_kernels as kernel_forms
from torch.optim._muon_engine.runtime import divided
from torch.optim._muon_formulas import MuonFormulas
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.common_config import (
    COEFFICIENTS,
    exact_result,
)
from torch.testing._internal.distributed._muon.common_divided import (
    small_ones_divided,
)
from torch.testing._internal.distributed._muon.common_groups import Strategy
from torch.testing._internal.distributed._muon.common_muon import (
    grid_of,
    local,
    mesh_of,
    OnCPU,
    piece_of,
    R,
    S0,
    S1,
    Spec,
    Twins,
)


# Wide, tall, square, uneven blocks; one too small to be divided, a fused one and a flattened one.
TO_DIVIDE = [
    ((128, 300), {}),
    ((300, 128), {}),
    ((160, 160), {}),
    ((33, 71), {}),
    ((9, 20), {}),
    ((224, 192), {"split": (160, 64)}),
    ((64, 8, 3, 3), {"flatten": True}),
]


def exact_update(gradient, split=None, flatten=False):
    """The update of a parameter at learning rate 1, with the scale of each of its matrices."""
    whole = gradient.flatten(1) if flatten else gradient
    scaled = []
    for part in whole.bfloat16().split(split or len(whole)):
        scale = max(1, part.size(0) / part.size(1)) ** 0.5
        scaled.append(scale * exact_result(part, [COEFFICIENTS] * 5))
    return torch.cat(scaled).view_as(gradient)


class TestMuonDivided(OnCPU):
    def twins(self, layout, config, **options):
        """At zero, where the first step leaves the update."""
        groups = [([index], form) for index, (_, form) in enumerate(TO_DIVIDE)]
        given = {"lr": 1.0, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
        twins = Twins(layout, config, groups, **given, **options)
        for param in (*twins.params, *twins.singles):
            local(param.detach()).zero_()
        return twins

    def placed(self, mesh, *placements):
        return [Spec(shape, mesh, placements) for shape, _ in TO_DIVIDE]

    def check(self, layout, make_config, message="", **options):
        """Twice the same bits, on all replicas, about as exact as those of one owner."""
        before = None
        for _ in range(2):
            twins = self.twins(layout, make_config(), **options)
            twins.step()
            pieces = [local(param.detach()) for param in twins.params]
            same = before is None or all(map(torch.equal, before, pieces))
            self.assertEverywhere([] if same else ["another run"], message)
            before = pieces
        # By the numbers of the elements in each piece.
        here = {}
        for index, (piece, spec) in enumerate(zip(pieces, layout)):
            numbers = torch.arange(math.prod(spec.shape)).view(spec.shape)
            elements = piece_of(numbers, spec)
            here[index, hash(tuple(elements.flatten().tolist()))] = piece
        apart = []
        for others in common_muon.everyone(here):
            for key in others.keys() & here.keys():
                if not torch.equal(others[key], here[key]):
                    apart.append(key)
        self.assertEverywhere(apart, f"{message}: replicas differ")
        distances = torch.zeros(2, len(TO_DIVIDE), dtype=torch.float64)
        for index, (spec, single, (_, form)) in enumerate(
            zip(layout, twins.singles, TO_DIVIDE)
        ):
            target = piece_of(-exact_update(single.grad, **form), spec)
            for which, found in enumerate(
                (pieces[index], piece_of(single.detach(), spec))
            ):
                distances[which, index] = (found - target).square().sum()
        dist.all_reduce(distances)
        ratios = (distances[0] / distances[1]).sqrt().tolist()
        self.assertLessEqual(max(ratios), 1.1, f"{message} {ratios}")
        return twins

    def test_placements(self):
        line, grid = mesh_of(4), grid_of(2, 2)
        for (mesh, *placements), owners, replicas, flags, options in (
            ((line, S0), 2, 4, (True, 1), {"ns_algorithm": "gram"}),
            ((line, S1), 3, 4, (False, 0), {}),
            # Eight owners are more than the ranks.
            ((line, R), 8, 4, (True, 1), {}),
            # Relayed.
            ((grid, R, S0), 2, 1, (True, 3), {"ns_coefficients": [COEFFICIENTS] * 5}),
            ((grid, S0, S1), 3, 4, (True, 1), {"ns_algorithm": "symmetric"}),
            ((grid, S0, S1), 2, 4, (True, 1), {"foreach": True}),
            ((line, S1), "auto", 4, (True, 1), {}),
        ):
            with self.subTest(
                owners=owners,
                replicas=replicas,
                flags=flags,
                mesh=mesh,
                placements=placements,
            ):
                message = f"{placements} {owners} {flags} {options}"
                make = partial(create_dtensor_config, *flags, owners)
                layout = self.placed(mesh, *placements)
                with small_ones_divided(max_replicas=replicas):
                    self.check(layout, make, message, **options)
        strategy = Strategy(grid, "fsdp", "tp")
        groups = {"owners_per_matrix": 2, "tp_dim_per_param": 0}
        with small_ones_divided():
            layout = [strategy.cut(shape, 0) for shape, _ in TO_DIVIDE]
            self.check(layout, lambda: strategy.config(**groups), str(strategy))

    def test_blocks_are_in_no_batch(self):
        """Their owners compute together, so an owner takes its blocks of equal matrices one after another."""
        values = []
        for foreach in (False, True):
            with small_ones_divided():
                config = create_dtensor_config(owners_per_matrix=4)
                # Three in each bucket.
                placed = [Spec((32, 64), mesh_of(4), (S0,))] * 12
                twins = Twins(placed, config, foreach=foreach)
            for _ in range(2):
                twins.step()
            values.append([param.to_local().clone() for param in twins.params])
        with self.everywhere():
            self.assertEqual(*values, rtol=0, atol=0)

    def test_gram_matrices_by_kernels(self):
        """As on a GPU: in float32, where symmetric products are asked for."""
        kernels = mock.Mock()
        kernels.symmetric_product.side_effect = lambda x, y, dtype: (
            x.to(dtype) @ y.mT.to(dtype)
        )
        layout, config = self.placed(mesh_of(4), S0), create_dtensor_config
        for algorithm, is_taken in (("symmetric", True), ("quintic", False)):
            kernels.reset_mock()
            with (
                small_ones_divided(),
                mock.patch.object(kernel_forms, "_products_take", lambda x: True),
                mock.patch.object(kernel_forms, "_LEAST_ROWS", 128),
                mock.patch.dict(sys.modules, {"torch.optim._muon_kernels": kernels}),
            ):
                make_config = partial(config, owners_per_matrix=4)
                self.check(layout, make_config, algorithm, ns_algorithm=algorithm)
            taken = kernels.symmetric_product.called
            of_ranks = common_muon.everyone(taken)
            self.assertEqual(any(of_ranks), is_taken)

    def test_algorithms_of_groups(self):
        """Each divided matrix takes the products of its own parameter group, as they are in the step."""
        groups = [([0], {"ns_algorithm": "symmetric"}), ([1], {})]
        gram_of_block, seen = divided.DividedProducts._gram_of_block, set()

        def noted(products, *matrices):
            seen.add((products._matrix.param_index, products._ns_algorithm))
            return gram_of_block(products, *matrices)

        with small_ones_divided():
            config = create_dtensor_config(owners_per_matrix=4)
            twins = Twins([Spec((32, 64), mesh_of(4), (S0,))] * 2, config, groups)
            with mock.patch.object(divided.DividedProducts, "_gram_of_block", noted):
                twins.step()
                with self.everywhere():
                    self.assertEqual(seen, {(0, "symmetric"), (1, "quintic")})
                seen.clear()
                first, second = twins.optimizer.param_groups
                first["ns_algorithm"], second["ns_algorithm"] = "quintic", "symmetric"
                twins.step()
                with self.everywhere():
                    self.assertEqual(seen, {(0, "quintic"), (1, "symmetric")})

    def test_collectives_are_not_recorded(self):
        """A divided matrix has some between its products, which a graph of a GPU would contain."""
        placed = [Spec((32, 64), mesh_of(4), (S0,)), Spec((8, 6), mesh_of(4), (S0,))]
        with small_ones_divided():
            twins = Twins(placed, create_dtensor_config(owners_per_matrix=4))
        runner = twins.optimizer._engine._make_runner()
        with mock.patch.object(runner.memory, "recording", mock.Mock):
            common_muon.bind_again(twins.optimizer)
            formulas = MuonFormulas.of_group(twins.optimizer.param_groups[0])
            runner.bind({0: formulas})
        are_recorded = set()
        for bound in runner.compute.bound.values():
            for batch in bound.batches:
                is_divided = batch.matrices[0].team_products is not None
                are_recorded.add((is_divided, batch.recording is not None))
        of_ranks = common_muon.everyone(are_recorded)
        with self.everywhere():
            self.assertEqual(set().union(*of_ranks), {(True, False), (False, True)})

    def test_missing_gradients(self):
        with small_ones_divided():
            config = create_dtensor_config(owners_per_matrix=2)
            twins = self.twins(self.placed(mesh_of(4), S0), config)
            twins.step(missing=[0, 2])
            self.assertEverywhere(
                [index for index in (0, 2) if local(twins.params[index]).any()]
            )
            twins.set_gradients()
            if self.rank == min(twins.optimizer.assignments):
                twins.optimizer.zero_grad()
            step = twins.optimizer.step
            self.assertRaisesEverywhere(step, RuntimeError, "some have none")

    def test_one_owner(self):
        """Small matrices, one rank, and functions of the user have the bits of a single process."""
        layout, config = self.placed(mesh_of(4), S0), create_dtensor_config
        self.assertTrainsAlike(self.twins(layout, config(owners_per_matrix=4)), 2)
        with small_ones_divided():
            alone = self.placed(mesh_of(1), S0)
            self.assertTrainsAlike(self.twins(alone, config(owners_per_matrix=4)), 2)
            wrapped = config(owners_per_matrix=2)
            common_muon.wrap_functions(wrapped, "gather_fn")
            self.assertTrainsAlike(self.twins(layout, wrapped), 2)

    def test_errors_and_owners(self):
        for factory in (create_auto_config, create_dtensor_config):
            with self.subTest(factory=factory):
                for number in (0, -1, 2.0, True, None, "all"):
                    with self.subTest(number=number):
                        pattern = 'owners_per_matrix is .*, not "auto" or an int >= 1'
                        with self.assertRaisesRegex(ValueError, pattern):
                            factory(owners_per_matrix=number)
        layout = self.placed(mesh_of(4), S0)
        with small_ones_divided():
            twins = self.twins(layout, create_dtensor_config(owners_per_matrix=2))
            first = twins.optimizer._engine.schedule.owners[0]
            self.assertEqual(twins.optimizer.matrix_owners[0, 0], first)
            config = create_dtensor_config(owners_per_matrix=1 + self.rank % 2)
            build = partial(self.twins, layout, config)
            text = "owners_per_matrix is 1 .1 for this one. on rank 0"
            self.assertRaisesEverywhere(build, ValueError, f"ranks disagree.*{text}")


if __name__ == "__main__":
    run_tests()

# Owner(s): ["oncall: distributed"]
"""Matrices that several owners orthogonalize together."""

import contextlib
import itertools
import zlib
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim._muon_engine import callbacks
from torch.optim._muon_engine.runtime import shared
from torch.optim._muon_engine.schedule import buckets, owners as schedule_owners, packs
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    everyone,
    GlooOnCPU,
    grid_of,
    held,
    local,
    mesh_of,
    ParityAssertions,
    piece_of,
    R,
    S0,
    S1,
    Spec,
    Strategy,
    Twins,
)


COEFFICIENTS = (3.4445, -4.775, 2.0315)
# Wide, tall, square, uneven blocks; one too small to be divided, a fused one and a flattened one.
FORMS = [
    ((128, 300), {}),
    ((300, 128), {}),
    ((160, 160), {}),
    ((33, 71), {}),
    ((9, 20), {}),
    ((224, 192), {"split": (160, 64)}),
    ((64, 8, 3, 3), {"flatten": True}),
]


def exact(matrix):
    """The polynomial of a matrix in bfloat16, in float64."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16().double()
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def exact_update(gradient, split=None, flatten=False):
    """The update of a parameter at learning rate 1, with the scale of each of its matrices."""
    whole = gradient.flatten(1) if flatten else gradient
    parts = whole.split(split or len(whole))
    scaled = [exact(p) * max(1, p.size(0) / p.size(1)) ** 0.5 for p in parts]
    return torch.cat(scaled).view_as(gradient)


@requires_gloo()
class TestMuonDivided(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    @contextlib.contextmanager
    def small(self, max_replicas=buckets.MAX_REPLICAS):
        """Small matrices are divided, too."""
        with (
            mock.patch.object(schedule_owners, "MIN_DIVIDED", 16),
            mock.patch.object(schedule_owners, "MIN_LOAD", 0.0),
            mock.patch.object(buckets, "MAX_REPLICAS", max_replicas),
            # The rounding of few products shows in small matrices.
            mock.patch.object(shared, "_PARTS", 16),
        ):
            yield

    def twins(self, layout, config, **options):
        """At zero, where the first step leaves the update."""
        groups = [([i], form) for i, (_, form) in enumerate(FORMS)]
        given = {"lr": 1.0, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
        twins = Twins(layout, config, groups, **given, **options)
        for param in (*twins.params, *twins.singles):
            local(param.detach()).zero_()
        return twins

    def placed(self, mesh, *placements):
        return [Spec(shape, mesh, placements) for shape, _ in FORMS]

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
        held_here = {
            (i, hash(frozenset(held(spec)))): zlib.crc32(piece.numpy().tobytes())
            for i, (piece, spec) in enumerate(zip(pieces, layout))
        }
        apart = [
            k
            for other in everyone(held_here)
            for k in other.keys() & held_here.keys()
            if other[k] != held_here[k]
        ]
        self.assertEverywhere(apart, f"{message}: replicas differ")
        distances = torch.zeros(2, len(FORMS), dtype=torch.float64)
        for i, (spec, single, (_, form)) in enumerate(
            zip(layout, twins.singles, FORMS)
        ):
            target = piece_of(-exact_update(single.grad, **form), spec)
            for which, found in enumerate((pieces[i], piece_of(single.detach(), spec))):
                distances[which, i] = (found - target).square().sum()
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
        ):
            with self.small(max_replicas=replicas):
                self.check(
                    self.placed(mesh, *placements),
                    lambda: create_dtensor_config(*flags, owners),
                    f"{placements} {owners} {flags} {options}",
                    **options,
                )
        strategy = Strategy(grid, "fsdp", "tp")
        groups = {"owners_per_matrix": 2, "tp_dim_per_param": 0}
        with self.small():
            layout = [strategy.cut(shape, 0) for shape, _ in FORMS]
            self.check(layout, lambda: strategy.config(**groups), str(strategy))

    def test_missing_gradients(self):
        with self.small():
            config = create_dtensor_config(owners_per_matrix=2)
            twins = self.twins(self.placed(mesh_of(4), S0), config)
            twins.step(missing=[0, 2])
            self.assertEverywhere([i for i in (0, 2) if local(twins.params[i]).any()])
            twins.set_gradients()
            if self.rank == min(twins.optimizer.assignments):
                twins.optimizer.zero_grad()
            self.assertRaisesEverywhere(
                twins.optimizer.step, RuntimeError, "some have none"
            )

    def test_relays_between_divided_matrices(self):
        """Owners of a divided matrix that have other numbers of small ones do not wait in a circle."""
        teams, small, large = (0, 2), itertools.cycle((2, 1)), itertools.cycle((3, 0))

        def owners_of(layouts, *_):
            divided = -1
            for layout in layouts:
                number, _ = layout.key.block
                divided += layout.divided is not None and number == 0
                if layout.divided is not None:
                    yield teams[divided // 2 % 2] + number
                else:
                    yield next(small if layout.shape[1] == 80 else large)

        shapes = [(64, 64)] * 12 + [(15, 80)] * 60 + [(15, 870)] * 6
        layout = [Spec(shape, grid_of(2, 2), (R, S0)) for shape in shapes]
        with (
            self.small(max_replicas=1),
            mock.patch.object(packs, "RELAY_BYTES", 1),
            mock.patch.object(callbacks, "assign_owners", lambda *a: [*owners_of(*a)]),
        ):
            twins = Twins(layout, create_dtensor_config(owners_per_matrix=2))
            twins.step()
        differ = [
            i
            for i, single in enumerate(twins.singles)
            if i >= 12
            and not local(twins.params[i]).equal(piece_of(single.detach(), layout[i]))
        ]
        self.assertEverywhere(differ)

    def test_one_owner(self):
        """Small matrices, one rank, and functions of the user have the bits of a single process."""
        layout, config = self.placed(mesh_of(4), S0), create_dtensor_config
        self.assertTrainsAlike(self.twins(layout, config(owners_per_matrix=4)), 2)
        with self.small():
            alone = self.placed(mesh_of(1), S0)
            self.assertTrainsAlike(self.twins(alone, config(owners_per_matrix=4)), 2)
            wrapped = config(owners_per_matrix=2)
            given = wrapped.gather_fn
            wrapped.gather_fn = lambda *args: given(*args)
            self.assertTrainsAlike(self.twins(layout, wrapped), 2)

    def test_errors_and_description(self):
        for factory in (create_auto_config, create_dtensor_config):
            for number in (0, -1, 2.0, True, None):
                pattern = "owners_per_matrix must be an int >= 1"
                with self.assertRaisesRegex(ValueError, pattern):
                    factory(owners_per_matrix=number)
        layout = self.placed(mesh_of(4), S0)
        with self.small():
            twins = self.twins(layout, create_dtensor_config(owners_per_matrix=2))
            self.assertRegex(twins.optimizer.describe(), "parameter 0 1/2")
            config = create_dtensor_config(owners_per_matrix=1 + self.rank % 2)
            self.assertRaisesEverywhere(
                lambda: self.twins(layout, config), ValueError, "ranks disagree"
            )


if __name__ == "__main__":
    run_tests()

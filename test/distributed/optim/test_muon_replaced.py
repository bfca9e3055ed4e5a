# Owner(s): ["oncall: distributed"]
"""Parameters that change under a Muon with a distributed_config: other parameters in their place, other
values, another placement or dtype. Frameworks do all of this after they build an optimizer.

The reference is a Muon without a config over whole matrices. This file makes the same changes to it. Its
momentum is the expected one: a parameter that a framework sharded keeps its momentum, and the momentum of
another parameter starts at zero.
"""

import re
import warnings
from collections import Counter
from datetime import timedelta
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_muon import (
    Cut,
    everyone,
    full,
    GlooOnCPU,
    grid_of,
    local,
    mesh_of,
    moved_alike,
    ParityAssertions,
    place,
    R,
    S0,
    S1,
    Spec,
    Strategy,
)


# Even, uneven, and with empty pieces on four ranks.
SHAPES = [(8, 8), (7, 5), (3, 9)]
# Before the first step, and between two.
TIMES = (0, 1)


class Pair(NamedTuple):
    """A parameter, and the whole matrix that one process has for it."""

    seed: int
    spec: Spec | Cut
    param: nn.Parameter
    single: nn.Parameter


def make_pair(seed, spec):
    whole = full(seed, spec.shape, spec.dtype)
    return Pair(seed, spec, nn.Parameter(place(whole, spec)), nn.Parameter(whole))


class Sides:
    """A Muon with a config and one without, over the same matrices."""

    def __init__(self, pairs, config=None, named=False):
        self.pairs = list(pairs)
        config = create_dtensor_config() if config is None else config
        params = [pair.param for pair in self.pairs]
        if named:
            params = [(f"w{i}", param) for i, param in enumerate(params)]
        self.single = Muon([pair.single for pair in self.pairs], lr=0.1)
        self.optimizer = Muon(params, lr=0.1, distributed_config=config)
        self.steps = 0

    @classmethod
    def of(cls, specs, *args, **kwargs):
        pairs = [make_pair(i, spec) for i, spec in enumerate(specs)]
        return cls(pairs, *args, **kwargs)

    def set_pairs(self, pairs, in_place=False):
        """Gives both optimizers these parameters instead of what they have."""
        self.pairs = list(pairs)
        for optimizer, params in (
            (self.optimizer, [pair.param for pair in self.pairs]),
            (self.single, [pair.single for pair in self.pairs]),
        ):
            group = optimizer.param_groups[0]
            if in_place:
                group["params"][:] = params
            else:
                group["params"] = params

    def replacement(self, index, spec, restarts=False):
        """Another parameter, of other values, for the place of number ``index``."""
        old = self.pairs[index]
        new = make_pair(old.seed + 500, spec)
        if restarts or spec.shape != old.spec.shape:
            return new
        # The single process keeps its own parameter, and with it the momentum.
        old.single.data.copy_(new.single)
        return new._replace(single=old.single)

    def replace_all(self, specs, restarts=False):
        pairs = [self.replacement(i, spec, restarts) for i, spec in enumerate(specs)]
        self.set_pairs(pairs)

    def step(self):
        self.steps += 1
        for pair in self.pairs:
            seed = pair.seed + 1000 * self.steps
            gradient = full(seed, pair.spec.shape, pair.spec.dtype)
            pair.single.grad = gradient
            pair.param.grad = place(gradient, pair.spec)
        self.single.step()
        self.optimizer.step()

    def problems(self):
        """The differences of this rank from the single process."""
        found = []
        for i, (_, spec, param, single) in enumerate(self.pairs):
            name = f"{i}: {spec.shape} {spec.placements} {spec.dtype}"
            momentum = self.optimizer.state.get(param, {}).get("momentum_buffer")
            expected = self.single.state[single]["momentum_buffer"]
            if momentum is None:
                found.append(f"no momentum of {name}")
                continue
            for what, mine, whole in (
                ("parameter", param.detach(), single.detach()),
                ("momentum", momentum, expected),
            ):
                wanted = place(whole, spec)
                if isinstance(mine, DTensor) != isinstance(wanted, DTensor):
                    found.append(f"{what} {name} is a {type(mine)}")
                elif isinstance(mine, DTensor) and (
                    (mine.placements, mine.device_mesh, mine.shape)
                    != (wanted.placements, wanted.device_mesh, wanted.shape)
                ):
                    found.append(f"{what} {name}: {mine.placements} {mine.shape}")
                elif mine.dtype != wanted.dtype:
                    found.append(f"{what} {name} is {mine.dtype}")
                elif what == "momentum" and not torch.equal(local(mine), local(wanted)):
                    found.append(f"{what} {name}")
                elif not moved_alike(local(mine), local(wanted), self.steps):
                    found.append(f"{what} {name}")
        return found


class ReplacedParameters(ParityAssertions):
    """To be put before a TestCase whose methods run on every rank."""

    def assertSteps(self, sides, message, steps=2):
        """``sides`` make steps without an error, and stay equal."""
        for step in range(steps):
            before = [pair.single.detach().clone() for pair in sides.pairs]
            message = f"{message} step {step}"
            with self.everywhere(message):
                sides.step()
                problems = sides.problems()
                self.assertFalse(problems, f"{problems}")
                for pair, old in zip(sides.pairs, before, strict=True):
                    self.assertFalse(torch.equal(pair.single.detach(), old))

    def mesh(self):
        return mesh_of(self.world_size)

    def grid(self):
        return grid_of(2, self.world_size // 2)

    def specs(self, *placements, mesh=None, shapes=SHAPES):
        """Matrices on a mesh; plain ones, whole on each rank, without placements."""
        if not placements:
            return [Spec(shape, None, None) for shape in shapes]
        mesh = self.mesh() if mesh is None else mesh
        return [Spec(shape, mesh, placements) for shape in shapes]

    # param_group["params"]

    def check_replaced(self, before, after, message):
        for steps in TIMES:
            sides = Sides.of(before)
            told = f"{message} after {steps}"
            self.assertSteps(sides, f"{told}, as it was,", steps)
            sides.replace_all(after)
            self.assertSteps(sides, told)
            # And back again.
            sides.replace_all(before)
            self.assertSteps(sides, f"{told} and back", 1)

    def test_plain_parameters_are_sharded(self):
        self.check_replaced(self.specs(), self.specs(S0), "plain to Shard(0)")
        self.check_replaced(self.specs(), self.specs(S1), "plain to Shard(1)")

    def test_plain_parameters_are_replicated(self):
        self.check_replaced(self.specs(), self.specs(R), "plain to Replicate")

    def test_shards_become_replicas(self):
        self.check_replaced(self.specs(S0), self.specs(R), "Shard(0) to Replicate")

    def test_shards_are_cut_otherwise(self):
        self.check_replaced(self.specs(S0), self.specs(S1), "Shard(0) to Shard(1)")

    def test_parameters_on_another_mesh(self):
        grid = self.specs(S1, S0, mesh=self.grid())
        half = self.specs(S0, mesh=mesh_of(self.world_size // 2))
        self.check_replaced(self.specs(S0), grid, "to a mesh of two dimensions")
        self.check_replaced(self.specs(S0), half, "to a part of the ranks")

    def test_equal_placements(self):
        """Without names, another layer of equal shape looks like this. As in stock Muon, it starts at zero."""
        for named in (False, True):
            sides = Sides.of(self.specs(S0), named=named)
            self.assertSteps(sides, f"{named=}, before,", 1)
            sides.replace_all(self.specs(S0), restarts=not named)
            pattern = r"momentum of these starts at zero.*: parameter 0 .*parameter 2 "
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                self.assertSteps(sides, f"{named=}")
            texts = [str(one.message) for one in warned]
            found = [text for text in texts if re.search(pattern, text)]
            with self.everywhere(f"{named=}: {texts}"):
                self.assertEqual(len(found), int(self.rank == 0 and not named))

    def test_some_parameters_only(self):
        for steps in TIMES:
            for in_place in (False, True):
                sides = Sides.of(self.specs(S0))
                self.assertSteps(sides, "as it was,", steps)
                pairs = list(sides.pairs)
                pairs[1] = sides.replacement(1, self.specs(S1)[1])
                sides.set_pairs(pairs, in_place)
                self.assertSteps(sides, f"{in_place=} after {steps}")

    def test_other_shapes_begin_anew(self):
        for steps in TIMES:
            sides = Sides.of(self.specs(S0))
            self.assertSteps(sides, "as it was,", steps)
            # The last one has its shape, but another placement, and keeps its momentum.
            shapes = [(6, 8), (5, 7), (3, 9)]
            sides.replace_all(self.specs(S1, shapes=shapes))
            self.assertSteps(sides, f"after {steps}")

    # Other lists

    def test_reordered(self):
        # Two have one shape. Momentum belongs to the parameter, not to its place.
        shapes = [(8, 8), (7, 5), (8, 8), (3, 9)]
        for steps in TIMES:
            for in_place in (False, True):
                sides = Sides.of(self.specs(S0, shapes=shapes))
                self.assertSteps(sides, "as it was,", steps)
                sides.set_pairs(sides.pairs[::-1], in_place)
                self.assertSteps(sides, f"{in_place=} after {steps}")

    def test_appended(self):
        for steps in TIMES:
            for in_place in (False, True):
                sides = Sides.of(self.specs(S0))
                self.assertSteps(sides, "as it was,", steps)
                more = [
                    make_pair(50, self.specs(S1)[0]),
                    make_pair(51, self.specs()[1]),
                ]
                sides.set_pairs([*sides.pairs, *more], in_place)
                self.assertSteps(sides, f"{in_place=} after {steps}")

    def test_shortened(self):
        for steps in TIMES:
            for in_place in (False, True):
                sides = Sides.of(self.specs(S0) + self.specs(S1))
                self.assertSteps(sides, "as it was,", steps)
                gone = sides.pairs[1].param
                before = local(gone.detach()).clone()
                sides.set_pairs([sides.pairs[0], *sides.pairs[2:-1]], in_place)
                self.assertSteps(sides, f"{in_place=} after {steps}")
                with self.everywhere():
                    self.assertTrue(torch.equal(local(gone.detach()), before))

    def test_saved_while_others_are_in_place(self):
        """state_dict() moved the momentum, and the former parameters restarted."""
        for message, change, count in (
            ("replaced", lambda first, rest: [nn.Parameter(first.clone()), *rest], 2),
            ("shortened", lambda first, rest: rest, 2),
        ):
            sides = Sides.of(self.specs(S0))
            self.assertSteps(sides, f"{message}, before,", 1)
            group = sides.optimizer.param_groups[0]
            params = group["params"]
            group["params"] = change(params[0].detach(), params[1:])
            with self.everywhere(message):
                # The new parameter has no momentum before its first step.
                self.assertEqual(len(sides.optimizer.state_dict()["state"]), count)
            group["params"] = params
            self.assertSteps(sides, message)

    def test_blocks_that_take_turns(self):
        """Block-coordinate training: the momentum of a block that rests stays with it, as in stock."""
        sides = Sides.of(self.specs(S0, shapes=[(8, 8)] * 4))
        blocks = [sides.pairs[:2], sides.pairs[2:]]
        for turn in range(4):
            sides.set_pairs(blocks[turn % 2])
            self.assertSteps(sides, f"turn {turn}")

    # The same parameters, changed

    def test_swapped_tensors(self):
        grid = self.specs(S1, S0, mesh=self.grid())
        for steps in TIMES:
            for before, after in [
                (self.specs(), self.specs()),
                (self.specs(S0), self.specs(S0)),
                (self.specs(S0), self.specs(S1)),
                (self.specs(S0), self.specs(R)),
                (self.specs(S0), grid),
            ]:
                sides = Sides.of(before)
                self.assertSteps(sides, "as it was,", steps)
                pairs = []
                for i, spec in enumerate(after):
                    old, new = sides.pairs[i], sides.replacement(i, spec)
                    old.param.grad = None
                    torch.utils.swap_tensors(old.param, new.param)
                    pairs.append(new._replace(param=old.param))
                sides.pairs = pairs
                placements = before[0].placements, after[0].placements
                self.assertSteps(sides, f"{placements} after {steps}")

    def test_data_of_equal_shape(self):
        strategy = Strategy(self.mesh(), "fsdp")
        for steps in TIMES:
            for specs, config in [
                (self.specs(), None),
                ([strategy.cut(shape) for shape in SHAPES], strategy.config()),
            ]:
                sides = Sides.of(specs, config)
                self.assertSteps(sides, "as it was,", steps)
                for i, pair in enumerate(sides.pairs):
                    new = sides.replacement(i, pair.spec)
                    pair.param.data = new.param.detach()
                self.assertSteps(sides, f"after {steps}")

    def test_dtypes(self):
        for dtype in (torch.bfloat16, torch.float64):
            for steps in TIMES:
                sides = Sides.of(self.specs(S0) + self.specs(R) + self.specs())
                self.assertSteps(sides, "as it was,", steps)
                model = nn.ParameterList([pair.param for pair in sides.pairs])
                model.zero_grad()
                model.to(dtype)
                for pair in sides.pairs:
                    pair.single.grad = None
                    pair.single.data = pair.single.data.to(dtype)
                    state = sides.single.state.get(pair.single, {})
                    for name, buffer in state.items():
                        state[name] = buffer.to(dtype)
                sides.pairs = [
                    pair._replace(spec=pair.spec._replace(dtype=dtype))
                    for pair in sides.pairs
                ]
                with self.everywhere():
                    for pair, param in zip(sides.pairs, model, strict=True):
                        self.assertIs(pair.param, param)
                self.assertSteps(sides, f"{dtype} after {steps}")

    # Changes that frameworks make

    def model(self):
        layers = [nn.Linear(*shape[::-1], bias=False) for shape in SHAPES]
        return nn.Sequential(*layers)

    def test_model_on_meta_is_filled_later(self):
        with torch.device("meta"):
            model = self.model()
        fully_shard(model, mesh=self.mesh())
        optimizer = Muon(
            model.parameters(), lr=0.1, distributed_config=create_dtensor_config()
        )
        model.to_empty(device="cpu")
        pairs = []
        for i, param in enumerate(model.parameters()):
            pair = make_pair(i, self.specs(S0)[i])
            with torch.no_grad():
                param.to_local().copy_(pair.param.to_local())
            pairs.append(pair._replace(param=param))
        sides = Sides.__new__(Sides)
        sides.pairs, sides.steps, sides.optimizer = pairs, 0, optimizer
        sides.single = Muon([pair.single for pair in pairs], lr=0.1)
        self.assertSteps(sides, "filled")

    def test_placeholders_while_a_model_is_sharded(self):
        # Accelerate releases the whole parameters before it shards them. Placeholders keep their
        # addresses.
        model = self.model()
        specs = self.specs()
        for i, param in enumerate(model.parameters()):
            param.data = full(i, specs[i].shape)
        names = {p.data_ptr(): name for name, p in model.named_parameters()}
        pairs = [
            Pair(i, specs[i], param, nn.Parameter(param.detach().clone()))
            for i, param in enumerate(model.parameters())
        ]
        sides = Sides(pairs)
        (group,) = sides.optimizer.param_groups
        for i, param in enumerate(group["params"]):
            group["params"][i] = torch.empty(1, dtype=param.dtype)
            group["params"][i].data_ptr = param.data_ptr()
        fully_shard(model, mesh=self.mesh())
        sharded = dict(model.named_parameters())
        group["params"] = [sharded[names[p.data_ptr]] for p in group["params"]]
        sides.pairs = [
            pair._replace(spec=spec, param=param)
            for pair, spec, param in zip(
                sides.pairs, self.specs(S0), group["params"], strict=True
            )
        ]
        self.assertSteps(sides, "sharded")

    # Mistakes

    def test_change_on_one_rank_only(self):
        for steps in TIMES:
            # This breaks the group. DTensor's caches tell its mesh from others by its name.
            group, name = dist.new_group(), f"changed after {steps}"
            mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))
            sides = Sides.of([Spec(shape, mesh, (S0,)) for shape in SHAPES])
            self.assertSteps(sides, "as it was,", steps)
            changed = self.world_size - 1
            if self.rank == changed:
                pairs = list(sides.pairs)
                pairs[1] = sides.replacement(1, pairs[1].spec)
                sides.set_pairs(pairs)
            before = [local(pair.param.detach()).clone() for pair in sides.pairs]
            dist.barrier()
            _set_pg_timeout(timedelta(seconds=3), group)
            message = ""
            try:
                sides.step()
            except RuntimeError as error:
                message = str(error)
            texts = everyone(message)
            with self.everywhere(f"{texts}"):
                # It waits over the store: a collective would pair up with the others' first one.
                pattern = (
                    r"found changed parameters in step.*waiting for ranks \[0, 1, 2\]"
                )
                self.assertRegex(texts[changed], pattern)
                # The other ranks learn the reason.
                for text in texts[:changed]:
                    self.assertRegex(
                        text, r"Rank 3 reports: it found changed parameters"
                    )
                for pair, old in zip(sides.pairs, before, strict=True):
                    self.assertTrue(torch.equal(local(pair.param.detach()), old))

    def test_rebuild_makes_as_many_store_requests_on_any_number_of_ranks(self):
        """Each rank asked for each other rank: at 256 ranks, 131,840 requests."""
        most = {}
        for count in (2, 4):
            sides = Sides.of([Spec((8, 8), mesh_of(count), (S0,))])
            self.assertSteps(sides, "before", 1)
            sides.replace_all([Spec((8, 8), mesh_of(count), (S1,))])
            store = CountingStore(distributed_c10d._get_default_store())
            with mock.patch.object(
                distributed_c10d, "_get_default_store", lambda store=store: store
            ):
                self.assertSteps(sides, f"{count} ranks", 1)
            most[count] = max(sum(calls.values()) for calls in everyone(store.calls))
        self.assertGreater(most[2], 0)
        self.assertEqual(most[4], most[2])


class CountingStore:
    """Counts the requests that this rank makes to a store."""

    def __init__(self, store):
        self.store, self.calls = store, Counter()

    def __getattr__(self, name):
        self.calls[name] += 1
        return getattr(self.store, name)


@requires_gloo()
class TestMuonReplacedOnFour(GlooOnCPU, ReplacedParameters, MultiProcContinuousTest):
    world_size = 4


class TestMuonReplacedOnOne(TestCase):
    """One process without process groups."""

    def setUp(self):
        super().setUp()
        threads = torch.get_num_threads()
        self.addCleanup(torch.set_num_threads, threads)
        torch.set_num_threads(1)

    def test_data_of_another_shape(self):
        for make in (create_dtensor_config, create_auto_config):
            for steps in TIMES:
                sides = Sides.of([Spec(shape, None, None) for shape in SHAPES], make())
                for _ in range(steps):
                    sides.step()
                old = sides.pairs[1]
                larger = make_pair(700, Spec((9, 12), None, None))
                # The single process takes another parameter, which has no momentum.
                sides.single.param_groups[0]["params"][1] = larger.single
                old.param.grad = None
                old.param.data = larger.param.detach()
                sides.pairs[1] = larger._replace(param=old.param)
                for _ in range(2):
                    sides.step()
                    problems = sides.problems()
                    self.assertFalse(problems, f"{make} after {steps}: {problems}")


if __name__ == "__main__":
    run_tests()

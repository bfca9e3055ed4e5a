# Owner(s): ["oncall: distributed"]
"""Random configurations: each trains as one process does.

The ranks play what they draw, on meshes and process groups of one to four of them. A plan that fails is printed.
The test command tries some plans, the same ones each time. ``MUON_TEST_FUZZ=10000`` tries as many, and
``MUON_TEST_FUZZ_SEED`` says which ones.
"""

import math
import os
import unittest

import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import _StridedShard, Shard
from torch.testing._internal.common_distributed import TIMEOUT_OVERRIDE
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.checkers.fuzz_plans import (
    Config,
    device_mesh,
    Event,
    Matrix,
    Mesh,
    Plan,
    TIMEOUT,
    WORLD,
)
from torch.testing._internal.distributed._muon.checkers.fuzz_player import Player
from torch.testing._internal.distributed._muon.common_muon import OnCPU, R, S0, S1


try:
    import hypothesis
    from hypothesis import strategies as st
except ImportError as error:
    raise unittest.SkipTest("hypothesis is not installed") from error


# Few enough to be made once: whole meshes, and parts of the world.
# A group sorts its ranks. Those of one dimension of this mesh ascend along the other one, and the next ones descend: a
# piece for each place in its groups is no grid.
TWISTED = Mesh((2, 2), (0, 3, 1, 2))
WHOLE = [
    Mesh((4,), (0, 1, 2, 3)),
    Mesh((4,), (2, 0, 3, 1)),
    Mesh((2, 2), (0, 1, 2, 3)),
    TWISTED,
    Mesh((1, 4), (1, 0, 3, 2)),
    Mesh((2, 1, 2), (0, 1, 2, 3)),
]
PARTS = [
    Mesh((3,), (0, 1, 2)),
    Mesh((3,), (3, 1, 0)),
    Mesh((1,), (3,)),
    Mesh((3, 1), (1, 2, 3)),
    Mesh((1, 2), (2, 0)),
]
# Each has one rank in common with the next one, in a ring.
RING = [Mesh((2,), pair) for pair in ((0, 1), (2, 1), (2, 3), (0, 3))]
MESHES = [*WHOLE, *PARTS, *RING]
SIDES = (8, 1, 2, 3, 4, 5, 7, 9, 16)
DTYPES = torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16
OPTIONS = {
    "lr": (0.1, 0.0, torch.tensor(0.05)),
    "momentum": (0.5, 0.0),
    "weight_decay": (0.0, 0.5),
    "nesterov": (False,),
    "ns_steps": (1, 3),
    "adjust_lr_fn": ("original", "match_rms_adamw"),
    "foreach": (True, False),
    "ns_algorithm": ("gram", "symmetric"),
}


def one_of(*values):
    return st.sampled_from(values)


def rarely():
    return st.integers(0, 7).map(lambda drawn: drawn == 7)


@st.composite
def options(draw):
    names = draw(st.lists(one_of(*OPTIONS), unique=True, max_size=3))
    return tuple((name, draw(one_of(*OPTIONS[name]))) for name in names)


@st.composite
def placements(draw, mesh, ndim):
    sizes, dim = mesh.sizes, draw(st.integers(0, ndim - 1))
    if len(sizes) > 1 and draw(one_of(False, False, True)):
        # As fully_shard leaves after tensor parallelism.
        between = [R] * (len(sizes) - 2)
        return _StridedShard(dim, split_factor=sizes[-1]), *between, Shard(dim)
    return tuple(draw(one_of(*map(Shard, range(ndim)), R)) for _ in sizes)


@st.composite
def shapes(draw, takes_stacks):
    leading = []
    if takes_stacks and draw(st.booleans()):
        leading = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    return (*leading, draw(one_of(*SIDES)), draw(one_of(*SIDES)))


@st.composite
def forms(draw, shape, tp_dim=None):
    """Which matrices a parameter is: flattened, of parts that are rows or columns and may repeat, or one."""
    found = ()
    # Tensor parallelism may not cut what is flattened.
    if len(shape) > 2 and tp_dim in (None, 0, 1) and draw(st.booleans()):
        shape, found = (shape[0], math.prod(shape[1:])), (("flatten", True),)
    dim = draw(one_of(0, 0, 1))
    lines = shape[-2:][dim]
    if lines > 1 and draw(one_of(False, False, True)):
        repeats = draw(one_of(*(n for n in (1, 2, 3, 4) if lines % n == 0)))
        each = lines // repeats
        first = draw(st.integers(1, each))
        sizes = (first,) * (each // first)
        if each % first:
            sizes += (each % first,)
        split = {"sizes": sizes, "repeats": repeats, "dim": dim}
        found += (("split", split if repeats > 1 or dim else sizes),)
    return found


@st.composite
def dtensors(draw, takes_stacks, meshes):
    mesh, shape = draw(one_of(*meshes)), draw(shapes(takes_stacks))
    gradients = None
    if mesh.ascends and draw(rarely()):
        gradients = (draw(one_of(R, Partial())),) * len(mesh.sizes)
    placed, form = draw(placements(mesh, len(shape))), draw(forms(shape))
    return Matrix(shape, mesh, placed, gradients, draw(one_of(*DTYPES)), options=form)


@st.composite
def plain(draw, takes_stacks, config):
    """Pieces under process groups, else each rank's own matrices."""
    shape = draw(shapes(takes_stacks))
    tp_dim = (
        draw(one_of(None, *range(-2, len(shape)))) if "tp" in config.kinds else None
    )
    how = draw(one_of("chunk", "balanced", "last"))
    expert = "ep" in config.kinds and draw(st.booleans())
    form = draw(forms(shape, tp_dim))
    return Matrix(
        shape,
        dtype=draw(one_of(*DTYPES)),
        tp_dim=tp_dim,
        how=how,
        is_expert=expert,
        options=form,
    )


@st.composite
def configs(draw):
    functions = draw(one_of("built in", "built in", "built in", "wrapped"))
    mesh, kinds = None, ()
    if draw(st.booleans()):
        grids = [mesh for mesh in (*WHOLE, *PARTS) if mesh is not TWISTED]
        mesh = draw(one_of(*grids))
        kinds = draw(st.permutations(["fsdp", "tp", "ep", "ddp", "cp", "pp"]))
        kinds = tuple(kinds[: len(mesh.sizes)])
    prefetch = draw(st.integers(0, 3))
    return Config(draw(st.booleans()), prefetch, functions, mesh, kinds)


@st.composite
def matrices(draw, config, takes_stacks):
    if config.mesh is None:
        meshes = draw(one_of(RING, MESHES, WHOLE))
        placed = dtensors(takes_stacks, meshes)
        return draw(st.one_of(placed, placed, placed, plain(takes_stacks, config)))
    # All ranks of the groups must hold DTensors next to them.
    same_ranks = [m for m in MESHES if set(m.ranks) == set(config.mesh.ranks)]
    own = plain(takes_stacks, config)
    return draw(st.one_of(own, own, dtensors(takes_stacks, same_ranks)))


@st.composite
def events(draw, config, takes_stacks):
    action = draw(
        one_of("train", "freeze", "replace", "change_options", "add", "reload")
    )
    argument = None
    if action == "replace":
        three = st.tuples(*[one_of(S0, S1, R)] * 3)
        argument = draw(one_of(*WHOLE, *PARTS)), draw(three)
    elif action == "change_options":
        changes = {"lr": 0.05}, {"weight_decay": 0.25}, {"nesterov": False}
        argument = draw(one_of(*changes))
    elif action == "add":
        drawn = st.lists(matrices(config, takes_stacks), min_size=1, max_size=2)
        own = draw(options())
        argument = [
            matrix._replace(tp_dim=None, is_expert=False, options=own)
            for matrix in draw(drawn)
        ]
    elif action == "reload":
        argument = draw(one_of("same", "new", "whole"))
    changed, missing = draw(st.integers(0, 255)), draw(st.integers(0, 255))
    # A checkpoint with momentum of another dtype is rounded where there is a gradient.
    has_all = action == "reload" or draw(st.booleans())
    return Event(action, argument, changed, 0 if has_all else missing)


@st.composite
def plans(draw):
    config = draw(configs())
    # Functions of the user's cannot tell apart matrices of a stack that different ranks hold.
    takes_stacks = config.functions == "built in" and draw(one_of(False, False, True))
    distinct = draw(st.lists(matrices(config, takes_stacks), min_size=1, max_size=4))
    more = draw(st.lists(options(), min_size=1, max_size=2))
    placed = []
    # Several matrices are placed in the same way, so that an owner has more than one in a bucket.
    for matrix in draw(st.lists(one_of(*distinct), min_size=1, max_size=10)):
        is_turned = not matrix.options and draw(rarely())
        own = matrix.options + draw(one_of(*more))
        placed.append(matrix._replace(is_turned=is_turned, options=own))
    limits = {
        "MAX_BUCKETS": draw(st.integers(1, 4)),
        "BUCKET_BYTES": draw(one_of(2**20, 64, 300)),
        "ROUND_BYTES": draw(one_of(2**20, 40, 200)),
    }
    return Plan(
        config,
        tuple(placed),
        tuple(draw(st.lists(events(config, takes_stacks), max_size=4))),
        takes_stacks,
        is_named=draw(st.booleans()),
        grad_dtype=draw(one_of(None, None, None, torch.float32, torch.bfloat16)),
        limits=tuple(limits.items()),
    )


SETTINGS = hypothesis.settings(
    max_examples=int(os.environ.get("MUON_TEST_FUZZ", "110")),
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    # One configuration may make process groups first, or wait for a busy machine.
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


class TestMuonFuzz(OnCPU):
    world_size = WORLD
    timeout = TIMEOUT

    # Each rank draws the same plans.
    @SETTINGS
    @hypothesis.seed(int(os.environ.get("MUON_TEST_FUZZ_SEED", "0")))
    @hypothesis.given(plans())
    def test_trains_as_one_process(self, plan):
        # All ranks make all meshes.
        for mesh in MESHES:
            device_mesh(mesh)
        problems = Player(plan, self.rank).run()
        # Not assertFalse, whose text would be cut.
        if problems:
            self.fail("\n".join(problems))


# A long run takes as long as it takes.
TIMEOUT_OVERRIDE["test_trains_as_one_process"] = 10**6


if __name__ == "__main__":
    run_tests()

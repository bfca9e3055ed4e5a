# Owner(s): ["oncall: distributed"]
"""Random configurations: each trains as one process does. Random matrices: owners and buckets are nearly the best.

The ranks play what they draw, on meshes and process groups of one to four of them. A plan that fails is
shrunk to the least that still does.
"""

import itertools
import math
from collections import Counter

import torch
from torch.optim._muon_engine.layouts.layout import Key, Layout, Shards
from torch.optim._muon_engine.schedule import buckets
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners, flops_of
from torch.optim.muon import CUBIC
from torch.testing._internal.common_distributed import TIMEOUT_OVERRIDE
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.checkers import fuzz_plans
from torch.testing._internal.distributed._muon.checkers.fuzz_matrices import TIMEOUT
from torch.testing._internal.distributed._muon.checkers.fuzz_plans import (
    Mesh,
    Plan,
    WORLD,
)
from torch.testing._internal.distributed._muon.checkers.fuzz_player import Player
from torch.testing._internal.distributed._muon.checkers.fuzz_settings import (
    fuzz,
    one_of,
    st,
)
from torch.testing._internal.distributed._muon.common_muon import OnCPU


# Few enough to be made once: whole meshes, and slices of meshes.
WHOLE = [
    Mesh((4,), (0, 1, 2, 3)),
    Mesh((4,), (2, 0, 3, 1)),
    Mesh((2, 2), (0, 1, 2, 3)),
    Mesh((2, 2), (0, 3, 1, 2)),
    Mesh((4, 1), (0, 1, 2, 3)),
    Mesh((1, 4), (1, 0, 3, 2)),
    Mesh((2, 1, 2), (0, 1, 2, 3)),
    Mesh((2, 2, 1), (0, 2, 1, 3)),
]
PARTS = [
    Mesh((3,), (0, 1, 2)),
    Mesh((3,), (3, 1, 0)),
    Mesh((2,), (0, 1)),
    Mesh((2,), (2, 1)),
    Mesh((2,), (2, 3)),
    Mesh((2,), (0, 3)),
    Mesh((1,), (3,)),
    Mesh((3, 1), (1, 2, 3)),
    Mesh((1, 2), (2, 0)),
]
SLICES = [
    Mesh((2, 2), (0, 1, 2, 3), (0,)),
    Mesh((2, 2), (0, 1, 2, 3), (1,)),
    Mesh((4, 1), (0, 1, 2, 3), (1,)),
    Mesh((2, 1, 2), (0, 1, 2, 3), (0, 1)),
]
# Pairs that have one rank in common, of which none has all ranks of another one.
CROSSING = [
    SLICES[:2],
    [Mesh((2,), pair) for pair in ((0, 1), (2, 1), (2, 3), (0, 3))],
]
SIDES = (8, 1, 0, 2, 3, 4, 5, 7, 9, 16)
DTYPES = ("float32", "float32", "float64", "bfloat16", "float16")
# None is the parameter's own.
GRAD_DTYPES = (None, None, None, None, None, "float32", "float64", "bfloat16")
# Without products of the fifth degree: the same each time, and others in each step.
CUBICS = ((1.5, -0.5, 0.0), CUBIC["ns_coefficients"])


def rarely():
    return st.integers(0, 7).map(lambda drawn: drawn == 7)


@st.composite
def options(draw):
    choices = {
        "lr": (0.1, 0.02, 0.0, (0.05,)),
        "momentum": (0.5, 0.0),
        "weight_decay": (0.0, 0.5),
        "nesterov": (False,),
        "ns_steps": (1, 3, 0),
        "eps": (100.0,),
        "adjust_lr_fn": ("original", "match_rms_adamw", "spectral_unclamped"),
        "foreach": (True, True, False, None),
        "ns_algorithm": ("gram", "symmetric"),
        "ns_coefficients": ((2.0, -1.5, 0.5), *CUBICS),
    }
    names = draw(st.lists(one_of(*choices), unique=True, max_size=3))
    return tuple((name, draw(one_of(*choices[name]))) for name in names)


def has_own_steps(options):
    """Whether Newton-Schulz has other coefficients in each step, and so as many steps as these."""
    coefficients = dict(options).get("ns_coefficients", (0,))
    return isinstance(coefficients[0], tuple)


def fitting(options):
    """The options, with the number of steps that belongs to the coefficients."""
    if not has_own_steps(options):
        return options
    steps = len(dict(options)["ns_coefficients"])
    return tuple({**dict(options), "ns_steps": steps}.items())


@st.composite
def placements(draw, mesh, ndim):
    count = len(mesh.shape)
    if count > 1 and draw(one_of(False, False, True)):
        dim = draw(st.integers(0, ndim - 1))
        between = [draw(one_of("R", dim)) for _ in range(count - 2)]
        return (f"/{dim}", *between, dim)
    return tuple(draw(one_of(*range(ndim), "R")) for _ in range(count))


@st.composite
def shapes(draw, batched):
    shape = draw(one_of(*SIDES)), draw(one_of(*SIDES))
    if batched and draw(st.booleans()):
        leading = st.lists(st.integers(0, 4), min_size=1, max_size=2)
        return (*draw(leading), *shape)
    return shape


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
        if draw(st.booleans()):
            # As many lines for each head, of which a rank may have whole ones.
            head = draw(one_of(*(n for n in (2, 4, 1) if each % n == 0)))
            sizes = (head,) * (each // head)
        else:
            first = draw(st.integers(1, each))
            sizes = (first, each - first) if first < each else (each,)
        split = {"sizes": sizes, "repeats": repeats, "dim": dim}
        found += (("split", split if repeats > 1 or dim else sizes),)
    return found


@st.composite
def dtensors(draw, batched, meshes):
    mesh = draw(one_of(*meshes))
    shape = draw(shapes(batched))
    form = draw(forms(shape))
    placed, dtype = draw(placements(mesh, len(shape))), draw(one_of(*DTYPES))
    flags = {"turned": draw(rarely()) and not form, "frozen": draw(rarely())}
    flags["grad_dtype"] = draw(one_of(*GRAD_DTYPES))
    return fuzz_plans.Matrix(shape, mesh, placed, dtype, form=form, **flags)


@st.composite
def plain(draw, batched, config, later=False):
    """Pieces under process groups, else each rank's own matrices."""
    shape = draw(shapes(batched))
    tp_dim = None
    if config.tp_dim is not None:
        tp_dim = config.tp_dim
    elif config.dims_of("tp") and not later:
        tp_dim = draw(one_of(None, *range(-2, len(shape))))
    form = draw(forms(shape, tp_dim))
    dtype, how = draw(one_of(*DTYPES)), draw(one_of("chunk", "balanced", "last"))
    flags = {"turned": draw(rarely()) and not form, "frozen": draw(rarely())}
    expert = bool(config.dims_of("ep")) and not later and draw(st.booleans())
    flags |= {"tp_dim": tp_dim, "how": how, "expert": expert}
    flags["grad_dtype"] = draw(one_of(*GRAD_DTYPES))
    return fuzz_plans.Matrix(shape, dtype=dtype, form=form, **flags)


@st.composite
def configs(draw):
    kinds = "fsdp", "tp", "ep", "ddp", "cp"
    kind = draw(one_of("dtensor", "dtensor", "dtensor", "auto", *kinds))
    if kind == "auto":
        return fuzz_plans.Config(kind)
    mesh, of_dims = None, ()
    if kind != "dtensor":
        mesh = draw(one_of(*WHOLE, *PARTS))
        others = draw(st.permutations([k for k in (*kinds, None) if k != kind]))
        of_dims = (kind, *others)[: len(mesh.sizes)]
        of_dims = of_dims[:: draw(one_of(1, -1))]
    tp_dim = draw(one_of(None, 0, 1, -1)) if "tp" in of_dims else None
    return fuzz_plans.Config(
        "dtensor" if mesh is None else "groups",
        draw(st.booleans()),
        draw(st.integers(0, 3)),
        draw(one_of("built", "built", "built", "assigned", "wrapped")),
        mesh,
        of_dims,
        tp_dim,
    )


def meshes_under(config):
    """For DTensors. Next to process groups, all ranks of these groups must hold them."""
    found = [*WHOLE, *PARTS, *SLICES]
    if config.mesh is not None:
        found = [m for m in found if set(m.ranks) == set(config.mesh.ranks)]
        found = [m for m in found if not m.kept]
    return found


def placed_by_tp(plan, given, all_matrices):
    """``given``, where plain matrices are whole if ``all_matrices`` show what tensor parallelism cut."""
    if plan.config.tp_dim is None:
        return given
    dim = None if plan.shows_tp(all_matrices) else plan.config.tp_dim
    return tuple(m if m.mesh is not None else m._replace(tp_dim=dim) for m in given)


@st.composite
def matrices(draw, config, batched, later=False):
    beside = dtensors(batched, meshes_under(config))
    own = plain(batched, config, later)
    if config.mesh is None:
        return draw(st.one_of(beside, beside, beside, own))
    # Owners of a DTensor that has replicas on other meshes are not for a user's assign_fn to guess.
    with_dtensors = config.functions == "built"
    return draw(st.one_of(own, own, beside) if with_dtensors else own)


# Those that take effect in a step, and must not come before another one does.
CHANGES = "freeze", "replace"
# Few matrices of few plans allow these.
RARE = "mismatch", "mismatch", "replace", "replace", "rest"


@st.composite
def actions(draw, plan, batched):
    present, config, found = list(plan.matrices), plan.config, []
    builders = {r for m in plan.matrices for r in range(WORLD) if plan.sharing(m, r)}
    for _ in range(draw(one_of(2, 3, 4, 1, 0))):
        numbers, groups = range(len(present)), range(len(plan.options))
        changing = [n for n in numbers if plan.see([present[n]], present)]
        of_group = [[m for m in present if m.group == at] for at in groups]
        shows_tp = plan.shows_tp(present)
        possible = {
            "step": (None,),
            "change_options": groups,
            "freeze": changing,
            "add": (None,),
            "reload": numbers,
            "replace": [n for n in changing if present[n].mesh is not None],
            "mismatch": [*mismatches(plan, present)],
            "reverse": [at for at in groups if plan.see(of_group[at], present, 2)],
            "rest": [
                n
                for n in changing
                if holders_have_others(plan, n, present)
                and plan.shows_tp(present[:n] + present[n + 1 :]) == shows_tp
            ],
        }
        kinds = [kind for kind, choices in possible.items() if choices]
        kind = draw(one_of(*kinds, *(kind for kind in RARE if kind in kinds)))
        choice = draw(one_of(*possible[kind]))
        names = [name for name, *_ in found]
        last = max((i for i, name in enumerate(names) if name == "step"), default=-1)
        if kind not in ("step", "change_options", "reload", "freeze"):
            if last < 0 or {*CHANGES} & {*names[last + 1 :]}:
                found.append(fuzz_plans.STEP)
        if kind == "step":
            found.append(draw(steps(present)))
        elif kind == "change_options":
            values = {"lr": 0.05, "weight_decay": 0.25, "nesterov": False}
            values["adjust_lr_fn"] = "match_rms_adamw"
            if not has_own_steps(plan.options[choice]):
                values["ns_steps"] = 2
            found.append((kind, choice, (draw(one_of(*values.items())),)))
        elif kind == "freeze":
            frozen = draw(st.booleans())
            present[choice] = present[choice]._replace(frozen=frozen)
            found.append((kind, choice, frozen))
        elif kind == "reload":
            moved, matrix = (), present[choice]
            if matrix.mesh is not None and matrix.mesh.in_order:
                other = draw(placements(matrix.mesh, len(matrix.shape)))
                moved = ((choice, other),)
            found.append((kind, draw(one_of("same", "new", "whole")), moved))
        elif kind == "mismatch":
            number, _ = choice
            names = [*fuzz_plans.OTHER]
            if has_own_steps(options_of(plan, found, present[number].group)):
                names.remove("ns_steps")
            option = draw(one_of(*names))
            problems = "none", "none", "misshapen", "sparse", option, option
            found.append((kind, draw(one_of(*problems)), *choice))
        elif kind == "replace":
            mesh, placed = present[choice].mesh, present[choice].placements
            if mesh.in_order:
                same = [m for m in WHOLE + PARTS if set(m.ranks) == set(mesh.ranks)]
                same = [m for m in same if m.in_order and not mesh.kept]
                mesh = draw(one_of(mesh, *same))
                placed = draw(placements(mesh, len(present[choice].shape)))
            replaced = present[choice]._replace(mesh=mesh, placements=placed)
            flags = draw(st.tuples(st.booleans(), st.booleans()))
            saved = draw(one_of(None, "not loaded", "and loaded"))
            now = present[:choice] + [replaced] + present[choice + 1 :]
            if plan.shows_tp(now) == shows_tp:
                present = now
                found.append((kind, choice, mesh, placed, *flags, saved))
        elif kind == "add":
            more = matrices(config, batched, later=True)
            more = draw(st.lists(more, min_size=1, max_size=2))
            group = len(plan.options) + sum(name == "add" for name, *_ in found)
            new = tuple(m._replace(form=(), group=group) for m in more)
            new = placed_by_tp(plan, new, present)
            holders = {r for m in new for r in range(WORLD) if plan.sharing(m, r)}
            if holders <= builders and all(
                plan.see([m], present + [*new]) for m in new
            ):
                if plan.shows_tp(present + [*new]) == shows_tp:
                    found.append((kind, new, fitting(draw(options()))))
                    present = present + [*new]
        else:
            found.append((kind, choice))
    return (*found, draw(steps(present)))


def holders_have_others(plan, number, present):
    holders = [r for r in range(WORLD) if plan.sharing(present[number], r)]
    return all(sum(bool(plan.sharing(m, r)) for m in present) > 1 for r in holders)


def options_of(plan, found, group):
    """The options with which a group of parameters is made, maybe by one of the actions ``found``."""
    added = [action[2] for action in found if action[0] == "add"]
    return [*plan.options, *added][group]


def mismatches(plan, present):
    """Matrices and ranks: all ranks that compare something with this one hear of a mismatch at once."""
    for number, matrix in enumerate(present):
        if plan.config.functions == "wrapped" or not plan.share_all_matrices(matrix):
            continue
        for culprit in range(WORLD):
            if len(plan.sharing(matrix, culprit)) > 1:
                linked = plan.linked(culprit, present)
                if linked <= plan.hear(matrix, culprit, present):
                    yield number, culprit


@st.composite
def steps(draw, present):
    kinds = st.tuples(
        st.integers(0, len(present) - 1),
        one_of("none", "zero", "expanded", "turned", "replicated", "summed"),
    )
    drawn = dict(draw(st.lists(kinds, max_size=3)))
    return "step", tuple(sorted(drawn.items()))


@st.composite
def together(draw, config, batched):
    """Matrices of which the placement of one matters for the others."""
    if config.mesh is None:
        meshes = draw(one_of(*CROSSING))
        return [draw(dtensors(batched, [mesh])) for mesh in meshes]
    if config.tp_dim is None or config.functions != "built":
        return []
    # The DTensor may show what tensor parallelism cut: not the plain matrix.
    return [draw(dtensors(batched, [config.mesh])), draw(plain(batched, config))]


@st.composite
def plans(draw):
    config = draw(configs())
    # Functions of the user's cannot tell apart matrices of a stack that different ranks hold.
    batched = config.functions == "built" and draw(one_of(False, False, True))
    # Several matrices placed in the same way, so that an owner has more than one in a bucket.
    distinct = draw(st.lists(matrices(config, batched), min_size=1, max_size=4))
    given_now = draw(st.lists(one_of(*distinct), min_size=1, max_size=10))
    if draw(one_of(False, False, False, True)):
        given_now += draw(together(config, batched))
    # Groups have some options in common.
    common, more = draw(options()), draw(st.lists(options(), min_size=1, max_size=3))
    of_groups = tuple(tuple({**dict(common), **dict(own)}.items()) for own in more)
    groups = st.integers(0, len(of_groups) - 1)
    given_now = [m._replace(group=draw(groups)) for m in given_now]
    # Each form needs a group of its own. Dicts have no hash.
    keys = [(number, ()) for number in range(len(of_groups))]
    for key in ((m.group, m.form) for m in given_now):
        keys += [] if key in keys else [key]
    given_now = tuple(
        m._replace(group=keys.index((m.group, m.form))) for m in given_now
    )
    of_groups = tuple(fitting(of_groups[number]) + form for number, form in keys)
    limits = {
        "MAX_BUCKETS": draw(st.integers(1, 4)),
        "BUCKET_BYTES": draw(one_of(2**20, 64, 300)),
        "MAX_REPLICAS": draw(one_of(4, 1, 2)),
        "MAX_PEERS": draw(one_of(512, 512, 1, 2)),
        "RELAY_BYTES": draw(one_of(2**20, 40)),
        "node": draw(one_of(4, 1, 2)),
        "late": draw(one_of(None, None, None, 0, 2)),
    }
    named = draw(st.booleans())
    plan = Plan(config, given_now, of_groups, batched, named, tuple(limits.items()))
    plan = plan._replace(matrices=placed_by_tp(plan, given_now, given_now))
    return plan._replace(actions=draw(actions(plan, batched)))


class TestMuonFuzz(OnCPU):
    world_size = WORLD
    timeout = TIMEOUT

    # Each rank draws the same plans.
    @fuzz(110, plans())
    def test_trains_as_one_process(self, plan):
        problems = Player(plan, self.rank).run()
        # Not assertFalse, whose text would be cut.
        if problems:
            self.fail("\n".join(problems))


# A long run takes as long as it takes.
TIMEOUT_OVERRIDE["test_trains_as_one_process"] = 10**6


# Sides of matrices that differ in their work.
side = one_of(1, 8, 9, 12, 17, 100)
rectangles = st.tuples(side, side)
# Nested groups, and disjoint ones.
GROUPS = [(0, 1, 2, 3, 4, 5), (0, 1, 2, 3), (4, 5), (0, 1), (2, 3), (1, 2)]


def layout(number, shape, group):
    return Layout(Key(number), shape, torch.float32, Shards(group, ((),) * len(group)))


def busiest(matrices, flops, owners):
    loads = Counter()
    for matrix in matrices:
        loads[owners[matrix]] += flops[matrix]
    return max(loads.values(), default=0)


class TestMuonScheduleFuzz(TestCase):
    @fuzz(
        100, st.lists(st.tuples(rectangles, one_of(*GROUPS)), min_size=1, max_size=12)
    )
    def test_owners_are_the_least_busy(self, drawn):
        """The heaviest matrix first, to a rank that has least work of this group and of those around it."""
        layouts = [layout(i, *each) for i, each in enumerate(drawn)]
        flops, owners = list(map(flops_of, layouts)), assign_owners(layouts)
        given_to = Counter()
        for group in sorted({g for _, g in drawn}, key=lambda g: (-len(g), g)):
            mine = [i for i, one in enumerate(layouts) if one.holders == group]
            mine.sort(key=flops.__getitem__, reverse=True)
            for work_of_each in dict.fromkeys(flops[i] for i in mine):
                left = Counter(owners[i] for i in mine if flops[i] == work_of_each)
                for _ in range(left.total()):
                    load = dict.fromkeys(group, 0)
                    for (wide, owner), work in given_to.items():
                        if owner in group and {*group} <= {*wide}:
                            load[owner] += work
                    free = min(left.elements(), key=load.__getitem__)
                    self.assertEqual(load[free], min(load.values()))
                    left[free] -= 1
                    given_to[group, free] += work_of_each
        # At most a third busier than the best, in a single group.
        if len({g for _, g in drawn}) == 1 and len(layouts) < 6:
            group, every = layouts[0].holders, range(len(layouts))
            choices = itertools.product(group, repeat=len(layouts))
            best = min(busiest(every, flops, choice) for choice in choices)
            self.assertLessEqual(busiest(every, flops, owners), best * 4 / 3)

    @fuzz(
        60, st.lists(st.tuples(st.integers(0, 2), rectangles), min_size=1, max_size=6)
    )
    def test_buckets_are_nearly_the_best(self, drawn):
        """As many are as quick as any distribution of the matrices over them, or hardly slower."""
        owners = [owner for owner, _ in drawn]
        layouts = [layout(i, shape, (0, 1, 2)) for i, (_, shape) in enumerate(drawn)]
        flops = list(map(flops_of, layouts))

        def stretched(parts):
            """How long buckets take, run sequentially: each as long as its busiest owner."""
            return sum(busiest(part, flops, owners) for part in parts)

        parts = [b.matrices for b in make_schedule(layouts, owners).buckets]
        self.assertEqual(sorted(sum(parts, ())), [*range(len(layouts))])
        self.assertLessEqual(len(parts), max(Counter(owners).values()))
        places = itertools.product(range(len(parts)), repeat=len(layouts))
        best = min(
            stretched([[m for m, at in enumerate(p) if at == k] for k in {*p}])
            for p in places
            if len({*p}) == len(parts)
        )
        self.assertLessEqual(stretched(parts), buckets.MAX_STRETCH * best)


if __name__ == "__main__":
    run_tests()

# Owner(s): ["oncall: distributed"]
"""Random configurations: each trains as one process does. Random matrices: owners and buckets are nearly the best.

The ranks play what they draw, on meshes and process groups of one to four of them. A plan that fails is
shrunk to the least that still does.
"""

import itertools
import math
from collections import Counter

import torch
from torch.optim._muon_engine.plan import (
    assign_owners,
    cut_into_buckets,
    MAX_STRETCH,
)
from torch.optim._muon_engine.regions import Layout, Matrix
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
    changed = dict(options) | {"ns_steps": steps}
    return tuple(changed.items())


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
        is_first = draw(one_of(True, False))
        of_dims = of_dims if is_first else tuple(reversed(of_dims))
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


class Actions:
    """Draws what happens to the matrices of a plan, one action after the other."""

    def __init__(self, draw, plan, batched):
        self.draw, self.plan, self.batched = draw, plan, batched
        # The matrices that are there after the actions so far.
        self.present = list(plan.matrices)
        self.found = []
        self.builders = holders_of(plan, plan.matrices)

    def possible(self):
        """What each kind of action may be applied to: numbers of matrices or groups, or nothing to choose."""
        plan, present = self.plan, self.present
        numbers, groups = range(len(present)), range(len(plan.options))
        changing = [n for n in numbers if plan.see([present[n]], present)]
        on_a_mesh = [n for n in changing if present[n].mesh is not None]
        reversible = []
        for group in groups:
            its_matrices = [matrix for matrix in present if matrix.group == group]
            if plan.see(its_matrices, present, 2):
                reversible.append(group)
        return {
            "step": (None,),
            "change_options": groups,
            "freeze": changing,
            "add": (None,),
            "reload": numbers,
            "replace": on_a_mesh,
            "mismatch": list(mismatches(plan, present)),
            "reverse": reversible,
            "rest": [number for number in changing if self.may_rest(number)],
        }

    def may_rest(self, number):
        others = self.present[:number] + self.present[number + 1 :]
        if not holders_have_others(self.plan, number, self.present):
            return False
        return self.plan.shows_tp(others) == self.plan.shows_tp(self.present)

    def needs_a_step(self):
        """Whether a change has not taken effect yet."""
        for name, *_ in reversed(self.found):
            if name == "step":
                return False
            if name in CHANGES:
                return True
        # Before the first step, nothing has happened.
        return not any(name == "step" for name, *_ in self.found)

    def add_one(self):
        possible = self.possible()
        kinds = [kind for kind, choices in possible.items() if choices]
        rare = [kind for kind in RARE if kind in kinds]
        kind = self.draw(one_of(*kinds, *rare))
        choice = self.draw(one_of(*possible[kind]))
        is_early = kind in ("step", "change_options", "reload", "freeze")
        if not is_early and self.needs_a_step():
            self.found.append(fuzz_plans.STEP)
        method = getattr(self, f"draw_{kind}", None)
        if method is None:
            self.found.append((kind, choice))
        else:
            method(choice)

    def draw_step(self, _):
        self.found.append(self.draw(steps(self.present)))

    def draw_change_options(self, group):
        values = [
            ("lr", 0.05),
            ("weight_decay", 0.25),
            ("nesterov", False),
            ("adjust_lr_fn", "match_rms_adamw"),
        ]
        if not has_own_steps(self.plan.options[group]):
            values.append(("ns_steps", 2))
        changed = self.draw(one_of(*values))
        self.found.append(("change_options", group, (changed,)))

    def draw_freeze(self, number):
        frozen = self.draw(st.booleans())
        self.present[number] = self.present[number]._replace(frozen=frozen)
        self.found.append(("freeze", number, frozen))

    def draw_reload(self, number):
        moved, matrix = (), self.present[number]
        if matrix.mesh is not None and matrix.mesh.in_order:
            other = self.draw(placements(matrix.mesh, len(matrix.shape)))
            moved = ((number, other),)
        into = self.draw(one_of("same", "new", "whole"))
        self.found.append(("reload", into, moved))

    def draw_mismatch(self, choice):
        number, culprit = choice
        names = list(fuzz_plans.OTHER)
        if has_own_steps(options_of(self.plan, self.found, self.present[number].group)):
            names.remove("ns_steps")
        option = self.draw(one_of(*names))
        problems = "none", "none", "misshapen", "sparse", option, option
        problem = self.draw(one_of(*problems))
        self.found.append(("mismatch", problem, number, culprit))

    def draw_replace(self, number):
        matrix = self.present[number]
        mesh, placed = matrix.mesh, matrix.placements
        if mesh.in_order:
            same = []
            for other in WHOLE + PARTS:
                has_its_ranks = set(other.ranks) == set(mesh.ranks)
                if has_its_ranks and other.in_order and not mesh.kept:
                    same.append(other)
            mesh = self.draw(one_of(mesh, *same))
            placed = self.draw(placements(mesh, len(matrix.shape)))
        fresh, renamed = self.draw(st.tuples(st.booleans(), st.booleans()))
        saved = self.draw(one_of(None, "not loaded", "and loaded"))
        now = list(self.present)
        now[number] = matrix._replace(mesh=mesh, placements=placed)
        if self.plan.shows_tp(now) == self.plan.shows_tp(self.present):
            self.present = now
            action = "replace", number, mesh, placed, fresh, renamed, saved
            self.found.append(action)

    def draw_add(self, _):
        more = matrices(self.plan.config, self.batched, later=True)
        drawn = self.draw(st.lists(more, min_size=1, max_size=2))
        group = len(self.plan.options)
        for name, *_ in self.found:
            group += name == "add"
        new = tuple(matrix._replace(form=(), group=group) for matrix in drawn)
        new = placed_by_tp(self.plan, new, self.present)
        now = [*self.present, *new]
        are_seen = all(self.plan.see([matrix], now) for matrix in new)
        if not (are_seen and holders_of(self.plan, new) <= self.builders):
            return
        if self.plan.shows_tp(now) == self.plan.shows_tp(self.present):
            self.found.append(("add", new, fitting(self.draw(options()))))
            self.present = now


@st.composite
def actions(draw, plan, batched):
    drawn = Actions(draw, plan, batched)
    for _ in range(draw(one_of(2, 3, 4, 1, 0))):
        drawn.add_one()
    return (*drawn.found, draw(steps(drawn.present)))


def holders_of(plan, some_matrices):
    """The ranks that hold a part of some of these."""
    return {rank for rank in range(WORLD) if plan.held_of(some_matrices, rank)}


def holders_have_others(plan, number, present):
    """Whether each rank that holds a matrix holds another one, too."""
    holders = holders_of(plan, [present[number]])
    return all(plan.held_of(present, rank) > 1 for rank in holders)


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
    of_groups = []
    for own in more:
        merged = dict(common) | dict(own)
        of_groups.append(tuple(merged.items()))
    groups = st.integers(0, len(of_groups) - 1)
    given_now = [matrix._replace(group=draw(groups)) for matrix in given_now]
    # Each form needs a group of its own. Dicts have no hash.
    keys = [(number, ()) for number in range(len(of_groups))]
    regrouped = []
    for matrix in given_now:
        key = matrix.group, matrix.form
        if key not in keys:
            keys.append(key)
        regrouped.append(matrix._replace(group=keys.index(key)))
    given_now = tuple(regrouped)
    of_groups = tuple(fitting(of_groups[number]) + form for number, form in keys)
    limits = {
        "MAX_BUCKETS": draw(st.integers(1, 4)),
        "BUCKET_BYTES": draw(one_of(2**20, 64, 300)),
        "ROUND_BYTES": draw(one_of(2**20, 40, 200)),
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


def matrix(number, shape, group):
    layout = Layout((group,), tuple(() for _ in group))
    return Matrix(number, shape, torch.float32, layout, "")


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
        drawn = [matrix(number, *one) for number, one in enumerate(drawn)]
        flops, owners = [one.flops for one in drawn], assign_owners(drawn)
        given_to = Counter()
        # Wide groups first.
        groups = {one.layout.ranks for one in drawn}
        for group in sorted(groups, key=lambda group: (-len(group), group)):
            owners_by_work = {}
            for number, one in enumerate(drawn):
                if one.layout.ranks == group:
                    counts = owners_by_work.setdefault(flops[number], Counter())
                    counts[owners[number]] += 1
            for work in sorted(owners_by_work, reverse=True):
                self.check_owners(group, work, owners_by_work[work], given_to)
        # At most a third busier than the best, in a single group.
        if len(groups) == 1 and len(drawn) < 6:
            every = range(len(drawn))
            best = math.inf
            for choice in itertools.product(group, repeat=len(drawn)):
                best = min(best, busiest(every, flops, choice))
            self.assertLessEqual(busiest(every, flops, owners), best * 4 / 3)

    def check_owners(self, group, work, owners, given_to):
        """Matrices of equal ``work`` go to ``owners``, which are the least busy ranks, in some order.

        ``given_to`` is the work that ranks have so far, by group and owner.
        """
        left = Counter(owners)
        for _ in range(left.total()):
            load = dict.fromkeys(group, 0)
            for (wide, owner), given in given_to.items():
                if owner in group and set(group) <= set(wide):
                    load[owner] += given
            free = min(left.elements(), key=lambda rank: load[rank])
            self.assertEqual(load[free], min(load.values()))
            left[free] -= 1
            given_to[group, free] += work

    @fuzz(
        60, st.lists(st.tuples(st.integers(0, 2), rectangles), min_size=1, max_size=6)
    )
    def test_buckets_are_nearly_the_best(self, drawn):
        """As many are as quick as any distribution of the matrices over them, or hardly slower."""
        owners = [owner for owner, _ in drawn]
        matrices = [matrix(i, shape, (0, 1, 2)) for i, (_, shape) in enumerate(drawn)]
        flops = [each.flops for each in matrices]

        def stretched(parts):
            """How long buckets take, run sequentially: each as long as its busiest owner."""
            return sum(busiest(part, flops, owners) for part in parts)

        parts = cut_into_buckets(matrices, owners, range(len(matrices)))
        every = list(itertools.chain(*parts))
        self.assertEqual(sorted(every), list(range(len(matrices))))
        matrices_of_owners = Counter(owners)
        self.assertLessEqual(len(parts), max(matrices_of_owners.values()))
        best = math.inf
        for places in itertools.product(range(len(parts)), repeat=len(matrices)):
            others = [[] for _ in parts]
            for index, place in enumerate(places):
                others[place].append(index)
            if all(others):
                best = min(best, stretched(others))
        self.assertLessEqual(stretched(parts), MAX_STRETCH * best)


if __name__ == "__main__":
    run_tests()

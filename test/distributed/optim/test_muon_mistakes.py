# Owner(s): ["oncall: distributed"]
"""Mistakes: which ranks raise an error, with which text, that nothing has moved, and that the right call works after it.

A row is a mistake of one rank, or of all, in a phase: when Muon is built, in ``add_param_group``, in the first or a later
step. Tests after the tables are about mistakes that are no change of one rank, or behave as on an accelerator.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.optim import Muon
from torch.optim._muon import muon as functional_muon
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.testing._internal.distributed._muon.common_config import FUNCTIONAL
from torch.testing._internal.distributed._muon.common_muon import (
    as_on_an_accelerator,
    full,
    grid_of,
    local,
    mesh_of,
    OnCPU,
    place,
    R,
    S0,
    S1,
    Spec,
    Twins,
    wrap_functions,
)


# The rank that makes the mistake.
CULPRIT = 2


def specs():
    """The second matrix has another group of all ranks, and gradients that must be added up."""
    return [
        Spec((8, 8), mesh_of(4), (S0,)),
        Spec((8, 5), grid_of(4), (R,), gradients=(Partial(),)),
        Spec((8, 6), grid_of(2, 2), (R, S0), torch.float64),
    ]


def of_pair():
    """A matrix that two ranks share."""
    return Spec((8, 4), mesh_of(2), (S0,))


class Build:
    """The parameters and options of which a rank builds Muon."""

    def __init__(self):
        self.specs, self.names = specs(), ["w0", "w1", "w2"]
        # All ranks make it, and the culprit may take it.
        self.swapped_mesh = DeviceMesh("cpu", [1, 0, 2, 3])
        self.options = {}
        self.config = create_dtensor_config()
        self.change = lambda params: None

    def group(self):
        params = []
        for index, spec in enumerate(self.specs):
            whole = full(index, spec.shape, spec.dtype)
            params.append(nn.Parameter(place(whole, spec)))
        self.params = [*params]
        self.change(params)
        return {"params": list(zip(self.names, params)), **self.options}


class Mistake(NamedTuple):
    """A change of the culprits' :class:`Build` or :class:`Twins`, and the error of all ranks.

    The error of CULPRIT may have a text of its ``own``. ``steps`` are the numbers of steps before the wrong one.
    """

    make: Callable[[Any], Any]
    pattern: str
    kind: Any = ValueError
    own: str | None = None
    steps: Sequence[int] = (0, 2)
    culprits: Sequence[int] = (CULPRIT,)


def replaced(**fields):
    """The second matrix is another one."""

    def make(build):
        build.specs[1] = build.specs[1]._replace(**fields)

    return make


def other_shapes_in_a_pair(build):
    build.specs[1] = of_pair()._replace(shape=(8, 4 + (dist.get_rank() == 3)))


def in_another_order(build):
    build.specs.reverse()
    build.names.reverse()


def option(**options):
    return lambda build: build.options.update(options)


def flag(name, value):
    return lambda build: setattr(build.config, name, value)


def parameters(change):
    return lambda build: setattr(build, "change", change)


def without_storage(params):
    """The first one is as after ``param.data = dtensor``."""
    destroyed = nn.Parameter(torch.ones(8, 8))
    destroyed.data = params[0].data
    params[0] = destroyed


def is_on(value, other):
    return rf"is {value} on rank 0 and {other} on rank {CULPRIT}"


OTHER_OPTIONS = {
    "lr": 0.5,
    "momentum": 0.5,
    "weight_decay": 0.3,
    "nesterov": False,
    "eps": 1e-5,
    "ns_steps": 3,
    "ns_coefficients": (3.0, -4.0, 2.0),
    "ns_algorithm": "gram",
    "adjust_lr_fn": "match_rms_adamw",
    "foreach": True,
    "split": (4, 4),
}
# Of parameters and of their group: Muon is built, or gets another group.
OF_GROUPS = {
    "shape": Mistake(replaced(shape=(8, 9)), rf"'w1'.*shape {is_on('.8, 5.', '.8, 9.')}"),
    "shape in a pair": Mistake(other_shapes_in_a_pair, "disagree about parameter . 'w1'.* on rank 2 and .* on rank 3", culprits=range(4)),
    "dtype": Mistake(replaced(dtype=torch.bfloat16), f"'w1'.*dtype {is_on('torch.float32', 'torch.bfloat16')}"),
    "dtype of gradients": Mistake(parameters(lambda params: setattr(params[0], "grad_dtype", torch.float64)), "'w0'.*grad_dtype is torch.float32"),
    "mesh": Mistake(lambda build: replaced(mesh=build.swapped_mesh)(build), "'w1'.*on rank 0 and .*on rank 2"),
    "placement": Mistake(replaced(placements=(S1,)), "'w1'.*on rank 0 and .*on rank 2"),
    "number": Mistake(lambda build: build.specs.pop(2), "ranks disagree"),
    "order": Mistake(in_another_order, f"name {is_on('w0', 'w2')}"),
    "frozen": Mistake(parameters(lambda params: params[2].requires_grad_(False)), f"'w2'.*requires_grad {is_on('True', 'False')}"),
    "destroyed": Mistake(parameters(without_storage), r"'w0'.*param\.data = dtensor.*nn\.Parameter\(distribute_tensor"),
    "learning rate": Mistake(option(lr=-1.0), "Learning rate should be >= 0 but is: -1.0"),
    "sizes of a split": Mistake(option(split=(4, 5)), "split.*adds up to 9, but dimension 0 has 8"),
    **{name: Mistake(option(**{name: value}), f"'w0'.*{name} is .* on rank 0 and .* on rank 2") for name, value in OTHER_OPTIONS.items()},
}  # fmt: skip


def assigned(answer, has_pair=False):
    """The culprit's ``assign_fn`` returns or raises ``answer``."""

    def assign(params, state):
        if isinstance(answer, Exception):
            raise answer
        return answer

    def make(build):
        build.config = dataclasses.replace(build.config, assign_fn=assign)
        if has_pair:
            build.specs[1] = of_pair()

    return make


# Of the config.
OF_CONFIGS = {
    "prefetch count": Mistake(flag("prefetch_count", 3), f"prefetch_count {is_on('1', '3')}"),
    "async": Mistake(flag("async_gpu_parallelism", False), f"async_gpu_parallelism {is_on('True', 'False')}"),
    "own gather_fn": Mistake(lambda build: wrap_functions(build.config, "gather_fn"), "functions of your own is .* on rank 0 and .*gather.* on rank 2"),
    "no assignment": Mistake(assigned(None), "must return a dict .*, not None", TypeError),
    "two owners": Mistake(assigned({0: [0, 1], 1: [1]}), "parameter 1 'w1' .* 2 times, parameter 2 'w2' .* missing", AssertionError),
    "unknown parameter": Mistake(assigned({0: [0, 1, 2, 3]}), "0 to 2 .* 3 does not exist", AssertionError),
    "unknown owner": Mistake(assigned({0: [0, 1], 9: [2]}), "rank 9.*0 to 3"),
    "owner without a piece": Mistake(assigned({2: [0, 1, 2]}, has_pair=True), r"'w1'.*rank 2.*\[0, 1\]", culprits=range(4)),
    "other owner": Mistake(assigned({3: [0, 1, 2]}), r"'w\d'.*owner is \d on rank 0 and 3 on rank 2"),
    "exception": Mistake(assigned(IndexError("no idea")), "no idea", IndexError),
}  # fmt: skip


def in_step(make, pattern, own=None, **phase):
    return Mistake(make, pattern, (RuntimeError, ValueError, TypeError), own, **phase)


def set_option(**options):
    return lambda twins: twins.optimizer.param_groups[0].update(options)


def set_gradient(index, gradient):
    return lambda twins: setattr(twins.params[index], "grad", gradient)


def set_momentum(buffer):
    def make(twins):
        twins.optimizer.state[twins.params[0]]["momentum_buffer"] = buffer

    return make


def changed_replica(change):
    return in_step(
        lambda twins: change(local(twins.params[2].detach())),
        "different values.*: ranks disagree about parameter 2 of shape",
        steps=(0,),
    )


def replace_all(twins):
    for group in twins.optimizer.param_groups:
        group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]


TOLD, UNUSABLE = "Their error says how", "cannot use.*: parameter 0 of shape"
REPLACED = r"parameters changed on some of the ranks.*parameter \d "
IN_STEPS = {
    "missing gradient": in_step(set_gradient(0, None), "some have none.*parameter 0 "),
    "missing gradient that is a sum": in_step(set_gradient(1, None), "some have none.*parameter 1 "),
    "missing gradient in a pair": in_step(set_gradient(3, None), f"some have none.*parameter 3 |{TOLD}", "some have none.*parameter 3 "),
    "sparse gradient": in_step(set_gradient(0, torch.ones(8, 8).to_sparse()), UNUSABLE, "parameter 0.*sparse"),
    "learning rate": in_step(set_option(lr=0.5), f"different hyperparameters.*lr {is_on('0.001', '0.5')}"),
    "type of an option": in_step(set_option(eps="1e-7"), TOLD, "eps must be a number"),
    "flag": in_step(flag("prefetch_count", 3), TOLD, "Set them before you build"),
    "momentum of another shape": in_step(set_momentum(torch.zeros(7, 8)), UNUSABLE, r"parameter 0.*momentum buffer.*\(7, 8\)"),
    "momentum without data": in_step(set_momentum(torch.zeros(8, 8, device="meta")), UNUSABLE, "parameter 0.*momentum buffer has no data"),
    "momentum that is no tensor": in_step(set_momentum(0.5), UNUSABLE, "parameter 0.*momentum buffer must be a Tensor but is a float"),
    "momentum on all ranks": in_step(set_momentum(torch.zeros(6, 8)), r"momentum buffer has shape \(6, 8\)", culprits=range(4)),
    "values of a replica": changed_replica(lambda replica: replica.copy_(replica.flip(0))),
    "signs of a replica": changed_replica(torch.Tensor.neg_),
    "replaced parameters": in_step(replace_all, REPLACED, steps=(2,)),
}  # fmt: skip


def in_words(name):
    return name.replace(" ", "_")


class MistakesTestCase(OnCPU):
    def assertNothingMoves(self, call, params, mistake, ranks=None):
        before = [local(param.detach()).clone() for param in params]
        pattern = mistake.pattern
        if self.rank == CULPRIT and mistake.own is not None:
            pattern = mistake.own
        self.assertRaisesEverywhere(call, mistake.kind, pattern, ranks)
        with self.everywhere(mistake.pattern):
            for param, value in zip(params, before, strict=True):
                found = local(param.detach())
                self.assertEqual(found, value, rtol=0, atol=0)

    def make(self, mistake, subject):
        if self.rank in mistake.culprits:
            mistake.make(subject)


@instantiate_parametrized_tests
class TestMuonMistakesInBuilds(MistakesTestCase):
    @parametrize("name", [*OF_GROUPS, *OF_CONFIGS], in_words)
    def test_constructor(self, name):
        mistake = {**OF_GROUPS, **OF_CONFIGS}[name]
        build = Build()
        self.make(mistake, build)
        groups = [build.group()]
        call = functools.partial(Muon, groups, distributed_config=build.config)
        self.assertNothingMoves(call, build.params, mistake)
        self.assertTrainsAlike(Twins(specs()), 1)

    @parametrize("name", OF_GROUPS, in_words)
    def test_add_param_group(self, name):
        twins = Twins(specs(), is_named=True)
        twins.step()
        build = Build()
        self.make(OF_GROUPS[name], build)
        call = functools.partial(twins.optimizer.add_param_group, build.group())
        self.assertNothingMoves(call, twins.params, OF_GROUPS[name])
        self.assertEqual(len(twins.optimizer.param_groups), 1)
        self.assertTrainsAlike(twins, 1)


@instantiate_parametrized_tests
class TestMuonMistakesInSteps(MistakesTestCase):
    @parametrize("name", IN_STEPS, in_words)
    def test_step(self, name):
        mistake = IN_STEPS[name]
        for steps in mistake.steps:
            with self.subTest(steps=steps):
                groups = [([0, 1], {}), ([2], {"split": (4, 4)}), ([3], {})]
                twins = Twins([*specs(), of_pair()], groups=groups)
                for _ in range(steps):
                    twins.step()
                twins.set_gradients()
                self.make(mistake, twins)
                self.assertNothingMoves(twins.optimizer.step, twins.params, mistake)
                if "gradient" in name:
                    twins.step()
                    self.assertParity(twins, name)

    @parametrize("look", ["step", "state_dict", "synchronize", "add_param_group"])
    def test_step_on_an_accelerator(self, look):
        """It does not wait for the other ranks, so the error comes later, and the optimizer is of no more use."""
        twins = Twins(specs(), is_named=True)
        twins.step()
        as_on_an_accelerator(twins.optimizer)
        twins.step()
        twins.set_gradients(missing=[0] if self.rank == CULPRIT else ())
        twins.optimizer.step()
        call = getattr(twins.optimizer, look)
        if look == "add_param_group":
            call = functools.partial(call, Build().group())
        pattern = "some have none.*parameter 0 "
        self.assertRaisesEverywhere(call, RuntimeError, pattern)
        self.assertRaisesEverywhere(twins.optimizer.step, RuntimeError, "[Rr]ebuild")
        with self.everywhere():
            with self.assertLogs("torch.optim.muon", "WARNING"):
                twins.optimizer.state_dict()

    def test_gradient_that_cannot_be_used_on_an_accelerator(self):
        """A rank that raised alone, before it took part, would leave the others waiting."""
        twins = Twins(specs())
        twins.step()
        as_on_an_accelerator(twins.optimizer)
        twins.set_gradients()
        self.make(IN_STEPS["sparse gradient"], twins)
        step, pattern = twins.optimizer.step, "parameter 0.*sparse"
        self.assertRaisesEverywhere(step, RuntimeError, pattern, [CULPRIT])

    def test_one_of_many_gradients(self):
        """There are more of them than bytes in one status."""
        twins = Twins([Spec((4, 2), mesh_of(4), (S0,))] * 2100)
        twins.set_gradients([2099] if self.rank == CULPRIT else [])
        pattern = "some have none.*parameter 2099 of shape"
        self.assertRaisesEverywhere(twins.optimizer.step, RuntimeError, pattern)

    def test_values_that_a_checkpoint_brings(self):
        """torch.distributed.checkpoint makes momentum by a step of zeros, after which values may still change."""
        twins = Twins(specs())
        right = local(twins.params[2].detach()).clone()
        self.make(IN_STEPS["values of a replica"], twins)
        get_optimizer_state_dict(nn.ParameterList(twins.params), twins.optimizer)
        local(twins.params[2].detach()).copy_(right)
        self.assertTrainsAlike(twins, 1)

    def test_order_of_optimizers(self):
        for counts in ((1, 1), (2, 260)):
            both = [Twins([Spec((4, 8), mesh_of(4), (S0,))] * n) for n in counts]
            for twins in both:
                twins.step()
                twins.set_gradients()
            if self.rank == CULPRIT:
                both.reverse()
            mistake = in_step(reversed, "step different optimizers")
            for twins in both:
                self.assertNothingMoves(twins.optimizer.step, twins.params, mistake)

    def test_extra_step(self):
        twins = Twins(specs())
        twins.step()
        twins.set_gradients()

        def fails():
            raise KeyError

        if self.rank == CULPRIT:
            with self.assertRaises(KeyError):
                twins.optimizer.step(fails)
        mistake = in_step(fails, "not in the same step")
        for _ in range(2):
            self.assertNothingMoves(twins.optimizer.step, twins.params, mistake)

    def test_functional_form(self):
        config = create_auto_config(fsdp_process_group=dist.group.WORLD)
        usual = torch.ones(4, 8)
        dtensor = place(full(0, (8, 8)), Spec((8, 8), mesh_of(4), (S0,)))
        for other, own in (
            (torch.ones(5, 8), r"of shape \(4, 8\).*, but its gradient .*\(5, 8\)"),
            (usual.to("meta"), "on cpu, but its gradient .* on meta"),
            (usual.to(torch.complex64), "float32.*, but its gradient .*complex64"),
            (dtensor, "of shape .*, but its gradient a DTensor of shape"),
        ):
            params, momenta = [usual.clone(), usual.clone()], [usual * 0, usual * 0]
            grads = [usual, other if self.rank == CULPRIT else usual]
            tensors = params, grads, momenta
            step = functools.partial(
                functional_muon, *tensors, **FUNCTIONAL, distributed_config=config
            )
            told = "cannot use.*: parameter 1 of shape"
            mistake = in_step(step, told, f"parameter 1 .*{own}")
            self.assertNothingMoves(step, params, mistake)
        # Momentum of another placement, or in channels_last, restarted in every call.
        replicated = place(full(0, (8, 8)), Spec((8, 8), mesh_of(4), (R,)))
        kernel = full(0, (4, 6, 3, 3))
        transposed = kernel.to(memory_format=torch.channels_last)
        for param, momentum in (dtensor, replicated), (kernel, transposed):
            step = functools.partial(
                functional_muon,
                *([param], [param], [momentum]),
                **FUNCTIONAL,
                flatten=momentum is transposed,
                distributed_config=create_dtensor_config(),
            )
            self.assertRaisesEverywhere(step, ValueError, r"bufs\[0\].*placement")


# The groups of a grid of two by two, and of all ranks.
GROUPS = {
    "all": lambda: dist.group.WORLD,
    "a": lambda: grid_of(2, 2).get_group("a"),
    "b": lambda: grid_of(2, 2).get_group("b"),
}


class GroupMistake(NamedTuple):
    """By rank: the shapes of the pieces, and options of :func:`create_auto_config`. ``ranks`` raise the error."""

    groups: dict[str, str]
    pattern: str
    shapes: Callable[[int], list] = lambda rank: [(8, 8), (8, 8)]
    options: Callable[[int], dict] = lambda rank: {}
    form: dict[str, Any] = {}
    kind: Any = ValueError
    ranks: Any = None
    own: str | None = None


def one_has(shape, other):
    return lambda rank: [(8, 8), other if rank == CULPRIT else shape]


def tp_dim(dims, of_culprit=None):
    given = dims if of_culprit is None else of_culprit
    return lambda rank: {"tp_dim_per_param": given if rank == CULPRIT else dims}


def experts(ids):
    return lambda rank: {"expert_assignments": ids(rank)}


OF_PROCESS_GROUPS = {
    "tp dim out of range": GroupMistake({"tp": "all"}, r"dimension -3.*parameter 1.*\(8, 8\)", options=tp_dim({}, {1: -3}), kind=IndexError),
    "tp dim of no parameter": GroupMistake({"tp": "all"}, r"tp_dim_per_param names parameters \[2\]", options=tp_dim({0: 0, 2: 0})),
    "no tp dim": GroupMistake({"tp": "all"}, "parameter 0 'w0'.*tp_dim_per_param"),
    "other tp dim": GroupMistake({"tp": "all"}, "parameter 0 'w0'.*contradict.*[Rr]ank 2", options=tp_dim(0, 1)),
    "tp dim of flatten": GroupMistake({"tp": "all"}, "cuts dimension 2", lambda rank: [(8, 6, 1, 3)], tp_dim(2), {"flatten": True}),
    "columns of fsdp's rows": GroupMistake({"fsdp": "all"}, "parameter 1 'w1'.*its pieces hold 147 of 140.*fsdp", one_has((7, 5), (7, 6))),
    "rows of tp's columns": GroupMistake({"tp": "all"}, "parameter 1 'w1'.*its pieces hold 54 of 48.*tp along dimension 1", one_has((2, 6), (3, 6)), tp_dim({0: 0, 1: 1})),
    "shapes of replicas": GroupMistake({"ddp": "all"}, r"parameter 1 'w1'.*ddp_process_group.*shapes.*\(7, 6\)", one_has((7, 5), (7, 6))),
    "number": GroupMistake({"ddp": "a", "fsdp": "b"}, "ranks disagree about the number", lambda rank: [(8, 8)] * (1 if rank == CULPRIT else 2)),
    "ddp of some": GroupMistake({"ddp": "a", "fsdp": "b"}, "contradict|shapes", options=lambda rank: {} if rank % 2 else {"ddp_process_group": None}),
    "fsdp of all and ddp": GroupMistake({"fsdp": "all", "ddp": "a"}, "contradict|shapes"),
    "number of an expert": GroupMistake({"fsdp": "all"}, "expert 0.*disagree about the number", lambda rank: [(8, 8)] * (2 - (rank == CULPRIT)), experts(lambda rank: dict.fromkeys(range(2 - (rank == CULPRIT)), 0))),
    "ids of one ep group": GroupMistake({"ddp": "all", "ep": "b"}, "expert 0.*one ep_process_group.*expert_assignments", options=experts(lambda rank: {0: 0, 1: 1})),
    "ids of one replica": GroupMistake({"ddp": "a", "ep": "b"}, "disagree|contradict", options=experts(lambda rank: {0: rank % 2, 1: 2 + rank % 2} if rank < 2 else {0: rank % 2})),
    "shapes of an expert": GroupMistake({"ddp": "a", "ep": "b"}, r"expert 0.*\(7, 5\).*\(7, 6\)", one_has((7, 5), (7, 6)), experts(lambda rank: {1: rank % 2}), ranks=[0, 2]),
}  # fmt: skip


@instantiate_parametrized_tests
class TestMuonMistakesOfGroups(MistakesTestCase):
    @parametrize("name", OF_PROCESS_GROUPS, in_words)
    def test_constructor(self, name):
        mistake = OF_PROCESS_GROUPS[name]
        options = {}
        for kind, which in mistake.groups.items():
            options[f"{kind}_process_group"] = GROUPS[which]()
        config = create_auto_config(**{**options, **mistake.options(self.rank)})
        params = []
        for index, shape in enumerate(mistake.shapes(self.rank)):
            params.append(nn.Parameter(full(index, shape)))
        named = [(f"w{index}", param) for index, param in enumerate(params)]
        groups = [{"params": named, **mistake.form}]
        build = functools.partial(Muon, groups, distributed_config=config)
        self.assertNothingMoves(build, params, mistake, mistake.ranks)

    def test_mesh_without_this_rank(self):
        mesh = DeviceMesh("cpu", [0, 1])
        piece = torch.ones(4, 8)
        params = [nn.Parameter(DTensor.from_local(piece, mesh, (S0,), run_check=False))]
        build = functools.partial(Muon, params, distributed_config="auto")
        pattern = "parameter 0.*not in the mesh"
        self.assertRaisesEverywhere(build, ValueError, pattern, [2, 3])

    def test_materialized_after_the_optimizer_was_built(self):
        """to_empty() makes other parameters. The step said "Cannot copy out of meta tensor"."""
        model = nn.Linear(4, 4, bias=False, device="meta")
        config = create_auto_config(ddp_process_group=dist.group.WORLD)
        optimizer = Muon(model.named_parameters(), distributed_config=config)
        model.to_empty(device="cpu")
        model.weight.grad = torch.ones(4, 4)
        pattern = "'weight'.*Build Muon after"
        self.assertRaisesEverywhere(optimizer.step, RuntimeError, pattern)


ROWS, COLUMNS = r"(S\(0\)|Shard\(dim=0\))", r"(S\(1\)|Shard\(dim=1\))"
WHOLE = r"(R|Replicate\(\))\."
# (placement, kind of the group, which group, dimension of TP, pattern): the placement of a DTensor counts.
CONTRADICTIONS = [
    (S1, "tp", "all", 0, f"dimension 0.*{COLUMNS}"),
    (S0, "fsdp", "a", {}, rf"fsdp.*\[\d, \d\].*{ROWS}"),
    (R, "fsdp", "all", {}, f"fsdp.* {WHOLE}"),
    (S0, "ddp", "all", {}, "ddp.*hold different shards"),
]


class TestMuonWarnings(MistakesTestCase):
    """Mistakes that may be none: Muon warns once, and trains."""

    def test_groups_that_contradict_a_dtensor(self):
        for placement, kind, which, dim, pattern in CONTRADICTIONS:
            with self.subTest(placement=placement, kind=kind, which=which, dim=dim):
                options = {
                    f"{kind}_process_group": GROUPS[which](),
                    "tp_dim_per_param": dim,
                }
                placed = [Spec((8, 8), mesh_of(4), (placement,))] * 2
                # The first rank of each group says it.
                ranks = (0, 1) if which == "a" else (0,)
                with self.assertWarnsOnce(f"parameter 0 .*{pattern}", ranks):
                    twins = Twins(placed, create_auto_config(**options))
                self.assertTrainsAlike(twins, 1, pattern)

    def test_replicas_that_are_passed_as_shards(self):
        """Two replicas counted as the halves of a matrix, without a word."""
        config = create_auto_config(fsdp_process_group=dist.group.WORLD)
        pattern = "parameter 0.*all ranks hold the same.*ddp_process_group"
        # Zeros are no sign of replicas, and neither is one shard that differs.
        for values in torch.zeros(4, 6), full(int(self.rank == 3), (4, 6)):
            with self.assertWarnsOnce(None):
                Muon([nn.Parameter(values)], distributed_config=config)
        # All ranks hear of it if one makes it an error.
        params = [nn.Parameter(full(0, (4, 6)))]
        build = functools.partial(Muon, params, distributed_config=config)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            self.assertRaisesEverywhere(build, Exception, pattern)
        with self.assertWarnsOnce(pattern):
            build()


if __name__ == "__main__":
    run_tests()

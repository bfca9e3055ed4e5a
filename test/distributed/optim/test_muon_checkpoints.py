# Owner(s): ["oncall: distributed"]
"""State and checkpoints of the distributed Muon: what a checkpoint holds, resumed on other ranks and in stock."""

import copy
import functools
import io
import itertools
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
    StateDictOptions,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.nn import ParameterList
from torch.optim import Muon
from torch.optim.muon import create_auto_config
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_modules import (
    make_model,
    OneProcess,
    tensor_parallel,
    wrap,
)
from torch.testing._internal.distributed._muon.common_muon import (
    grid_of,
    mesh_of,
    R,
    S0,
    S1,
    Spec,
    Twins,
)
from torch.testing._internal.distributed._muon.common_stock import needs_stock, stock


def state_of(model, optimizer, **options):
    options = StateDictOptions(**options)
    values, state = get_state_dict(model, optimizer, options=options)
    return {"model": values, "optimizer": state}


def through_a_file(state, **options):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, **options)


SHAPES_OF_MODEL = [(8, 8), (7, 5), (3, 9), (16, 12)]
OPTIONS = {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.3}


def model_on(mesh, *placements, dtype=torch.float32):
    """The matrices of a model. The placements take turns."""
    turns = itertools.cycle(placements)
    return [Spec(shape, mesh, next(turns), dtype) for shape in SHAPES_OF_MODEL]


@functools.cache
def line_of(ranks):
    """As :func:`mesh_of`, but no part of a mesh: FSDP1 takes the rest of one for tensor parallelism."""
    group = mesh_of(ranks).get_group()
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("line",))


def sharded(model, kind, ranks):
    if kind == "fsdp2":
        return fully_shard(model, mesh=mesh_of(ranks))
    if kind == "hsdp":
        return fully_shard(model, mesh=grid_of(2, 2))
    if kind == "fsdp2 tp":
        mesh = grid_of(2, 2)
        return fully_shard(tensor_parallel(model, mesh["b"]), mesh=mesh["a"])
    if kind == "alone":
        return model
    return wrap(model, kind == "fsdp1 orig", units=None, device_mesh=line_of(ranks))


def new_model(seed):
    """Two of its matrices have an odd side, so ranks have pieces of different sizes, or none."""
    return make_model(width=9, bias=False, seed=seed)


class Job:
    def __init__(self, kind, ranks, seed, **options):
        self.ranks = ranks
        self.model = sharded(new_model(seed), kind, ranks)
        config = None if kind == "alone" else "auto"
        if isinstance(self.model, FSDP):
            config = create_auto_config(module=self.model)
        params = self.model.parameters()
        self.optimizer = Muon(params, distributed_config=config, **options)

    def step(self, seed):
        """How a step differs from that of one process with the same state."""
        one, state = new_model(seed), self.whole()
        one.load_state_dict(state["model"])
        group = mesh_of(self.ranks).get_group()
        alone = OneProcess(self.model, [self.optimizer], one, fsdp=group)
        for name, kept in state["optimizer"]["state"].items():
            alone.twin.state[alone.whole[name]] = copy.deepcopy(kept)
        self.model(common_muon.full(seed, (6, 9))).pow(2).sum().backward()
        alone.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return alone.problems()

    def save(self, path):
        state = state_of(self.model, self.optimizer)
        dcp.save(state, checkpoint_id=path, **self._group())

    def load(self, path):
        state = state_of(self.model, self.optimizer)
        dcp.load(state, checkpoint_id=path, **self._group())
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def whole(self):
        """Parameters and momentum, whole on every rank."""
        return state_of(self.model, self.optimizer, full_state_dict=True)

    def _group(self):
        group = mesh_of(self.ranks).get_group()
        return {"process_group": group, "no_dist": self.ranks == 1}


# FSDP1 of 2.11 gathers its state over all ranks.
JOURNEY = [
    ("fsdp2", 2),
    ("hsdp", 4),
    ("fsdp1 orig", 4),
    ("alone", 1),
    ("fsdp1 flat", 4),
    ("fsdp2 tp", 4),
]


class TestMuonCheckpoints(common_muon.OnCPU):
    def directory(self):
        path = common_muon.everyone(tempfile.mkdtemp() if self.rank == 0 else None)[0]
        if self.rank == 0:
            self.addCleanup(shutil.rmtree, path)
        self.addCleanup(dist.barrier)
        return path

    def test_state_dict(self):
        """It has no entry of the config, and serves another Muon through a file or a copy."""
        # Optimizer casts momentum to the parameter's dtype, which rounded it in every resume.
        dtype = torch.bfloat16
        placed = model_on(mesh_of(4), (S0,), (R,), (S1,), dtype=dtype)
        placed += model_on(grid_of(2, 2), (R, S0), (S0, S1), dtype=dtype)
        twins = Twins(placed, grad_dtype=torch.float32, weight_decay=0.3)
        self.assertTrainsAlike(twins)
        state_dict = twins.optimizer.state_dict()
        (mine,), (its,) = (
            saved["param_groups"] for saved in (state_dict, twins.single.state_dict())
        )
        self.assertEqual(set(mine), set(its))
        for state in state_dict["state"].values():
            self.assertEqual(list(state), ["momentum_buffer"])
            self.assertIsInstance(state["momentum_buffer"], DTensor)
        self.resume(twins, through_a_file(state_dict, weights_only=False))
        # torch copies no gradient of another dtype than its parameter's.
        twins.optimizer.zero_grad()
        self.resume(twins, copy.deepcopy(twins.optimizer).state_dict())

    def resume(self, twins, state_dict):
        """Gives ``twins`` new parameters of the same values, and an optimizer that loads the state."""
        params = [torch.nn.Parameter(p.detach().clone()) for p in twins.params]
        for param in params:
            param.grad_dtype = twins.grad_dtype
        twins.params, twins.optimizer = params, Muon(params, distributed_config="auto")
        twins.optimizer.load_state_dict(state_dict)
        # Unpickled momentum has an equal mesh, which is another object. Each step took it for another placement.
        with Recorder() as seen:
            self.assertTrainsAlike(twins)
        self.assertEqual(seen.functional, [])

    def test_checkpoint_after_a_step_of_the_experts_only(self):
        """Ranks without momentum made the step that a checkpoint asks for; others had some, and did not."""
        placed = [Spec((8, 8), mesh_of(4), (S0,)), Spec((9, 6), mesh_of(2), (S0,))]
        for missing in ((), (0,), (0, 1)):
            with self.subTest(missing=missing):
                # Only ranks 2 and 3 hold the expert.
                twins = Twins(placed if self.rank >= 2 else placed[:1])
                twins.step(missing)
                for param in twins.params:
                    param.grad = None
                module = ParameterList(twins.params)
                state = get_optimizer_state_dict(module, twins.optimizer)["state"]
                with self.everywhere():
                    self.assertEqual(len(state), len(twins.params))
                    for kept in state.values():
                        self.assertIn("momentum_buffer", kept)
                self.assertTrainsAlike(twins, 1)

    @needs_stock
    def test_file_for_stock(self):
        twins = Twins(model_on(grid_of(2, 2), (R, S0), (S0, S1)), **OPTIONS)
        self.assertTrainsAlike(twins)
        model, single = ParameterList(twins.params), ParameterList(twins.singles)
        state = state_of(model, twins.optimizer, full_state_dict=True)["optimizer"]
        twins.single = stock().Muon(twins.singles)
        # With gradients there would be no state to be read.
        twins.single.zero_grad()
        # full_state_dict=True knows no option that stock has not.
        set_optimizer_state_dict(single, twins.single, through_a_file(state))
        self.assertTrainsAlike(twins)

    def test_checkpoints_on_other_ranks(self):
        folder, expected = self.directory(), None
        for number, (kind, ranks) in enumerate(JOURNEY):
            with self.subTest(number=number, kind=kind, ranks=ranks):
                # On all ranks, idle ones, too.
                mesh_of(ranks)
                grid_of(2, 2)
                dist.barrier()
                problems, state = [], None
                if self.rank < ranks:
                    # After the first one, a job has other values until it loads.
                    job = Job(kind, ranks, number, **({} if number else OPTIONS))
                    if number:
                        job.load(f"{folder}/{number - 1}")
                        self.assertEqual(job.whole(), expected, rtol=0, atol=0)
                    problems = job.step(number)
                    state = job.whole()
                    job.save(f"{folder}/{number}")
                expected, *_ = common_muon.everyone(state)
                self.assertEverywhere(problems, f"{kind} on {ranks}")

    def test_replaced_parameter_in_a_checkpoint(self):
        """The checkpoint of a step that came before the next one lacked its momentum."""
        spec = Spec((8, 8), mesh_of(4), (S0,))
        twins = Twins([spec, spec], is_named=True)
        twins.step()
        twins.params[1] = torch.nn.Parameter(twins.params[1].detach().clone())
        twins.optimizer.param_groups[0]["params"][1] = twins.params[1]
        saved = copy.deepcopy(twins.optimizer.state_dict())
        self.assertIn(1, saved["state"])
        twins.optimizer.load_state_dict(saved)
        self.assertTrainsAlike(twins, 2)

    def test_replaced_parameter_without_a_name(self):
        """This is another layer of equal shape, for all that is known."""
        twins = Twins([Spec((8, 8), mesh_of(4), (S0,))])
        twins.step()
        twins.params[0] = torch.nn.Parameter(twins.params[0].detach().clone())
        twins.optimizer.param_groups[0]["params"][0] = twins.params[0]
        del twins.single.state[twins.singles[0]]
        with self.assertWarnsOnce("starts at zero"):
            self.assertTrainsAlike(twins, 2)


if __name__ == "__main__":
    run_tests()

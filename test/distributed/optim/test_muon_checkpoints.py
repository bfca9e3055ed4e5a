# Owner(s): ["oncall: distributed"]
"""State and checkpoints of the distributed Muon: momentum, what a checkpoint holds, resumed on other ranks and in stock."""

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
    tensor_parallel,
    wrap,
)
from torch.testing._internal.distributed._muon.common_muon import (
    grid_of,
    local,
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


def set_state(model, optimizer, state):
    values, state = state["model"], state["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=state)


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


def give_flat_gradients(flat, wholes):
    """Cuts whole gradients, by name, as a unit's backward does."""
    grad = torch.zeros_like(flat)
    for number, info in enumerate(flat._shard_param_infos):
        if not info.in_shard:
            continue
        whole = wholes[flat._fqns[number]].flatten()
        piece = whole[info.intra_param_start_idx : info.intra_param_end_idx + 1]
        grad.narrow(0, info.offset_in_shard, info.numel_in_shard).copy_(piece)
        if flat._params is not None:
            flat._params[number].grad = piece.clone()
    if flat._params is None:
        flat.grad = grad


class Job:
    def __init__(self, kind, ranks, seed, **options):
        self.ranks = ranks
        # Two matrices with an odd side, of which ranks have pieces of different sizes, or none.
        model = make_model(width=9, hidden=16, layers=2, bias=False, seed=seed)
        self.model = sharded(model, kind, ranks)
        config = None if kind == "alone" else "auto"
        if isinstance(self.model, FSDP):
            config = create_auto_config(module=self.model)
        params = self.model.parameters()
        self.optimizer = Muon(params, distributed_config=config, **options)

    def step(self, grads):
        if isinstance(self.model, FSDP):
            give_flat_gradients(self.model._handle.flat_param, grads)
        else:
            for name, param in self.model.named_parameters():
                param.grad = grads[name].clone()
                if isinstance(param, DTensor):
                    spec = Spec(param.shape, param.device_mesh, param.placements)
                    param.grad = common_muon.place(grads[name], spec)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, path):
        state = state_of(self.model, self.optimizer)
        dcp.save(state, checkpoint_id=path, **self._group())

    def load(self, path):
        state = state_of(self.model, self.optimizer)
        dcp.load(state, checkpoint_id=path, **self._group())
        set_state(self.model, self.optimizer, state)

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
        for dtype, grad_dtype in (
            (torch.float32, None),
            (torch.bfloat16, torch.float32),
        ):
            placed = model_on(mesh_of(4), (S0,), (R,), (S1,), dtype=dtype)
            placed += model_on(grid_of(2, 2), (R, S0), (S0, S1), dtype=dtype)
            twins = Twins(placed, grad_dtype=grad_dtype, weight_decay=0.3)
            self.assertTrainsAlike(twins)
            state_dict = twins.optimizer.state_dict()
            (mine,), (its,) = (
                saved["param_groups"]
                for saved in (state_dict, twins.single.state_dict())
            )
            self.assertEqual(set(mine), set(its))
            for state in state_dict["state"].values():
                self.assertEqual(list(state), ["momentum_buffer"])
                self.assertIsInstance(state["momentum_buffer"], DTensor)
            saved = through_a_file(state_dict, weights_only=False)
            self.resume(twins, saved)
            # torch copies no gradient of another dtype than its parameter's.
            twins.optimizer.zero_grad()
            self.resume(twins, copy.deepcopy(twins.optimizer).state_dict())

    def resume(self, twins, state_dict):
        """Gives ``twins`` new parameters of the same values, and an optimizer that loads the state."""
        params = [torch.nn.Parameter(p.detach().clone()) for p in twins.params]
        for param in params:
            param.grad_dtype = twins.grad_dtype or param.dtype
        twins.params, twins.optimizer = params, Muon(params, distributed_config="auto")
        twins.optimizer.load_state_dict(state_dict)
        # Unpickled momentum has an equal mesh, which is another object. Each step took it for another placement.
        with Recorder() as seen:
            self.assertTrainsAlike(twins)
        self.assertEqual(seen.functional, [])

    def test_first_step_makes_all_momentum(self):
        """Checkpoints would otherwise differ from rank to rank. Without a gradient it is zero."""
        twins = Twins(common_muon.specs(mesh_of(4), [(S0,)], [(3, 9), (2, 4), (8, 8)]))
        frozen = torch.nn.Parameter(common_muon.full(9, (4, 4)), requires_grad=False)
        twins.optimizer.add_param_group({"params": [frozen]})
        twins.set_gradients([1])
        if self.rank == 3:
            # Its piece is empty, and autograd gave it nothing.
            twins.params[0].grad = None
        twins.optimizer.step()
        twins.single.step()
        state = twins.optimizer.state
        self.assertNotIn(frozen, state)
        has = ["momentum_buffer" in state[param] for param in twins.params]
        self.assertEqual(common_muon.everyone(has), [[True, True, True]] * 4)
        self.assertParity(twins)

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
        folder = self.directory()
        uninterrupted, job = Job("alone", 1, 0, **OPTIONS), None
        names = dict(uninterrupted.model.named_parameters())
        for number, (kind, ranks) in enumerate(JOURNEY):
            with self.subTest(number=number, kind=kind, ranks=ranks):
                if job is not None:
                    job.save(f"{folder}/{number}")
                # On all ranks, idle ones, too.
                mesh_of(ranks)
                grid_of(2, 2)
                dist.barrier()
                works, job = self.rank < ranks, None
                if works:
                    # After the first one, a job has other values until it loads.
                    job = Job(kind, ranks, number, **({} if number else OPTIONS))
                    if number:
                        job.load(f"{folder}/{number}")
                gradients = {}
                seeds = itertools.count(100 * number)
                for name, param in names.items():
                    gradients[name] = common_muon.full(next(seeds), param.shape)
                uninterrupted.step(gradients)
                if works:
                    job.step(gradients)
                with self.everywhere(f"{kind} on {ranks}"):
                    if works:
                        found, expected = job.whole(), uninterrupted.whole()
                        self.assertEqual(found, expected, rtol=0, atol=0)


class TestMuonMomentum(common_muon.OnCPU):
    """Frameworks replace, move or save momentum."""

    def test_first_step_without_gradients_of_any_dtype(self):
        """Momentum stayed in the parameter's dtype, and differed from that of one process."""
        twins = Twins([Spec((8, 8), mesh_of(4), (S0,), torch.bfloat16)] * 2)
        for param in (*twins.params, *twins.singles):
            param.grad_dtype = None
        twins.optimizer.step()
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            with self.subTest(dtype=dtype):
                twins.grad_dtype = dtype
                self.assertTrainsAlike(twins, 1)
                momentum = twins.optimizer.state[twins.params[0]]["momentum_buffer"]
                self.assertEqual(momentum.dtype, dtype)

    def test_replaced_parameter_in_a_checkpoint(self):
        """The checkpoint of a step that came before the next one lacked its momentum."""
        spec = Spec((8, 8), mesh_of(4), (S0,))
        for is_named in (True, False):
            with self.subTest(is_named=is_named):
                twins = Twins([spec, spec], is_named=is_named)
                twins.step()
                old = twins.params[1]
                twins.params[1] = torch.nn.Parameter(old.detach().clone())
                twins.optimizer.param_groups[0]["params"][1] = twins.params[1]
                # Without names, this is another layer of equal shape, for all that is known.
                with self.assertWarnsOnce(None if is_named else "starts at zero"):
                    saved = copy.deepcopy(twins.optimizer.state_dict())
                    self.assertEqual(1 in saved["state"], is_named)
                    if is_named:
                        twins.optimizer.load_state_dict(saved)
                    else:
                        del twins.single.state[twins.singles[1]]
                    self.assertTrainsAlike(twins, 2)

    def test_momentum_that_changed_its_placement_can_be_saved(self):
        """It was a view of the whole gathered matrix, which every rank kept. Saving it failed on ranks from 1 on."""
        twins = Twins([Spec((8, 8), mesh_of(4), (S0,))])
        twins.step()
        state = twins.optimizer.state[twins.params[0]]
        for placement in (S1, R):
            with self.subTest(placement=placement):
                moved = state["momentum_buffer"].redistribute(mesh_of(4), [placement])
                state["momentum_buffer"] = moved
                self.assertTrainsAlike(twins, 1)
                momentum = local(state["momentum_buffer"])
                stored = momentum.untyped_storage().nbytes()
                self.assertEqual(stored, momentum.nbytes)
                torch.save(twins.optimizer.state_dict(), io.BytesIO())


if __name__ == "__main__":
    run_tests()

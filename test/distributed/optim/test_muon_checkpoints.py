# Owner(s): ["oncall: distributed"]
"""Checkpoints of the distributed Muon: resumed on other ranks, written during steps, of stock, of other models."""

import functools
import io
import shutil
import sys
import tempfile
import threading
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
    StateDictOptions,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.optim.muon import create_auto_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_fsdp1 import (
    give_flat_gradients,
    wrap,
)
from torch.testing._internal.distributed._muon.common_modules import (
    make_model,
    tensor_parallel,
)
from torch.testing._internal.distributed._muon.common_muon import (
    everyone,
    full,
    GlooOnCPU,
    grid_of,
    local,
    mesh_of,
    ParityAssertions,
    place,
    R,
    S0,
    S1,
    Spec,
    Twins,
)
from torch.testing._internal.distributed._muon.common_stock import needs_stock, stock


if not dist.is_available():
    print("torch.distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


def state_of(model, optimizer, **options):
    with warnings.catch_warnings():
        # What FSDP1 has to say of its age.
        warnings.simplefilter("ignore", FutureWarning)
        values, state = get_state_dict(
            model, optimizer, options=StateDictOptions(**options)
        )
    return {"model": values, "optimizer": state}


def set_state(model, optimizer, state, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(**options),
        )


SHAPES_OF_MODEL = [(8, 8), (7, 5), (3, 9), (16, 12)]
OPTIONS = {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.3}


class Model(torch.nn.Module):
    """Holds parameters under names, which checkpoints need."""

    def __init__(self, params):
        super().__init__()
        for i, param in enumerate(params):
            self.register_parameter(f"w{i}", param)


def model_on(mesh, *placements):
    return [
        Spec(shape, mesh, placements[i % len(placements)])
        for i, shape in enumerate(SHAPES_OF_MODEL)
    ]


def load(twins, path, **options):
    """Reads a checkpoint into parameters of other values."""
    for param in twins.params:
        local(param.detach()).zero_()
    model = Model(twins.params)
    state = state_of(model, twins.optimizer)
    dcp.load(state, checkpoint_id=path, **options)
    set_state(model, twins.optimizer, state)


class Directories(ParityAssertions):
    def directory(self):
        """A new directory, the same on every rank."""
        made = tempfile.mkdtemp() if self.rank == 0 else None
        path = everyone(made)[0]

        def remove():
            everyone(None)
            if self.rank == 0:
                shutil.rmtree(path)

        self.addCleanup(remove)
        return path


@requires_gloo()
class TestMuonCheckpoints(GlooOnCPU, Directories, MultiProcContinuousTest):
    world_size = 4

    def trained(self, placed, steps=2):
        twins = Twins(placed, **OPTIONS)
        self.assertTrainsAlike(twins, steps)
        return twins

    def resumed(self, twins, path, placed, **options):
        """Twins on ``placed`` that resume from ``path`` in the place of ``twins``."""
        there = Twins(placed, seed=twins.seed)
        load(there, path, **options)
        there.single, there.singles = twins.single, twins.singles
        there.steps = twins.steps
        self.assertParity(there, "as loaded")
        return there

    def test_checkpoint_resumes_on_another_placement(self):
        path = self.directory()
        twins = self.trained(model_on(mesh_of(4), (S0,), (S1,)))
        dcp.save(state_of(Model(twins.params), twins.optimizer), checkpoint_id=path)
        target = model_on(grid_of(2, 2), (R, S1), (S1, S0), (S0, R))
        there = self.resumed(twins, path, target)
        self.assertEqual(there.optimizer.param_groups[0]["momentum"], 0.8)
        self.assertTrainsAlike(there, 2)

    def test_reading_the_state_of_a_fresh_optimizer_changes_no_parameter(self):
        mesh = mesh_of(4)
        twins = Twins(model_on(mesh, (S0,), (R,), (S1,)))
        before = [local(p).detach().clone() for p in twins.params]
        state = get_optimizer_state_dict(Model(twins.params), twins.optimizer)
        self.assertEqual(len(state["state"]), len(twins.params))
        for param, old in zip(twins.params, before):
            self.assertTrue(torch.equal(local(param), old))
        self.assertTrainsAlike(twins)

    def test_steps_while_a_checkpoint_is_written(self):
        placed = model_on(mesh_of(4), (S0,), (R,), (S1,))
        goes_on = threading.Event()

        class Waiting(DefaultSavePlanner):
            def resolve_data(self, write_item):
                if not goes_on.wait(60):
                    raise TimeoutError
                return super().resolve_data(write_item)

        twins, path = self.trained(placed), self.directory()
        # The thread needs its own group, because a step uses the others.
        group = dist.new_group(backend="gloo")
        writing = dcp.async_save(
            state_of(Model(twins.params), twins.optimizer),
            checkpoint_id=path,
            planner=Waiting(),
            process_group=group,
        )
        self.assertTrainsAlike(twins, 2)
        with self.everywhere():
            self.assertFalse(writing.done())
        goes_on.set()
        writing.result(60)
        self.assertTrainsAlike(twins, 1)
        there = self.resumed(self.trained(placed), path, placed)
        self.assertTrainsAlike(there, 3)
        with self.everywhere():
            for mine, its in zip(there.params, twins.params):
                self.assertTrue(torch.equal(local(mine), local(its)))
        dist.destroy_process_group(group)

    # Stock

    @needs_stock
    def test_file_of_stock(self):
        """Stock trains whole matrices. Ours continues with pieces of them."""
        for placed in (
            model_on(mesh_of(4), (S0,), (R,), (S1,)),
            model_on(grid_of(2, 2), (R, S0), (S0, S1)),
        ):
            twins = Twins(placed)
            twins.single = stock().Muon(twins.singles, **OPTIONS)
            for _ in range(3):
                twins.set_gradients()
                twins.single.step()
            file = io.BytesIO()
            torch.save([twins.singles, twins.single.state_dict()], file)
            file.seek(0)
            wholes, state = torch.load(file)
            with torch.no_grad():
                for param, whole, spec in zip(twins.params, wholes, placed):
                    param.copy_(place(whole.detach(), spec))
            twins.optimizer.load_state_dict(state)
            self.assertTrainsAlike(twins)

    @needs_stock
    def test_file_for_stock(self):
        twins = self.trained(model_on(grid_of(2, 2), (R, S0), (S0, S1)))
        file = io.BytesIO()
        state = state_of(Model(twins.params), twins.optimizer, full_state_dict=True)
        torch.save(state["optimizer"], file)
        file.seek(0)
        twins.single = stock().Muon(twins.singles)
        # With gradients there would be no state to be read.
        twins.single.zero_grad()
        # full_state_dict=True knows no option that stock has not.
        set_optimizer_state_dict(Model(twins.singles), twins.single, torch.load(file))
        self.assertTrainsAlike(twins)

    @needs_stock
    def test_checkpoint_of_stock_on_dtensors(self):
        # The one placement that its updates keep: Shard(0), evenly.
        shapes = [(8, 8), (16, 12)]
        placed = [Spec(shape, mesh_of(4), (S0,)) for shape in shapes]
        before, path = Twins(placed), self.directory()
        optimizer = stock().Muon(before.params, **OPTIONS)
        for _ in range(2):
            before.set_gradients()
            optimizer.step()
        dcp.save(state_of(Model(before.params), optimizer), checkpoint_id=path)
        twins = Twins([Spec(shape, grid_of(2, 2), (S0, S1)) for shape in shapes])
        # Stock has no such option to save.
        with self.everywhere():
            with self.assertRaisesRegex(CheckpointException, "param_groups.0.foreach"):
                load(twins, path)
        load(twins, path, planner=DefaultLoadPlanner(allow_partial_load=True))
        # Its sums over shards have other roundings, so the comparison starts from its result.
        state = state_of(Model(before.params), optimizer, full_state_dict=True)
        with torch.no_grad():
            for single, param in zip(twins.singles, before.params):
                single.copy_(param.full_tensor())
        set_optimizer_state_dict(Model(twins.singles), twins.single, state["optimizer"])
        self.assertTrainsAlike(twins)
        self.assertEqual(twins.optimizer.param_groups[0]["lr"], 0.02)

    # States of other optimizers and models

    def assertRefused(self, twins, pattern, call, error=ValueError):
        """``call`` raises on every rank, and ``twins`` continue unchanged."""
        with self.everywhere(pattern):
            with self.assertRaisesRegex(error, pattern):
                call()
        self.assertTrainsAlike(twins, 2)

    def other_checkpoints(self, placed):
        """The states of an AdamW, and of a Muon with one transposed matrix."""
        other = [spec._replace(shape=spec.shape[::-1]) for spec in placed]
        for cls, specs in (
            (torch.optim.AdamW, placed),
            (Muon, [*placed[:3], other[3]]),
        ):
            trained = Twins(specs, seed=7)
            trained.set_gradients()
            optimizer = trained.optimizer if cls is Muon else cls(trained.params)
            optimizer.step()
            yield trained.params, optimizer

    def test_state_dict_of_another_model(self):
        placed = model_on(mesh_of(4), (S0,), (S1,))
        pattern = r"parameter 3 of shape \(16, 12\) has shape \(12, 16\)"
        twins = self.trained(placed)
        _, (params, optimizer) = self.other_checkpoints(placed)
        state = optimizer.state_dict()
        self.assertRefused(
            twins, pattern, lambda: twins.optimizer.load_state_dict(state)
        )
        state = state_of(Model(params), optimizer)["optimizer"]
        self.assertRefused(
            twins,
            pattern,
            lambda: set_optimizer_state_dict(
                Model(twins.params), twins.optimizer, state
            ),
        )

    def test_checkpoint_of_something_else(self):
        """torch.distributed.checkpoint names the entry that does not fit."""
        placed = model_on(mesh_of(4), (S0,), (S1,))
        patterns = [r"optimizer.state.w\d.momentum_buffer", r"model.w3|state.w3"]
        twins = self.trained(placed)
        for (params, optimizer), pattern in zip(
            self.other_checkpoints(placed), patterns
        ):
            path = self.directory()
            dcp.save(state_of(Model(params), optimizer), checkpoint_id=path)
            state = state_of(Model(twins.params), twins.optimizer)
            self.assertRefused(
                twins,
                pattern,
                lambda: dcp.load(state, checkpoint_id=path),
                CheckpointException,
            )


@functools.cache
def pairs_of(ranks):
    """This rank's mesh "a" x "b" of 2 x ``ranks`` / 2, of which the world has several."""
    shape = (dist.get_world_size() // ranks, 2, ranks // 2)
    names = ("copy", "a", "b")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)["a", "b"]


@functools.cache
def line_of(ranks):
    """As :func:`mesh_of`, but no part of a mesh: FSDP1 takes the rest of one for tensor parallelism."""
    group = mesh_of(ranks).get_group()
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("line",))


def sharded(model, kind, ranks):
    if kind == "fsdp2":
        return fully_shard(model, mesh=mesh_of(ranks))
    if kind == "hsdp":
        return fully_shard(model, mesh=pairs_of(ranks))
    if kind == "fsdp2 tp":
        mesh = pairs_of(ranks)
        return fully_shard(tensor_parallel(model, mesh["b"]), mesh=mesh["a"])
    if kind == "alone":
        return model
    return wrap(model, kind == "fsdp1 orig", units=None, device_mesh=line_of(ranks))


class Job:
    """A model and its optimizer on the first ``ranks``."""

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
                    param.grad = place(grads[name], spec)
        self.optimizer.step()
        self.optimizer.zero_grad()

    # Checkpoints

    def save(self, path):
        state = state_of(self.model, self.optimizer)
        dcp.save(state, checkpoint_id=path, **self._group())

    def load(self, path):
        state = state_of(self.model, self.optimizer)
        dcp.load(state, checkpoint_id=path, **self._group())
        set_state(self.model, self.optimizer, state)

    def save_file(self, path):
        state = self.whole()
        if dist.get_rank() == 0:
            torch.save(state, path)

    def load_file(self, path):
        set_state(self.model, self.optimizer, torch.load(path), full_state_dict=True)

    def whole(self):
        """Parameters and momentum, whole on every rank."""
        return state_of(self.model, self.optimizer, full_state_dict=True)

    def _group(self):
        group = mesh_of(self.ranks).get_group()
        return {"process_group": group, "no_dist": self.ranks == 1}

    def problems(self, other):
        """The differences from ``other``, which has done the same."""
        mine, its = self.whole(), other.whole()
        momenta, other_momenta = (each["optimizer"]["state"] for each in (mine, its))
        return [
            name
            for name, value in mine["model"].items()
            if not torch.equal(value, its["model"][name])
            or not torch.equal(
                momenta[name]["momentum_buffer"],
                other_momenta[name]["momentum_buffer"],
            )
        ]


JOURNEY = [
    ("fsdp2", 2),
    ("hsdp", 4),
    ("fsdp1 orig", 2),
    ("alone", 1),
    ("fsdp1 flat", 4),
    ("fsdp2 tp", 4),
]


@requires_gloo()
class TestMuonJourney(GlooOnCPU, Directories, MultiProcContinuousTest):
    """Jobs that resume each other, against an uninterrupted run."""

    world_size = 4

    def travel(self, save, load):
        folder = self.directory()
        uninterrupted, job = Job("alone", 1, 0, **OPTIONS), None
        shapes = {n: p.shape for n, p in uninterrupted.model.named_parameters()}
        for number, (kind, ranks) in enumerate(JOURNEY):
            path = f"{folder}/{number}"
            if job is not None:
                save(job, path)
            # On all ranks, idle ones, too.
            mesh_of(ranks)
            if ranks > 1:
                pairs_of(ranks)
            dist.barrier()
            works, job = self.rank < ranks, None
            if works and number == 0:
                job = Job(kind, ranks, 0, **OPTIONS)
            elif works:
                # The job has other values until it loads.
                job = Job(kind, ranks, number)
                load(job, path)
            gradients = {
                name: full(100 * number + i, shape)
                for i, (name, shape) in enumerate(shapes.items())
            }
            uninterrupted.step(gradients)
            if works:
                job.step(gradients)
            problems = job.problems(uninterrupted) if works else []
            self.assertEverywhere(problems, f"{kind} on {ranks}")

    def test_checkpoints_on_other_ranks(self):
        self.travel(Job.save, Job.load)

    def test_files_on_other_ranks(self):
        self.travel(Job.save_file, Job.load_file)


if __name__ == "__main__":
    run_tests()

"""Checkpoints, and a model that one job after the other trains, each sharded in another way."""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
    StateDictOptions,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.optim.muon import create_auto_config
from torch.testing._internal.distributed._muon.common_fsdp1 import wrap
from torch.testing._internal.distributed._muon.common_modules import (
    make_model,
    tensor_parallel,
)
from torch.testing._internal.distributed._muon.common_muon import (
    device,
    full,
    mesh_of,
    place,
    Spec,
)


if TYPE_CHECKING:
    from collections.abc import Callable


@functools.cache
def pairs_of(ranks: int) -> DeviceMesh:
    """This rank's mesh "a" x "b" of 2 x ``ranks`` / 2, of which the world has several."""
    shape = (dist.get_world_size() // ranks, 2, ranks // 2)
    names = ("copy", "a", "b")
    return init_device_mesh(device().type, shape, mesh_dim_names=names)["a", "b"]


def fsdp2(model, ranks):
    return fully_shard(model, mesh=mesh_of(ranks))


def hsdp(model, ranks):
    return fully_shard(model, mesh=pairs_of(ranks))


def fsdp2_tp(model, ranks):
    mesh = pairs_of(ranks)
    return fully_shard(tensor_parallel(model, mesh["b"]), mesh=mesh["a"])


@functools.cache
def line_of(ranks: int) -> DeviceMesh:
    """As :func:`mesh_of`, but no part of a mesh: FSDP1 takes the rest of one for tensor parallelism."""
    group = mesh_of(ranks).get_group()
    return DeviceMesh.from_group(group, device().type, mesh_dim_names=("line",))


def fsdp1(model, ranks):
    return wrap(model, orig=True, units=None, device_mesh=line_of(ranks))


def fsdp1_flat(model, ranks):
    return wrap(model, orig=False, units=None, device_mesh=line_of(ranks))


def alone(model, ranks):
    return model


class Stage(NamedTuple):
    """A job of the first ``ranks``."""

    ranks: int
    shard: Callable[[torch.nn.Module, int], torch.nn.Module]

    def make_meshes(self) -> None:
        """On all ranks, idle ones, too."""
        mesh_of(self.ranks)
        if self.ranks > 1:
            pairs_of(self.ranks)

    def __str__(self):
        return f"{self.shard.__name__} on {self.ranks}"


def fresh_model(seed):
    # Two matrices with an odd side, of which ranks have pieces of different sizes, or none.
    return make_model(width=9, hidden=16, layers=2, bias=False, seed=seed)


def state_of(model, optimizer, **options) -> dict[str, Any]:
    with warnings.catch_warnings():
        # What FSDP1 has to say of its age.
        warnings.simplefilter("ignore", FutureWarning)
        values, state = get_state_dict(
            model, optimizer, options=StateDictOptions(**options)
        )
    return {"model": values, "optimizer": state}


def set_state(model, optimizer, state, **options) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(**options),
        )


class Job:
    """The model and the optimizer of one stage."""

    def __init__(self, stage: Stage, seed: int, **options: Any) -> None:
        self.stage = stage
        self.model = stage.shard(fresh_model(seed), stage.ranks)
        config = None if stage.ranks == 1 else "auto"
        if isinstance(self.model, FSDP):
            config = create_auto_config(module=self.model)
        params = self.model.parameters()
        self.optimizer = Muon(params, distributed_config=config, **options)

    def step(self, grads: dict[str, torch.Tensor]) -> None:
        if isinstance(self.model, FSDP):
            self._give_to_flat(grads)
        else:
            for name, param in self.model.named_parameters():
                param.grad = grads[name].clone()
                if isinstance(param, DTensor):
                    spec = Spec(param.shape, param.device_mesh, param.placements)
                    param.grad = place(grads[name], spec)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _give_to_flat(self, grads: dict[str, torch.Tensor]) -> None:
        flat = self.model._handle.flat_param
        grad = torch.zeros_like(flat)
        for i, (name, info) in enumerate(zip(flat._fqns, flat._shard_param_infos)):
            if not info.in_shard:
                continue
            first, last = info.intra_param_start_idx, info.intra_param_end_idx
            piece = grad[info.offset_in_shard :][: info.numel_in_shard]
            piece.copy_(grads[name].flatten()[first : last + 1])
            if flat._params is not None:
                flat._params[i].grad = piece.clone()
        if flat._params is None:
            flat.grad = grad

    # Checkpoints

    def save(self, path: str) -> None:
        state = state_of(self.model, self.optimizer)
        dcp.save(state, checkpoint_id=path, **self._group())

    def load(self, path: str) -> None:
        state = state_of(self.model, self.optimizer)
        dcp.load(state, checkpoint_id=path, **self._group())
        set_state(self.model, self.optimizer, state)

    def save_file(self, path: str) -> None:
        state = self.whole()
        if dist.get_rank() == 0:
            torch.save(state, path)

    def load_file(self, path: str) -> None:
        set_state(self.model, self.optimizer, torch.load(path), full_state_dict=True)

    def whole(self) -> dict[str, Any]:
        """Parameters and momentum, whole on every rank."""
        return state_of(self.model, self.optimizer, full_state_dict=True)

    def _group(self) -> dict[str, Any]:
        group = mesh_of(self.stage.ranks).get_group()
        return {"process_group": group, "no_dist": self.stage.ranks == 1}


class Uninterrupted:
    """One process that makes every step of a journey."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.model = fresh_model(seed)
        self.optimizer = Muon(self.model.parameters(), **options)
        self.steps = 0

    def step(self) -> dict[str, torch.Tensor]:
        """Makes a step, and returns the gradients of it by name."""
        self.steps += 1
        params = dict(self.model.named_parameters())
        for i, param in enumerate(params.values()):
            param.grad = full(100 * self.steps + i, param.shape)
        self.optimizer.step()
        return {name: param.grad for name, param in params.items()}

    def problems(self, whole: dict[str, Any]) -> list[str]:
        """The differences from a job's :meth:`Job.whole`."""
        found = []
        for name, param in self.model.named_parameters():
            mine = whole["model"][name], whole["optimizer"]["state"][name]
            if not torch.equal(mine[0], param.detach()):
                found.append(f"parameter {name}")
            momentum = self.optimizer.state[param]["momentum_buffer"]
            if not torch.equal(mine[1]["momentum_buffer"], momentum):
                found.append(f"momentum of {name}")
        return found

"""The proof of a recipe: the same training on one process, bit for bit.

:class:`OneProcess` trains the whole model beside the distributed one. Before each step of
the distributed Muon it takes over the gradients, put together from all pieces; after it,
parameters and momentum have to be the same to the last bit, those of each piece and of each
replica.

Pieces are put together by what the framework offers, or by plain concatenation. Nothing of
the optimizer's own reading of layouts is used.
"""

import re
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from measure import matrix_and_momentum, Meter
from models import batch, TP_DIMS
from torch import nn, Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import Muon


# Gradients of one process may round otherwise; a forgotten division would show.
CLOSE = 1e-4


class OneProcess:
    """Watches a distributed Muon from its making to the end of the training.

    Args:
        one: the model as a process alone would have it, in the state that training starts
            with.
        model: its distributed form; its parameters have the same names.
        optimizers: the Muon of ``model``; or several, each with some of the matrices.
        fsdp: where FSDP1 or the recipe cut rows: the ranks that they are on.
        tp: where plain tensors, or FSDP1's, are pieces of tensor parallelism: the ranks
            that they are on.
        tp_dims: the dimension that they are cut along, by the last part of the name; what is
            not named is whole.
        gather: puts this rank's piece and the others' together, in rank order, where the
            model is no business of torch.distributed.
        once: whether each matrix is to be orthogonalized by one rank only.
    """

    def __init__(
        self,
        one: nn.Module,
        model: nn.Module,
        *optimizers: Muon,
        fsdp: ProcessGroup | None = None,
        tp: ProcessGroup | None = None,
        tp_dims: dict[str, int] | None = None,
        gather: Callable[[Tensor], Tensor] | None = None,
        once: bool = True,
    ) -> None:
        self.one = one
        self.whole = dict(one.named_parameters())
        self.fsdp, self.tp, self.gather, self.once = fsdp, tp, gather, once
        self.tp_dims = TP_DIMS if tp_dims is None else tp_dims
        self.held = self._names_of(model)
        self.is_sharded = {
            param
            for name, param in model.named_parameters()
            if "_fsdp_wrapped_module" in name or hasattr(param, "is_rows")
        }
        self.problems: list[str] = []
        self.names: list[str] = []
        self.steps = 0
        self.losses: list[float] = []
        self._compare("before training, parameter", model.parameters(), lambda p: p)
        self.meters = []
        self.twins: dict[Muon, Muon] = {}
        for optimizer in optimizers:
            self.twins[optimizer] = self._twin_of(optimizer)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
            # Begins to count after the twin has stepped.
            self.meters.append(Meter(optimizer))

        here = {name for names in self.held.values() for name in names}
        # Stages and experts that other ranks have.
        self.elsewhere = [name for name in self.whole if name not in here]
        self.is_partial = gather is None and any(objects_of_all(self.elsewhere))

    def _names_of(self, model: nn.Module) -> dict[nn.Parameter, list[str]]:
        """What each parameter of ``model`` is a piece of; a flat one of FSDP1, of several."""
        held: dict[nn.Parameter, list[str]] = {}
        units: dict[str, nn.Parameter] = {}
        for name, param in model.named_parameters():
            plain = re.sub(r"\b(module|_fsdp_wrapped_module)\.", "", name)
            if isinstance(param, FlatParameter):
                units[plain.rpartition(".")[0]] = param
                held[param] = []
            else:
                held[param] = [plain]
        for name in self.whole:
            around = [u for u in units if not u or name.startswith(f"{u}.")]
            if around:
                held[units[max(around, key=len)]].append(name)
        return held

    def _twin_of(self, optimizer: Muon) -> Muon:
        groups = []
        for group in optimizer.param_groups:
            names = [name for p in group["params"] for name in self.held[p]]
            self.names.extend(names)
            groups.append({**group, "params": [self.whole[name] for name in names]})
        return Muon(groups)

    # What is done beside each step

    def _before_step(self, optimizer: Muon, *_: Any) -> None:
        with torch.enable_grad():
            if optimizer is next(iter(self.twins)):
                self._train_one()
        for group in optimizer.param_groups:
            for param in group["params"]:
                self._take_gradients(param)
        self.twins[optimizer].step()

    def _train_one(self) -> None:
        """Backward of the whole batch, from the parameters that the others have now."""
        chosen = set(self.names)
        for param, names in self.held.items():
            if not chosen.issuperset(names):
                for name, tensor in zip(names, self.join(param.detach(), param)):
                    self.whole[name].data.copy_(tensor)
        if self.is_partial:
            self._fetch_what_is_elsewhere()
        self.one.zero_grad()
        device = next(self.one.parameters()).device
        inputs, targets = (tensor.to(device) for tensor in batch(self.steps))
        loss = F.mse_loss(self.one(inputs), targets)
        loss.backward()
        self.losses.append(loss.item())
        self.steps += 1

    def _fetch_what_is_elsewhere(self) -> None:
        own = {
            name: self.whole[name].detach().cpu()
            for name in self.whole
            if name not in self.elsewhere
        }
        known = {n: t for theirs in objects_of_all(own) for n, t in theirs.items()}
        for name in self.elsewhere:
            self.whole[name].data.copy_(known[name])

    def _take_gradients(self, param: nn.Parameter) -> None:
        grad = param.grad
        if grad is None:  # FSDP1 leaves a rank without elements of a matrix without it
            grad = torch.zeros_like(param)
        for name, tensor in zip(self.held[param], self.join(grad, param)):
            own = self.whole[name].grad
            apart, size = (tensor - own).abs().max(), own.abs().max()
            if not apart <= CLOSE * size:
                self.problems.append(
                    f"step {self.steps}: the gradient of {name} is off by {apart:.2g} where "
                    f"that of the whole batch is up to {size:.2g}"
                )
            self.whole[name].grad = tensor.clone()

    def _after_step(self, optimizer: Muon, *_: Any) -> None:
        twin = self.twins[optimizer]
        own = [p for group in optimizer.param_groups for p in group["params"]]
        for which, what in enumerate(("parameter", "momentum")):
            self._compare(
                f"step {self.steps}, {what}",
                own,
                lambda p: matrix_and_momentum(optimizer, p)[which][1],
                lambda name: matrix_and_momentum(twin, self.whole[name])[which][1],
            )

    def _compare(
        self,
        what: str,
        params: Iterable[nn.Parameter],
        here: Callable[[nn.Parameter], Tensor],
        there: Callable[[str], Tensor] | None = None,
    ) -> None:
        for param in params:
            joined = self.join(here(param).detach(), param)
            for name, tensor in zip(self.held[param], joined, strict=True):
                expected = (there or self.whole.get)(name).detach()
                if not same_bits(tensor, expected):
                    apart = (tensor - expected).abs().max()
                    self.problems.append(f"{what} {name} differs by up to {apart:.3g}")

    # Putting pieces together

    def join(self, tensor: Tensor, param: nn.Parameter) -> list[Tensor]:
        """The whole ones of ``tensor``, which is laid out as ``param`` is."""
        if isinstance(tensor, DTensor):
            # A gradient may still be partial sums, which add up otherwise on the way to
            # another placement.
            return [tensor.redistribute(placements=param.placements).full_tensor()]
        if self.gather is not None:
            return [self.gather(tensor)]
        shapes = [self.whole[name].shape for name in self.held[param]]
        cuts = [self._tp_dim(name) for name in self.held[param]]
        if param in self.is_sharded:
            flat = torch.cat([t.flatten() for t in everyones(tensor, self.fsdp)])
            shapes = [self._cut(shape, dim) for shape, dim in zip(shapes, cuts)]
            sizes = [shape.numel() for shape in shapes]
            # What is left over is FSDP's padding.
            pieces = flat[: sum(sizes)].split(sizes)
            tensors = [p.view(shape) for p, shape in zip(pieces, shapes)]
        else:
            tensors = [tensor]
        return [
            t if dim is None else torch.cat(everyones(t, self.tp), dim)
            for t, dim in zip(tensors, cuts, strict=True)
        ]

    def _tp_dim(self, name: str) -> int | None:
        last = name.removesuffix(".weight").rpartition(".")[2]
        return None if self.tp is None else self.tp_dims.get(last)

    def _cut(self, shape: torch.Size, dim: int | None) -> torch.Size:
        size = 1 if self.tp is None else self.tp.size()
        return torch.Size(s // size if i == dim else s for i, s in enumerate(shape))

    def verdict(self) -> dict[str, Any]:
        digests = {}
        for twin in self.twins.values():
            for name in set(self.names):
                if self.whole[name] in twin.state:
                    for what, tensor in matrix_and_momentum(twin, self.whole[name]):
                        digests[f"{what} {name}"] = digest(tensor)
        return {
            "names": sorted(set(self.names)),
            # Each rank's process alone saw that rank's gradients: replicas need not have
            # had the same.
            "digests": digests,
            "steps": self.steps,
            "calls": sum(meter.newton_schulz for meter in self.meters),
            "once": self.once,
            "problems": self.problems[:2]
            or ([] if self.steps else ["no step was made"]),
        }


def everyones(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    """The piece of each rank of ``group``; they may differ in size."""
    pieces = objects_of_all(tensor.detach().cpu(), group)
    return [piece.to(tensor.device) for piece in pieces]


def objects_of_all(own: Any, group: ProcessGroup | None = None) -> list[Any]:
    if not dist.is_initialized():
        return [own]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def digest(tensor: Tensor) -> int:
    return zlib.crc32(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()))


def same_bits(a: Tensor, b: Tensor) -> bool:
    # As bytes: a NaN then equals itself, and 0 differs from -0.
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )

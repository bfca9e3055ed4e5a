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
        self._take_gradients(self._params_of(optimizer))
        self.twins[optimizer].step()

    @staticmethod
    def _params_of(optimizer: Muon) -> list[nn.Parameter]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    def _train_one(self) -> None:
        """Backward of the whole batch, from the parameters that the others have now."""
        chosen = set(self.names)
        others = [p for p, names in self.held.items() if not chosen.issuperset(names)]
        for name, tensor in self.join([p.detach() for p in others], others).items():
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

    def _take_gradients(self, params: list[nn.Parameter]) -> None:
        # FSDP1 leaves a rank without elements of a matrix without a gradient.
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        for name, tensor in self.join(grads, params).items():
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
        own = self._params_of(optimizer)
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
        params = list(params)
        joined = self.join([here(param).detach() for param in params], params)
        for name, tensor in joined.items():
            expected = (there or self.whole.get)(name).detach()
            if not same_bits(tensor, expected):
                apart = (tensor - expected).abs().max()
                self.problems.append(f"{what} {name} differs by up to {apart:.3g}")

    # Putting pieces together

    def join(
        self, tensors: list[Tensor], params: list[nn.Parameter]
    ) -> dict[str, Tensor]:
        """The whole ones of ``tensors``, which are laid out as ``params`` are, by name."""
        if self.gather is not None:
            gathered = [self.gather(tensor) for tensor in tensors]
            return {self.held[p][0]: t for p, t in zip(params, gathered, strict=True)}
        whole: dict[str, Tensor] = {}
        # Of plain tensors: TP's pieces, and those of FSDP1 by parameter.
        pieces: dict[str, Tensor] = {}
        flat: dict[nn.Parameter, Tensor] = {}
        for tensor, param in zip(tensors, params, strict=True):
            if isinstance(tensor, DTensor):
                # A gradient may still be partial sums, which add up otherwise on the way to
                # another placement.
                placed = tensor.redistribute(placements=param.placements)
                whole[self.held[param][0]] = placed.full_tensor()
            elif param in self.is_sharded:
                flat[param] = tensor
            else:
                pieces[self.held[param][0]] = tensor
        for param, parts in zip(flat, everyones(list(flat.values()), self.fsdp)):
            shapes = [self._cut(name) for name in self.held[param]]
            sizes = [shape.numel() for shape in shapes]
            # What is left over is FSDP's padding.
            rows = torch.cat([part.flatten() for part in parts])[: sum(sizes)]
            views = (r.view(s) for r, s in zip(rows.split(sizes), shapes))
            pieces |= dict(zip(self.held[param], views, strict=True))
        cut = [name for name in pieces if self._tp_dim(name) is not None]
        joined = everyones([pieces[name] for name in cut], self.tp)
        for name, parts in zip(cut, joined, strict=True):
            pieces[name] = torch.cat(parts, self._tp_dim(name))
        return whole | pieces

    def _tp_dim(self, name: str) -> int | None:
        last = name.removesuffix(".weight").rpartition(".")[2]
        return None if self.tp is None else self.tp_dims.get(last)

    def _cut(self, name: str) -> torch.Size:
        """The shape of TP's piece."""
        size = 1 if self.tp is None else self.tp.size()
        shape, dim = self.whole[name].shape, self._tp_dim(name)
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


def everyones(
    tensors: list[Tensor], group: ProcessGroup | None
) -> list[tuple[Tensor, ...]]:
    """For each of ``tensors``, those of all ranks of ``group``; they may differ in size."""
    if not tensors:
        return []
    device = tensors[0].device
    found = objects_of_all([tensor.detach().cpu() for tensor in tensors], group)
    return list(zip(*([t.to(device) for t in theirs] for theirs in found), strict=True))


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

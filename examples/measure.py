"""What the examples measure of a Muon, and the table that they print of it."""

import statistics
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from text_table import render
from torch import nn, Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import distribute_tensor, DTensor
from torch.optim import _newton_schulz, Muon
from torch.utils._python_dispatch import TorchDispatchMode


class Wire(TorchDispatchMode):
    """Counts the collectives, and the bytes that leave this process by the ranks of their group.

    Under the dispatcher every way of calling a collective looks the same, so that nothing
    goes uncounted: what this cannot weigh, it names in ``unknown``. What an operation sends
    is taken from its splits, or from its ring algorithm. All-reduces of integers are weighed
    apart: by these, ranks tell each other the statuses of gradients.
    """

    NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
    SILENT = ("recv_", "wait_tensor", "_wrap_tensor_autograd")

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[tuple[int, ...]] = Counter()
        self.statuses = 0
        self.calls: Counter[str] = Counter()
        self.unknown: set[str] = set()

    @property
    def other(self) -> dict[str, int]:
        """Calls that are no exchange between peers."""
        exchanges = ("alltoall_base", "all_to_all_single", "send", STATUSES)
        return {name: n for name, n in self.calls.items() if name not in exchanges}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # Its collectives are only seen once it has taken the operation apart.
            return NotImplemented
        name = func.overloadpacket.__name__
        if name == "allreduce_" and not args[0][0].is_floating_point():
            self.calls[STATUSES] += 1
            self.statuses += SENT[name](args, group_of(args))
        elif func.namespace in self.NAMESPACES and name not in self.SILENT:
            self.calls[name.rstrip("_")] += 1
            if name in SENT:
                group = group_of(args)
                ranks = tuple(dist.get_process_group_ranks(group))
                self.bytes[ranks] += SENT[name](args, group)
            else:
                self.unknown.add(name)
        return func(*args, **(kwargs or {}))


def group_of(args: Any) -> ProcessGroup:
    """The group among a collective's arguments: boxed, or by its name, which stands last."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return ProcessGroup.unbox(arg)
    return dist.distributed_c10d._resolve_process_group(args[-1])


def all_gather(sent: Any, group: ProcessGroup) -> int:
    return (group.size() - 1) * nbytes(sent)


def reduce_scatter(sent: Any, group: ProcessGroup) -> int:
    return all_gather(sent, group) // group.size()


def all_to_all(sent: Tensor, splits: list[int], group: ProcessGroup) -> int:
    rows = sent.shape[0]
    kept = splits[group.rank()] if splits else rows // group.size()
    return (rows - kept) * (sent.nbytes // rows) if rows else 0


def nbytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(map(nbytes, tensors))


STATUSES = "all-reduce of statuses"

# The bytes that this process sends in an operation.
SENT: dict[str, Callable[[Any, ProcessGroup], int]] = {
    "alltoall_base_": lambda args, group: all_to_all(args[1], args[4], group),
    "all_to_all_single": lambda args, group: all_to_all(args[0], args[2], group),
    "send": lambda args, group: nbytes(args[0]),
    "all_gather_into_tensor": lambda args, group: all_gather(args[0], group),
    "_allgather_base_": lambda args, group: all_gather(args[1], group),
    "allgather_": lambda args, group: all_gather(args[1], group),
    "all_reduce": lambda args, group: 2 * reduce_scatter(args[0], group),
    "all_reduce_": lambda args, group: 2 * reduce_scatter(args[0], group),
    "allreduce_": lambda args, group: 2 * reduce_scatter(args[0], group),
    "reduce_scatter_tensor": lambda args, group: reduce_scatter(args[0], group),
    "_reduce_scatter_base_": lambda args, group: reduce_scatter(args[1], group),
    # One rank receives from, or sends to, all others; its own part stays.
    "gather_": lambda args, group: 0 if nbytes(args[0]) else nbytes(args[1]),
    "scatter_": lambda args, group: max(0, nbytes(args[1]) - nbytes(args[0])),
    "shard_dim_alltoall": lambda args, group: reduce_scatter(args[0], group),
}


class Meter:
    """Counts and times what ``optimizer`` does in its steps from now on."""

    def __init__(self, optimizer: Muon) -> None:
        self.wire = Wire()
        self.seconds: list[float] = []
        self.newton_schulz = 0
        # All Newton-Schulz iterations, distributed or not, are calls of this one.
        self._original = _newton_schulz.newton_schulz
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    @property
    def steps(self) -> int:
        return len(self.seconds)

    def _begin(self, *_: Any) -> None:
        _newton_schulz.newton_schulz = self._counted
        self.wire.__enter__()
        self._began = time.monotonic()

    def _end(self, *_: Any) -> None:
        self.seconds.append(time.monotonic() - self._began)
        self.wire.__exit__(None, None, None)
        _newton_schulz.newton_schulz = self._original

    def _counted(self, matrix: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Matrices of one shape may come as a batch.
        self.newton_schulz += matrix.shape[:-2].numel()
        return self._original(matrix, *args, **kwargs)

    def figures(self) -> dict[str, Any]:
        return {
            "calls": self.newton_schulz / self.steps,
            "other": self.wire.other,
            "collectives": {n: c / self.steps for n, c in self.wire.calls.items()},
            "step_seconds": statistics.median(self.seconds),
        }


def exact_steps(
    many: tuple[nn.Module, Muon], one: tuple[nn.Module, Muon], steps: int
) -> dict[str, Any]:
    """Steps a distributed Muon and one that needs no other process with the same gradients.

    Args:
        many: this rank's part of a model, and the distributed Muon of its matrices.
        one: the whole model on one process. Common parameters have common names.

    Returns the ``exact`` steps, the names that were ``checked``, and what is ``differing``:
    in words, the first of this rank's matrices that is not the same to the last bit or has
    other momentum.
    """
    here, whole = matrices_of(*many), matrices_of(*one)
    for step in range(steps):
        for index, (name, expected) in enumerate(whole.items()):
            grad = seeded_gradient(name, expected.shape, step).to(expected.device)
            if index % steps == step:
                grad.zero_()  # as that of an expert that got no token
            expected.grad = grad
            if name in here:
                here[name].grad = part_of(grad, here[name])
        many[1].step()
        one[1].step()
    found = (
        f"{name}: {what} differs by up to {(a - b).abs().max():.3g}"
        for name in here
        for what, a, b in states(many[1], here[name], one[1], whole[name])
        # As bytes: a NaN then equals itself, and 0 differs from -0.
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    )
    return {"exact": steps, "checked": list(here), "differing": next(found, "")}


def matrix_and_momentum(muon: Muon, p: nn.Parameter) -> list[tuple[str, Tensor]]:
    return [("parameter", p.detach()), ("momentum", muon.state[p]["momentum_buffer"])]


def states(
    many: Muon, here: nn.Parameter, one: Muon, whole: nn.Parameter
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What this rank has of a matrix and of its momentum, and what it should have."""
    for (what, found), (_, expected) in zip(
        matrix_and_momentum(many, here), matrix_and_momentum(one, whole)
    ):
        yield what, local(found), local(part_of(expected, found))


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """``whole`` as this rank has it where it is laid out as ``like`` is."""
    if not isinstance(like, DTensor):
        return whole.clone()
    # Every rank has all of it: nothing is sent.
    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.contiguous()


def matrices_of(model: nn.Module, muon: Muon) -> dict[str, nn.Parameter]:
    """The parameters of ``muon`` by their names in ``model``."""
    own = {id(p) for group in muon.param_groups for p in group["params"]}
    return {name: p for name, p in model.named_parameters() if id(p) in own}


def seeded_gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    """The same on every rank that holds ``name``, and of full rank, as Newton-Schulz likes it."""
    seed = zlib.crc32(f"{name} {step}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def conclude(
    title: str,
    figures: dict[str, Any],
    alone: Callable[[], dict[str, Any]],
    silent: str | None = None,
    more: Callable[..., None] | None = None,
) -> int:
    """Has the first rank run ``alone``, prints the table, and leaves the process group.

    Args:
        figures: of this rank, as :func:`print_table` takes them of all.
        alone: makes the figures of one process. The other ranks wait for it.
        more: is given all figures on the first rank, and the list of what does not hold, to
            which it may add.

    Returns the exit code: 1 where something does not hold, which is said on stderr.
    """
    first = dist.get_rank() == 0
    one = alone() if first else {}
    many: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(many, figures)
    problems = print_table(title, one, many, silent) if first else []
    if first and more is not None:
        more(one, many, problems)
    for problem in problems:
        print(f"{Path(sys.argv[0]).stem}: {problem}", file=sys.stderr)
    dist.destroy_process_group()
    return 1 if problems else 0


def by_kind(
    wire: Wire, kinds: dict[str, ProcessGroup], steps: int = 1
) -> dict[str, float]:
    """The bytes of one step by what the groups they travelled over are for."""
    named: dict[tuple[int, ...], str] = {}
    for kind, group in kinds.items():
        # Of two kinds that are the same ranks here, the first is meant.
        named.setdefault(tuple(dist.get_process_group_ranks(group)), kind)
    found: Counter[str] = Counter(dict.fromkeys(kinds, 0))
    for ranks, size in wire.bytes.items():
        found[named.get(ranks, f"ranks {ranks}")] += size / steps
    return dict(found)


# What a training has to say of itself, where it knows it.
ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "loss, first step": lambda f: f"{f['losses'][0]:.4f}",
    "loss, mean of the last tenth": lambda f: f"{last_tenth(f):.4f}",
    "loss on held-out text": lambda f: f"{f['held_out']:.4f}",
    "seconds": lambda f: f"{f['seconds']:.1f}",
    "seconds a Muon step": lambda f: f"{f['step_seconds']:.3f}",
}


def print_table(
    title: str, one: dict[str, Any], many: list[dict[str, Any]], silent: str | None
) -> list[str]:
    """Prints how many processes compare with one, and returns what does not hold, in words.

    Args:
        one: the figures of the process alone: ``losses`` and ``held_out`` of the training,
            Newton-Schulz ``calls`` a step, and the seconds.
        many: the same of each rank; further the bytes that a step of Muon has ``sent`` and
            that the batch before it did (``batch_sent``), by kind of group; the bytes that
            are ``needed``, if that is known; the ``other`` collectives; and what
            ``exact_steps`` returns.
        silent: the kind of group that Muon must not send over.
    """
    first = many[0]
    calls = sum(rank["calls"] for rank in many)
    apart = max(abs(a - b) for a, b in zip(one["losses"], first["losses"], strict=True))
    rows = [
        (name, words(one), words(first))
        for name, words in ROWS.items()
        if name != "seconds" or name in one
    ]
    rows.append(("largest difference of loss, any step", "", f"{apart:.2g}"))
    rows.append(("Newton-Schulz calls a step", f"{one['calls']:g}", f"{calls:g}"))
    print(f"\n{title}, {len(one['losses'])} steps\n")
    print(render(("", "one process", f"{len(many)} processes"), rows, indent="  "))

    print(f"\nEach of the {len(many)} processes (ranks 0 to {len(many) - 1})")
    lines = [
        ("Newton-Schulz calls, a Muon step", [rank["calls"] for rank in many], "g")
    ]
    for what, key in (("Muon step", "sent"), ("batch", "batch_sent")):
        for kind in dict.fromkeys(kind for rank in many for kind in rank.get(key, ())):
            kib = [rank[key].get(kind, 0) / 1024 for rank in many]
            # Of a batch, only what shows that this kind of group is not silent by itself.
            if key == "sent" or kind == silent:
                lines.append((f"KiB sent over {kind}, a {what}", kib, ".1f"))
    if "needed" in first:
        kib = [rank["needed"] / 1024 for rank in many]
        lines.append(("KiB that cannot be less", kib, ".1f"))
    width = max(len(name) for name, _, _ in lines)
    for name, values, form in lines:
        each = " + ".join(format(value, form) for value in values)
        print(f"  {name:<{width}}  {each} = {format(sum(values), form)}")

    counted = [f"{n:g} {name}" for name, n in first["collectives"].items()]
    print(f"  {'collectives a Muon step':<{width}}  {', '.join(counted)}")

    checked = len({name for rank in many for name in rank["checked"]})
    unequal = [
        f"rank {i}: {r['differing']}" for i, r in enumerate(many) if r["differing"]
    ]
    words = f"NO, {unequal[0]}" if unequal else "yes"
    print(
        "\nIdentical gradients: each rank's parameters and momentum against one process"
    )
    print(f"  bitwise equal: {words} ({checked} matrices, {first['exact']} steps)")

    problems = [f"not bitwise equal with identical gradients: {u}" for u in unequal]
    for what, count in (("matrices checked", checked), ("Newton-Schulz calls", calls)):
        if count != one["calls"]:
            problems.append(
                f"{count:g} {what}, not the {one['calls']:g} of one process"
            )
    for index, rank in enumerate(many):
        if rank["other"]:
            problems.append(f"rank {index}: Muon uses {', '.join(rank['other'])} too")
        if silent is not None and rank["sent"][silent]:
            problems.append(f"rank {index}: Muon sends over {silent}")
    return problems


def print_loss(who: str, steps: int, step: int, loss: float) -> None:
    """Each tenth one and the last, on the first process."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if is_first and (step % 10 == 0 or step == steps - 1):
        print(f"{who}: step {step:4d}  loss {loss:.4f}", flush=True)


def last_tenth(figures: dict[str, Any]) -> float:
    """Their mean, for a single batch's loss is noisy."""
    losses = figures["losses"]
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)

"""What ``verify`` runs in the environment that has torch: one process of a training run, and the comparison of two runs.

``verify.py`` starts this file; it is of no use by hand. The training is that of ``examples/train_gpt.py``; what is
here counts and records around it.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import pathlib
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

ROOT = pathlib.Path(__file__).resolve().parents[2]
# In place of this folder, whose modules must not stand before others of the same name.
sys.path[0] = str(ROOT / "examples")

import torch
import torch.distributed as dist
import train_gpt
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor
from torch.optim import _muon, Muon
from torch.utils._python_dispatch import TorchDispatchMode


CPU = torch.device("cpu")
GLOO_TIMEOUT = datetime.timedelta(seconds=120)
USAGE = 64  # as verify.py has it
NEWTON_SCHULZ = ("_zeropower_via_newtonschulz", "_newtonschulz")


class Wire(TorchDispatchMode):
    """Counts the bytes that leave this process, and the collectives.

    Under the dispatcher every way of calling a collective looks the same, so that nothing the optimizer sends goes
    uncounted. All processes are one group here: the place in the splits is the rank.
    """

    ALL_TO_ALL = ("alltoall_base_", "all_to_all_single")
    SILENT = ("wait_tensor", "_wrap_tensor_autograd")

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.bytes = 0
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in self.SILENT:
            self.calls["all_to_all_single" if name in self.ALL_TO_ALL else name] += 1
            if name == "alltoall_base_":
                self._add(sent=args[1], splits=args[4])
            elif name == "all_to_all_single":
                self._add(sent=args[0], splits=args[2])
        return func(*args, **(kwargs or {}))

    def _add(self, sent: Tensor, splits: list[int]) -> None:
        rows = sent.shape[0]
        own = splits[self.rank] if splits else rows // self.size
        self.bytes += (rows - own) * (sent.nbytes // rows) if rows else 0


class Counted:
    """Counts and times what an optimizer does from now on, between the beginning and the end of each step."""

    def __init__(self, optimizer: Muon, rank: int, size: int) -> None:
        self.wire = Wire(rank, size)
        self.seconds: list[float] = []
        self.newton_schulz = 0
        self._began = 0.0
        self._inside = False
        for name in NEWTON_SCHULZ:
            self._wrap(name)
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def _wrap(self, name: str) -> None:
        original = getattr(_muon, name)

        @functools.wraps(original)
        def counted(matrix: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self._inside:  # one of the two functions may call the other
                return original(matrix, *args, **kwargs)
            # A batch counts as its matrices.
            self.newton_schulz += matrix.shape[:-2].numel()
            self._inside = True
            try:
                return original(matrix, *args, **kwargs)
            finally:
                self._inside = False

        # Modules that imported the function hold a reference of their own.
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("torch.optim"):
                if getattr(module, name, None) is original:
                    setattr(module, name, counted)

    def _begin(self, *_: Any) -> None:
        self._began = time.monotonic()
        self.wire.__enter__()

    def _end(self, *_: Any) -> None:
        self.wire.__exit__(None, None, None)
        self.seconds.append(time.monotonic() - self._began)

    def figures(self) -> dict[str, Any]:
        steps = len(self.seconds)
        return {
            "optimizer_steps": steps,
            "newton_schulz_calls": self.newton_schulz,
            "bytes_sent_per_step": self.wire.bytes / steps,
            "collectives_per_step": {
                name: calls / steps for name, calls in self.wire.calls.items()
            },
            "seconds_per_optimizer_step": statistics.median(self.seconds),
        }


def die_with_parent() -> None:
    """Exit when the other end of standard input closes, so that no process outlives the one that started it."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def connect(args: argparse.Namespace) -> DeviceMesh | None:
    torch.set_num_threads(1)
    if args.processes == 1:
        return None
    # A file needs no port, and the timeout ends this process when another one has died.
    dist.init_process_group(
        "gloo",
        init_method=pathlib.Path(args.folder, "rendezvous").absolute().as_uri(),
        rank=args.rank,
        world_size=args.processes,
        timeout=GLOO_TIMEOUT,
    )
    return init_device_mesh("cpu", (args.processes,))


def full(tensor: Tensor) -> Tensor:
    return (
        (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        .detach()
        .clone()
    )


def matrix_names(model: nn.Module, optimizer: Muon) -> list[str]:
    """The names of the optimizer's parameters, in its own order."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def travel(optimizer: Muon, rank: int, size: int) -> dict[str, int]:
    """What this process cannot avoid sending in a step, and how many pieces that is.

    Its pieces of others' matrices go to their owners, and everybody else's pieces of its
    own results go back; in bf16.
    """
    owned = set(optimizer.assignments.get(rank, ()))
    elements = pieces = 0
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for index, p in enumerate(parameters):
        local = p.to_local().numel()
        elements += p.numel() - local if index in owned else local
        pieces += size - 1 if index in owned else 1
    return {
        "bytes_needed_per_step": elements * torch.bfloat16.itemsize,
        "pieces_sent_per_step": pieces,
    }


def seeded_gradient(shape: torch.Size, index: int, step: int, rank: int) -> Tensor:
    """The same for every ``rank``, which is there for the tests, and of full rank, as Newton-Schulz likes it."""
    generator = torch.Generator().manual_seed(10_000 * step + index)
    return torch.randn(shape, generator=generator)


def run_training(
    args: argparse.Namespace, mesh: DeviceMesh | None, log: TextIO
) -> dict[str, Any]:
    """The example's training. The parameters at its beginning and its end go to files."""
    model = train_gpt.build_model(args, mesh, CPU)
    optimizers = train_gpt.build_optimizers(model, args, mesh)
    counted = Counted(optimizers[0], args.rank, args.processes)
    record(args, "initial", train_gpt.full_parameters(model))

    started = time.monotonic()
    ends: list[float] = []
    losses: list[float] = []

    def report(step: int, loss: float) -> None:
        ends.append(time.monotonic())
        losses.append(loss)
        print(json.dumps({"step": step, "loss": loss}), file=log, flush=True)

    held_out = train_gpt.train(model, optimizers, args, mesh, report)
    seconds = time.monotonic() - started
    record(args, "trained", train_gpt.full_parameters(model))
    steps = [end - begin for begin, end in zip([started, *ends], ends)]
    return {
        "losses": losses,
        "held_out_loss": held_out,
        "seconds": seconds,
        "seconds_per_step": statistics.median(steps),
        "matrices": len(matrix_names(model, optimizers[0])),
        "parameters": sum(p.numel() for p in model.parameters()),
        **(
            travel(optimizers[0], args.rank, args.processes) if mesh is not None else {}
        ),
        **counted.figures(),
    }


def run_exact(
    args: argparse.Namespace, mesh: DeviceMesh | None, log: TextIO
) -> dict[str, Any]:
    """Steps with gradients that do not depend on the number of processes: nothing is left that could round."""
    model = train_gpt.build_model(args, mesh, CPU)
    muon, _ = train_gpt.build_optimizers(model, args, mesh)
    counted = Counted(muon, args.rank, args.processes)
    names = matrix_names(model, muon)
    parameters = [p for group in muon.param_groups for p in group["params"]]
    for step in range(args.exact_steps):
        for index, p in enumerate(parameters):
            grad = seeded_gradient(p.shape, index, step, args.rank)
            if isinstance(p, DTensor):
                grad = distribute_tensor(
                    grad, p.device_mesh, p.placements, src_data_rank=None
                )
            p.grad = grad
        muon.step()
        print(json.dumps({"exact": step}), file=log, flush=True)
    state = {}
    for name, p in zip(names, parameters):
        state[name] = {
            "parameter": full(p),
            "momentum": full(muon.state[p]["momentum_buffer"]),
        }
    record(args, "exact", state)
    return counted.figures()


def record(args: argparse.Namespace, name: str, tensors: dict[str, Any]) -> None:
    if args.rank == 0:
        torch.save(tensors, pathlib.Path(args.folder, f"{name}.pt"))


def train(args: argparse.Namespace) -> None:
    die_with_parent()
    mesh = connect(args)
    # Only the first process's log is read.
    with open(
        pathlib.Path(args.folder, "log") if args.rank == 0 else os.devnull, "w"
    ) as log:
        figures = {
            "training": run_training(args, mesh, log),
            "exact": run_exact(args, mesh, log),
        }
    pathlib.Path(args.folder, f"rank{args.rank}.json").write_text(json.dumps(figures))
    if mesh is not None:
        dist.barrier()  # nobody leaves while another still needs it
        dist.destroy_process_group()


def as_bytes(tensor: Tensor) -> Tensor:
    """One row of bytes for each element."""
    return tensor.contiguous().view(-1, 1).view(torch.uint8)


def differing(
    one: dict[str, dict[str, Tensor]], many: dict[str, dict[str, Tensor]]
) -> str | None:
    """The first matrix that is not the same to the bit, in words."""
    if list(one) != list(many):
        return "the two runs have other matrices"
    for name, tensors in one.items():
        for what, expected in tensors.items():
            found = many[name][what]
            if (expected.dtype, expected.shape) != (found.dtype, found.shape):
                return f"{name}: {what} is {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
            # As bytes: a NaN then equals itself, and 0 differs from -0.
            unequal = (as_bytes(expected) != as_bytes(found)).any(dim=1).sum().item()
            if unequal:
                distance = (expected - found).abs().max().item()
                return f"{name}: {what} differs in {unequal} of {expected.numel()} elements, by up to {distance:.3g}"
    return None


def distances(
    initial: dict[str, Tensor], one: dict[str, Tensor], many: dict[str, Tensor]
) -> dict[str, Any]:
    """How far the trained parameters are apart, and how far training had moved them."""
    apart = {name: (many[name] - one[name]).abs().max().item() for name in one}
    name = max(apart, key=apart.__getitem__)

    def norm(difference: Callable[[str], Tensor]) -> float:
        return sum(difference(name).square().sum().item() for name in one) ** 0.5

    moved = norm(lambda name: one[name] - initial[name])
    return {
        "largest": apart[name],
        "largest_in": name,
        "largest_move": max(
            (one[name] - initial[name]).abs().max().item() for name in one
        ),
        "norm_ratio": norm(lambda name: many[name] - one[name]) / moved
        if moved
        else 0.0,
    }


def draw(losses: dict[str, list[float]], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    (one_name, one), (many_name, many) = losses.items()
    figure, (curves, gap) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    steps = range(1, len(one) + 1)
    # The curves lie on each other, so the lower one is wide and pale.
    curves.plot(
        steps, one, color="#9ecae1", linewidth=5, solid_capstyle="round", label=one_name
    )
    curves.plot(steps, many, color="#08306b", linewidth=1.2, label=many_name)
    curves.set_ylabel("loss (nats per byte)")
    curves.set_title("Training loss with torch.optim.Muon, same batches")
    curves.legend(frameon=False)
    # Below float32's resolution the logarithm would only show noise, and zero not at all.
    gap.semilogy(
        steps,
        [max(abs(a - b), 1e-7) for a, b in zip(one, many)],
        color="#a63603",
        linewidth=1.2,
    )
    gap.set_ylabel("difference")
    gap.set_xlabel("step")
    for axes in (curves, gap):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    figure.savefig(path, dpi=120)


def compare(args: argparse.Namespace) -> None:
    """Compare two runs' files, and write ``comparison.json`` and the picture."""
    one, many = pathlib.Path(args.one), pathlib.Path(args.many)
    losses = {}
    for folder, name in (
        (one, "one process"),
        (many, f"{args.processes} processes, FSDP2"),
    ):
        losses[name] = json.loads((folder / "rank0.json").read_text())["training"][
            "losses"
        ]
    comparison = {
        "parameters": distances(
            *(
                torch.load(f)
                for f in (one / "initial.pt", one / "trained.pt", many / "trained.pt")
            )
        ),
        "differing": differing(
            torch.load(one / "exact.pt"), torch.load(many / "exact.pt")
        ),
    }
    pathlib.Path(args.result).write_text(json.dumps(comparison))
    # The picture is not worth the figures: without matplotlib they stand alone.
    with contextlib.suppress(ImportError):
        draw(losses, pathlib.Path(args.picture))


class Parser(argparse.ArgumentParser):
    """Wrong usage in one line: the user typed another command, whose usage is not this one's."""

    def error(self, message: str) -> NoReturn:
        print(message, file=sys.stderr)
        sys.exit(USAGE)


def check(args: argparse.Namespace, wrong: Callable[[str], NoReturn]) -> None:
    for name in ("batch", "context", "width", "layers", "heads"):
        if getattr(args, name) < 1:
            wrong(f"--{name} {getattr(args, name)} is not at least 1")
    if args.batch % args.slices:
        wrong(f"--batch {args.batch} does not divide among {args.slices} processes")
    if args.width % args.heads:
        wrong(f"--width {args.width} does not divide among {args.heads} heads")


def main() -> None:
    parser = Parser()
    choices = parser.add_subparsers(required=True)
    training = choices.add_parser(
        "train", parents=[train_gpt.options()], add_help=False, allow_abbrev=False
    )
    training.add_argument("--folder", required=True)
    training.add_argument("--rank", type=int, required=True)
    training.add_argument("--processes", type=int, required=True)
    training.add_argument("--exact-steps", type=int, required=True)
    training.add_argument("--slices", type=int, required=True)
    training.set_defaults(run=train)
    comparing = choices.add_parser("compare")
    for name in ("--one", "--many", "--result", "--picture"):
        comparing.add_argument(name, required=True)
    comparing.add_argument("--processes", type=int, required=True)
    comparing.set_defaults(run=compare)
    args = parser.parse_args()
    if args.run is train:
        check(args, parser.error)
    args.run(args)


if __name__ == "__main__":
    main()

"""Shared by the scripts: the processes of torchrun, text to train on, and the loop."""

import functools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from pydoc_data.topics import topics
from torch import nn, Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode


def start() -> torch.device:
    """Joins the processes that torchrun started. Returns this rank's device."""
    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # every rank draws the same weights
    return device


def stop() -> None:
    # A thread of gloo may still drop a tensor, and would never come to an end without Python.
    time.sleep(0.2)
    dist.destroy_process_group()


@functools.cache
def load() -> tuple[Tensor, Tensor]:
    """The English text that comes with every CPython, as bytes: to train on, and held out."""
    # Topics repeat paragraphs. Without duplicates, the held-out text is unseen.
    paragraphs: dict[str, None] = {}
    for name in sorted(topics):
        paragraphs.update(dict.fromkeys(topics[name].split("\n\n")))
    text = bytearray("\n\n".join(paragraphs).encode())
    data = torch.frombuffer(text, dtype=torch.uint8)
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def sample(text: Tensor, count: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns ``count`` random windows (the same for a given seed) and their next bytes."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context, (count, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def batch_of(step: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Returns windows of the training text. Each rank of ``group`` has windows of its own."""
    seed = step * group.size() + group.rank()
    return sample(load()[0], 4, 64, seed)


def loss_of(model: nn.Module, windows: tuple[Tensor, Tensor]) -> Tensor:
    device = next(model.parameters()).device
    inputs, targets = (part.to(device) for part in windows)
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size()


def train(
    gradients: Callable[[int], Tensor | None], optimizers: list[Optimizer]
) -> None:
    """Takes 30 steps. ``gradients(step)`` makes the gradients, and returns the loss."""
    for step in range(30):
        loss = gradients(step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if loss is not None and dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}, loss {loss:.4f}", flush=True)
    optimizers[0].synchronize()  # raises if ranks differed in the last step
    stop()


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank sends to other ranks in all-to-alls."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "alltoall_base_" in str(func):
            packed, splits = args[1], args[4]
            elements = sum(splits) - splits[dist.get_rank()]
            self.count += elements * packed.itemsize
        return func(*args, **(kwargs or {}))

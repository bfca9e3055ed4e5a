"""The processes of ``blueprint.py``, and what they watch and compare."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from blueprint_tables import Event
from processes import connect, Place, Processes
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.optim._muon_engine.runtime.pipeline import Pipeline
from torch.optim._muon_engine.runtime.transport import LocalBucket


SECONDS = 240  # for everything together

Values = dict[str, tuple[Tensor, Tensor]]
Job = Callable[[DeviceMesh], dict[str, Any]]


def run(job: Job, dp: int, tp: int) -> list[dict[str, Any]]:
    """What ``job`` returns on each of ``dp`` x ``tp`` processes. None outlives this.

    A process imports ``job`` anew, so that has to be a function of a file.
    """
    with Processes(dp * tp) as processes:
        return processes.run(work, job, dp, tp, seconds=SECONDS)


def work(place: Place, job: Job, dp: int, tp: int) -> dict[str, Any]:
    """What a process does: meets the others, and then its job."""
    connect(place, seconds=SECONDS / 4)
    return job(init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp")))


@contextmanager
def overheard(events: list[Event]) -> Iterator[None]:
    """Notes what the engine of this rank does meanwhile, in the order of events.

    Functions of the engine are wrapped from outside. They do what they always do.
    """
    on_its_way: dict[int, str] = {}  # by bucket

    def starts(thing: str) -> Callable[[LocalBucket], None]:
        def note(bucket: LocalBucket) -> None:
            on_its_way[bucket.bucket.index] = thing
            events.append((f"{thing} starts", bucket.bucket.index, ""))

        return note

    def arrives(bucket: LocalBucket) -> None:
        thing = on_its_way.pop(bucket.bucket.index)
        events.append((f"{thing} is here", bucket.bucket.index, ""))

    def orthogonalizes(_: Pipeline, bucket: LocalBucket, batch: Any) -> None:
        names = ", ".join(matrix.layout.key.name for matrix in batch)
        events.append(("Newton-Schulz", bucket.bucket.index, names))

    def applies_own(_: Pipeline, bucket: LocalBucket, batch: Any) -> None:
        for matrix in batch:
            name = matrix.layout.key.name
            events.append(("apply own shard of", bucket.bucket.index, name))

    def applies(_: Pipeline, bucket: LocalBucket) -> None:
        number = bucket.bucket.index
        count = sum(bool(bucket.scatter_recv.of(m.number)) for m in bucket.matrices)
        events.append(("apply", number, f"scatter {number} to {count} shards"))

    with (
        listen(LocalBucket, "start_gather", before=starts("gather")),
        listen(LocalBucket, "start_scatter", before=starts("scatter")),
        listen(LocalBucket, "wait", after=arrives),
        listen(
            Pipeline, "orthogonalize_batch", before=orthogonalizes, after=applies_own
        ),
        listen(Pipeline, "finish", after=applies),
    ):
        yield


def listen(
    owner: type,
    method: str,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> Any:
    """Calls ``before`` and ``after`` around ``method``, with its arguments."""
    original = getattr(owner, method)

    def wrapped(*args: Any) -> Any:
        if before is not None:
            before(*args)
        result = original(*args)
        if after is not None:
            after(*args)
        return result

    return mock.patch.object(owner, method, wrapped)


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """The same on every rank."""
    seed = zlib.crc32(f"{name} {step}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def take_step(muon: Muon, step: int, shard: Callable[[str, Tensor], Tensor]) -> None:
    """Gives each matrix what ``shard`` cuts out of its gradient, and steps."""
    for name, param in matrices_of(muon).items():
        grad = shard(name, gradient(name, param.shape, step))
        if isinstance(param, DTensor):
            grad = DTensor.from_local(
                grad,
                param.device_mesh,
                param.placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
        param.grad = grad
    muon.step()


def matrices_of(muon: Muon) -> dict[str, nn.Parameter]:
    return {
        name: param
        for group in muon.param_groups
        for name, param in zip(group["param_names"], group["params"])
    }


def values_of(muon: Muon) -> Values:
    """Parameter and momentum by name; of a DTensor, this rank's shard."""

    def here(tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()

    return {
        name: (here(param), here(muon.state[param]["momentum_buffer"]))
        for name, param in matrices_of(muon).items()
    }


def first_difference(found: Values, expected: Values) -> str:
    """In words; "" where all bits are equal."""
    for name, pair in found.items():
        for what, a, b in zip(("parameter", "momentum"), pair, expected[name]):
            # As bytes: a NaN then equals itself, and 0 differs from -0.
            if a.shape != b.shape or not torch.equal(as_bytes(a), as_bytes(b)):
                return f"{name}: {what} differs by up to {(a - b).abs().max():.3g}"
    return ""


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)

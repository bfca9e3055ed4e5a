"""The stages. Each measures one thing within a time limit.

Functions with ``rank`` and ``world`` run on every rank. Times are the host's, from one moment at which the
device is idle to another.
"""

import contextlib
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import _newton_schulz as ns
from torch.optim._muon_engine.regions import newton_schulz_flops
from torch.utils.benchmark import Timer

from .. import contestants, engine_view, fleet, step, table
from ..layouts import lay, local_of
from ..models import MODELS
from . import training as model


ROOT = Path(__file__).parents[3]
OURS, FUSED = "ours-quintic", "ours-gram-fused"
WARM = 3  # steps: the first makes all state, and libraries choose their kernels
PYTEST = [sys.executable, "-m", "pytest", "-v", "-rs", "--tb=short"]
PYTEST += ["-p", "no:cacheprovider"]
GRACE = 10  # seconds in which an interrupted program prints what it has found


class NotRun(Exception):
    """This machine cannot run a stage. The message says why."""


class Found(NamedTuple):
    """Texts for the page, values for programs, and values of a ``GPU`` for ``scale``."""

    texts: list[str]
    values: Any = None
    hardware: dict[str, float] = {}


class Machine(NamedTuple):
    """The argument of a stage. Without an accelerator, ``gpus`` is 0 and there are two ranks."""

    device: str
    gpus: int
    ends: float  # of time.monotonic()

    @property
    def seconds(self) -> float:
        return self.ends - time.monotonic()

    def job(self, *names: str, layout: str = "shard") -> step.Job:
        workload, reps = ("llama1b", 11) if self.gpus else ("tiny", 3)
        return step.Job(layout, workload, names, reps, self.device)

    def run(self, work: Callable, job: Any, world: int | None = None) -> list[Any]:
        world = world or self.gpus or 2
        return fleet.run(work, job, world, self.seconds, self.device)


def output(command: list[str], seconds: float) -> str:
    """Runs a command, and returns its output.

    Raises:
        fleet.Failed: it failed, or was interrupted after ``seconds``. The message ends with the output.
    """
    # The end of a program by force would lose what it prints at its end.
    limit = ["timeout", "--signal=INT", f"--kill-after={GRACE}", f"{seconds}"]
    with tempfile.TemporaryFile("w+") as file:
        # Processes of the program may outlive it, and would keep a pipe open.
        done = subprocess.run([*limit, *command], stdout=file, stderr=file, cwd=ROOT)
        file.seek(0)
        text = file.read()
    if done.returncode:
        raise fleet.Failed(f"{command}: exit code {done.returncode}\n{text}")
    return text


def mean(call: Callable[[], object]) -> float:
    """The mean seconds of equally many calls on all ranks."""
    return Timer("call()", globals={"call": call}).timeit(50).mean


def environment(machine: Machine) -> Found:
    text = output([sys.executable, "-m", "torch.utils.collect_env"], machine.seconds)
    # Without warnings, and without the flags of the CPU.
    begin = text.index("PyTorch version")
    about, _, _ = text[begin:].partition("\nCPU:\n")
    texts = [about]
    if machine.device == "cuda":
        with contextlib.suppress(OSError, fleet.Failed):
            texts.append(output(["nvidia-smi", "topo", "-m"], machine.seconds))
    return Found(texts)


def newton_schulz(machine: Machine) -> Found:
    """Orthogonalizes the matrices of two models, alone and in the batches of a step."""
    shapes = [(64, 64), (64, 96), (96, 64)] * 2
    side = 256
    if machine.gpus:
        shapes = MODELS["Llama 3.2 1B"].shapes + MODELS["Llama 3 8B"].shapes
        side = 8192
    counts = Counter(shapes)
    job = machine.device, counts, side
    ((peak, rows),) = machine.run(_newton_schulz, job, 1)
    cells = []
    flops = seconds = 0.0
    for (height, width), batch, times in rows:
        milliseconds = [f"{1e3 * mean:.3f}" for mean in times]
        cells.append([f"{batch} x {height} x {width}", *milliseconds])
        flops += batch * newton_schulz_flops((height, width))
        seconds += times[0]
    shown = table.render(["ms", *ns.NS_ALGORITHMS], cells)
    utilization = flops / seconds / peak
    text = f"Plain bfloat16 products have {peak / 1e12:.1f} TFLOP/s, quintic {utilization:.0%} of it."
    hardware = {"peak_flops": peak, "utilization": utilization}
    return Found([text, shown], rows, hardware)


def _newton_schulz(rank: int, world: int, job: Any) -> tuple[float, list]:
    device, counts, side = job
    formulas = engine_view.default_formulas()
    coefficients = ns.DEFAULT_A, ns.DEFAULT_B, ns.DEFAULT_C
    square = torch.randn(side, side, device=device).bfloat16()
    peak = 2 * side**3 / mean(lambda: square @ square)
    rows = []
    for shape, count in counts.items():
        largest = min(count, formulas.batch_size(shape, torch.device("cuda")))
        for batch in sorted({1, largest}):
            stack = torch.randn(batch, *shape, device=device)
            options = coefficients, ns.DEFAULT_NS_STEPS, ns.EPS
            call = partial(ns.newton_schulz, stack.bfloat16().squeeze(0), *options)
            times = [mean(partial(call, algorithm)) for algorithm in ns.NS_ALGORITHMS]
            rows.append((shape, batch, times))
    return peak, rows


def steps(machine: Machine) -> Found:
    ours = [f"ours-{algorithm}" for algorithm in ns.NS_ALGORITHMS]
    ours += [f"{name}-fused" for name in ours]
    texts = []
    for layout in ("shard", "ddp"):
        job = machine.job(*ours, *contestants.OTHERS, layout=layout)
        texts.append(step.text(job, machine.run(step.work, job)))
    return Found(texts)


COST_COLUMNS = (
    "rank 0",
    "step() returns, ms",
    "it is done, ms",
    "state, MiB",
    "retained, MiB",
    "peak, MiB",
)


def costs(machine: Machine) -> Found:
    """Time of the host and memory in a step, for a model and for small matrices, for which the device has little work.

    A training loop waits until step() returns. On CUDA, a step of ours in which the host waits for the device is an error.
    """
    note = "Retained and peak: without parameters, gradients and state. A CPU does not count them."
    texts, values = [note], {}
    job = machine.job(OURS, FUSED, *contestants.OTHERS)
    small = ["small112"] if machine.gpus else []
    for workload in (job.workload, *small):
        found = machine.run(_costs, job._replace(workload=workload))[0]
        rows = []
        for name, (returns, is_done, *sizes) in found.items():
            cells = [f"{1e3 * returns:.2f}", f"{1e3 * is_done:.2f}"]
            mebibytes = [f"{nbytes / 2**20:.1f}" for nbytes in sizes]
            rows.append([name, *cells, *mebibytes])
        shown = table.render(COST_COLUMNS, rows)
        texts.append(f"{workload}\n{shown}")
        values[workload] = found
    return Found(texts, values)


def _costs(rank: int, world: int, job: step.Job) -> dict[str, tuple]:
    """Of each optimizer: median seconds until step() returns and until the device is done, and bytes."""
    laid = lay(job.layout, job.workload, world, job.device)
    # The workspace of the library of products is not the optimizer's.
    square = torch.randn(64, 64, device=job.device).bfloat16()
    square @ square
    found = {}
    for name in job.names:
        gc.collect()
        before = _allocated(job.device)
        optimizer = contestants.make(name, laid)
        may_wait = job.device != "cuda" or name in contestants.OTHERS
        returns, is_done = _host_and_device(optimizer, job, may_wait)
        state = 0
        for of_param in optimizer.state.values():
            for tensor in of_param.values():
                state += local_of(tensor).nbytes
        kept = before + state if job.device != "cpu" else 0
        retained = _allocated(job.device) - kept
        peak = _allocated(job.device, "peak") - kept
        found[name] = returns, is_done, state, retained, peak
        del optimizer
    return found


def _host_and_device(
    optimizer: Any, job: step.Job, may_wait: bool
) -> tuple[float, float]:
    """Median seconds until step() returns, and until the device is done. Memory counters begin with the last step."""
    returns, is_done = [], []
    for number in range(WARM + job.reps):
        if job.device != "cpu":
            torch.accelerator.reset_peak_memory_stats()
        dist.barrier()
        fleet.synchronize(job.device)
        began = time.perf_counter()
        if number < WARM or may_wait:
            optimizer.step()
        else:
            torch.cuda.set_sync_debug_mode("error")
            optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
        returned = time.perf_counter()
        fleet.synchronize(job.device)
        ended = time.perf_counter()
        returns.append(returned - began)
        is_done.append(ended - began)
    return statistics.median(returns[WARM:]), statistics.median(is_done[WARM:])


def _allocated(device: str, when: str = "current") -> int:
    if device == "cpu":
        return 0
    stats = torch.accelerator.memory_stats()
    return stats.get(f"allocated_bytes.all.{when}", 0)


def training(machine: Machine) -> Found:
    """The share of the optimizers' step in a training step."""
    size, repetitions = (model.BILLION, 3) if machine.gpus else (model.TINY, 1)
    job = size, (OURS, FUSED, *contestants.OTHERS), machine.device, repetitions
    found = machine.run(model.train, job)[0]
    rows = []
    for name, by_tokens in found.items():
        for tokens, (whole, of_optimizers) in by_tokens.items():
            share = f"{of_optimizers / whole:.1%}"
            times = f"{1e3 * whole:.1f}", f"{1e3 * of_optimizers:.1f}"
            rows.append([name, f"{tokens}", *times, share])
    head = ["optimizers", "tokens a rank", "training step, ms", "optimizers, ms"]
    note = (
        "Forward and backward in bfloat16, with compiled blocks. The others than adamw have AdamW for the parameters that "
        "are no matrices."
    )
    return Found([table.render([*head, "share"], rows), note], found)


def exchange(machine: Machine) -> Found:
    """A small and a large all-to-all, and the collectives of a step."""
    if machine.gpus == 1:
        raise NotRun("It needs two GPUs: NCCL takes one rank per GPU.")
    small, large = 2**10, 2**30 if machine.gpus else 2**20
    ranks = machine.run(_exchange, (machine.job(OURS), small, large))
    slowest = [max(times) for times in zip(*ranks, strict=True)]
    names = f"{small} bytes", f"{large} bytes", "those of a step"
    rows = []
    for name, seconds in zip(names, slowest, strict=True):
        rows.append([name, f"{1e3 * seconds:.3f}"])
    others = len(ranks) - 1
    hardware = {
        "intra_bandwidth": large * others / len(ranks) / slowest[1],
        "intra_latency": slowest[0] / others,
        "gpus_per_node": len(ranks),
    }
    text = table.render(["all-to-alls, slowest rank", "ms"], rows)
    return Found([text], slowest, hardware)


def _exchange(rank: int, world: int, job: Any) -> list[float]:
    """Seconds of all-to-alls of so many bytes on each rank, and of a step's collectives."""
    job, *sizes = job
    laid = lay(job.layout, job.workload, world, job.device)
    calls: list[Callable[[], object]] = []
    for size in sizes:
        send = torch.ones(size // world * world, dtype=torch.uint8, device=job.device)
        received = torch.empty_like(send)
        calls.append(partial(dist.all_to_all_single, received, send))
    muon = contestants.make(job.names[0], laid)
    calls.append(partial(engine_view.exchange, muon))
    return list(map(mean, calls))


def tests(machine: Machine) -> Found:
    """The classes for GPUs. Interrupted by the time limit, pytest prints the outcomes so far, and where it was."""
    needed = "pytest", "expecttest", "numpy"
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise NotRun(f"{sys.executable} has no {', '.join(missing)}.")
    paths = [*ROOT.glob("test/optim/*.py"), *ROOT.glob("test/distributed/optim/*.py")]
    chosen = [str(path) for path in sorted(paths) if "GPU" in path.read_text()]
    chosen += ["-k", "OnGPU or OnOneGPU or OnSharedGPU"]
    text = output([*PYTEST, *chosen], machine.seconds - GRACE)
    if " passed" not in text:
        raise NotRun(text)
    return Found([text])


# Each with its limit in seconds. Together: less than 15 minutes.
STAGES: dict[Callable[[Machine], Found], float] = {
    environment: 30,
    newton_schulz: 70,
    steps: 100,
    costs: 150,
    training: 150,
    exchange: 50,
    tests: 200,
}

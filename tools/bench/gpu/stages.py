"""The stages. Each measures one thing within a time limit.

Functions with ``rank`` and ``world`` run on every rank. Times are the host's, from one moment at which the
device is idle to another.
"""

import contextlib
import gc
import os
import signal
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
from torch import Tensor
from torch.optim import _newton_schulz as ns
from torch.optim._muon_engine.schedule.owners import newton_schulz_flops
from tools.bench.models import MODELS

from .. import contestants, engine_view, fleet, step, table, traffic
from ..layouts import lay, lay_plain, local_of
from . import training as model


ROOT = Path(__file__).parents[3]
OURS, FUSED = "ours-1-quintic", "ours-1-gram-fused"
OTHERS = "stock", "adamw"
WARM = 3  # steps: the first makes all state, and libraries choose their kernels
PYTEST = [sys.executable, "-m", "pytest", "-v", "-rs", "--tb=short"]
PYTEST += ["-p", "no:cacheprovider"]
GRACE = 10  # seconds in which an interrupted program prints its errors


class NotRun(Exception):
    """This machine cannot run a stage. The message says why."""


class Found(NamedTuple):
    """Texts for the page, values for programs, and values of ``Hardware`` for the simulator."""

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
        if self.gpus:
            return step.Job(layout, "llama1b", names, 11, self.device)
        return step.Job(layout, "tiny", names, 3, self.device)

    def run(self, work: Callable, job: Any, world: int | None = None) -> list[Any]:
        world = world or self.gpus or 2
        return fleet.run(work, job, world, self.seconds, self.device)


def output(command: list[str], seconds: float) -> str:
    """Runs a command, ends all its processes, and returns its output.

    Raises:
        fleet.Failed: it failed, or was interrupted after ``seconds``. The message ends with the output.
    """
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, start_new_session=True, cwd=ROOT
        )
        try:
            code: Any = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"none after {seconds:.0f} s"
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            # Its processes have its session, and may outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(0)
        text = file.read()
    if code:
        raise fleet.Failed(f"{' '.join(command)}: exit code {code}\n{text}")
    return text


def middle(call: Callable[[], object], device: str, calls: int = 10) -> float:
    """The median seconds of a call in five rows of calls, equally many on all ranks."""
    call()
    seconds = []
    for _ in range(5):
        dist.barrier()
        fleet.synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        fleet.synchronize(device)
        ended = time.perf_counter()
        seconds.append((ended - began) / calls)
    return statistics.median(seconds)


def environment(machine: Machine) -> Found:
    text = output([sys.executable, "-m", "torch.utils.collect_env"], machine.seconds)
    # Without warnings, and without the flags of the CPU.
    begin = text.index("PyTorch version")
    about, _, _ = text[begin:].partition("\nCPU:\n")
    texts = [about]
    if machine.device == "cuda":
        texts.append(f"NCCL {torch.cuda.nccl.version()}")
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
    cells, names = [], []
    flops = seconds_of_products = 0.0
    for shape, batch, times in rows:
        names = list(times)
        of_batch = batch * newton_schulz_flops(shape)
        height, width = shape
        title = f"{batch} x {height} x {width}"
        milliseconds = [f"{1e3 * seconds:.3f}" for seconds in times.values()]
        of_peak = f"{of_batch / times['quintic'] / peak:.0%}"
        cells.append([title, *milliseconds, of_peak])
        flops += of_batch
        seconds_of_products += times["products alone"]
    shown = table.render(["ms", *names, "quintic / peak"], cells)
    text = f"Plain bfloat16 products have {peak / 1e12:.1f} TFLOP/s."
    # The simulator counts passes over memory by themselves.
    utilization = flops / seconds_of_products / peak
    hardware = {"peak_flops": peak, "utilization": utilization}
    return Found([text, shown], rows, hardware)


def _newton_schulz(rank: int, world: int, job: Any) -> tuple[float, list]:
    device, counts, side = job
    coefficients = ns.DEFAULT_A, ns.DEFAULT_B, ns.DEFAULT_C
    square = torch.randn(side, side, device=device).bfloat16()
    peak = 2 * side**3 / middle(lambda: square @ square, device, 20)
    rows = []
    for shape, count in counts.items():
        largest = min(count, engine_view.batch_size(shape))
        for batch in sorted({1, largest}):
            stack = torch.randn(batch, *shape, device=device)
            matrices = stack.bfloat16().squeeze(0)
            times = {"products alone": middle(partial(_products, matrices), device)}
            for algorithm in ns.NS_ALGORITHMS:
                call = partial(
                    ns.newton_schulz,
                    matrices,
                    coefficients,
                    ns.DEFAULT_NS_STEPS,
                    ns.EPS,
                    algorithm,
                )
                times[algorithm] = middle(call, device)
            rows.append((shape, batch, times))
    return peak, rows


def _products(matrices: Tensor) -> None:
    if matrices.size(-2) > matrices.size(-1):
        matrices = matrices.mT
    for _ in range(ns.DEFAULT_NS_STEPS):
        gram = matrices @ matrices.mT
        square = gram @ gram
        square @ matrices


def steps(machine: Machine) -> Found:
    ours = [f"ours-1-{algorithm}" for algorithm in ns.NS_ALGORITHMS]
    ours += [f"{name}-fused" for name in ours]
    texts, values = [], {}
    for layout in ("shard", "ddp"):
        job = machine.job(*ours, *OTHERS, layout=layout)
        results = machine.run(step.work, job)
        texts.append(step.text(job, results))
        values[layout] = results[0]
    return Found(texts, values)


class Cost(NamedTuple):
    """Of one optimizer on one rank: median seconds until step() returns and until the device is done, and bytes."""

    returns: float
    is_done: float
    matrices: int
    state: int
    retained: int
    peak: int


COST_COLUMNS = (
    "rank 0",
    "step() returns, ms",
    "it is done, ms",
    "host per matrix, us",
    "state, MiB",
    "retained, MiB",
    "peak, MiB",
)


def costs(machine: Machine) -> Found:
    """Time of the host and memory in a step. A training loop waits until step() returns."""
    note = "Retained and peak: without parameters, gradients and state. A CPU does not count them."
    text, values = _table_of_costs(machine, machine.job(OURS, FUSED, *OTHERS))
    return Found([note, text], values)


def host(machine: Machine) -> Found:
    """The same with small matrices, for which the device has little work.

    Under FSDP2, the device's part of a step shrinks with the number of ranks, and the host's part does not.
    """
    texts, values = [], {}
    workloads = ("small112", "small560") if machine.gpus else ("tiny",)
    for workload in workloads:
        for layout in ("shard", "plain"):
            names = (OURS, FUSED, *OTHERS)
            if layout == "plain":
                names = (OURS, f"{OURS}-foreach", *OTHERS)
            job = machine.job(*names, layout=layout)._replace(workload=workload)
            text, found = _table_of_costs(machine, job)
            texts.append(f"{workload}, {layout}\n{text}")
            values[f"{workload}, {layout}"] = found
    return Found(texts, values)


def _table_of_costs(machine: Machine, job: step.Job) -> tuple[str, dict[str, Cost]]:
    found = machine.run(_costs, job)[0]
    rows = []
    for name, cost in found.items():
        per_matrix = cost.returns / cost.matrices
        cells = [f"{1e3 * cost.returns:.2f}", f"{1e3 * cost.is_done:.2f}"]
        cells.append(f"{1e6 * per_matrix:.0f}")
        for nbytes in (cost.state, cost.retained, cost.peak):
            cells.append(f"{nbytes / 2**20:.1f}")
        rows.append([name, *cells])
    return table.render(COST_COLUMNS, rows), found


def _costs(rank: int, world: int, job: step.Job) -> dict[str, Cost]:
    if job.layout == "plain":
        laid = lay_plain(job.workload, job.device)
    else:
        laid = lay(job.layout, job.workload, world, job.device)
    # The workspace of the library of products is not the optimizer's.
    square = torch.randn(64, 64, device=job.device)
    _products(square.bfloat16())
    found = {}
    for name in job.names:
        gc.collect()
        before = _allocated(job.device)
        optimizer = contestants.make(name, laid)
        returns, is_done = _host_and_device(optimizer, job)
        state = 0
        for of_param in optimizer.state.values():
            for tensor in of_param.values():
                state += local_of(tensor).nbytes
        kept = before + state if job.device != "cpu" else 0
        retained = _allocated(job.device) - kept
        peak = _allocated(job.device, "peak") - kept
        matrices = len(laid.params)
        found[name] = Cost(returns, is_done, matrices, state, retained, peak)
        del optimizer
    return found


def _host_and_device(optimizer: Any, job: step.Job) -> tuple[float, float]:
    """Median seconds until step() returns, and until the device is done. Memory counters begin with the last step."""
    returns, is_done = [], []
    for _ in range(WARM + job.reps):
        if job.device != "cpu":
            torch.accelerator.reset_peak_memory_stats()
        dist.barrier()
        fleet.synchronize(job.device)
        began = time.perf_counter()
        optimizer.step()
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


def waits(machine: Machine) -> Found:
    """Three steps in which the host must not wait for the device."""
    machine.run(_waits, machine.job(OURS))
    if machine.device == "cuda":
        return Found(["No operation waited."])
    return Found(["Only CUDA reports waits. The steps ran."])


def _waits(rank: int, world: int, job: step.Job) -> None:
    laid = lay(job.layout, job.workload, world, job.device)
    muon = contestants.make(job.names[0], laid)
    for _ in range(WARM):
        muon.step()
    fleet.synchronize(job.device)
    if job.device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        muon.step()
    if job.device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    muon.synchronize()


def training(machine: Machine) -> Found:
    """The share of the optimizers' step in a training step."""
    size, repetitions = (model.BILLION, 3) if machine.gpus else (model.TINY, 1)
    job = size, (OURS, FUSED, *OTHERS), machine.device, repetitions
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
    """All-to-alls of several sizes, and those of a step."""
    if machine.gpus == 1:
        raise NotRun("It needs two GPUs: NCCL takes one rank per GPU.")
    powers = range(10, 31 if machine.gpus else 21, 5)
    sizes = [2**power for power in powers]
    ranks = machine.run(_exchange, (machine.job(OURS), sizes))
    rows, found = [], {}
    for name in ranks[0]:
        nbytes, seconds = max(rank[name] for rank in ranks)
        found[name] = nbytes, seconds
        rows.append([name, f"{1e3 * seconds:.3f}", f"{nbytes / seconds / 1e9:.2f}"])
    _, smallest_seconds = found[f"{sizes[0]} bytes"]
    most_bytes, largest_seconds = found[f"{sizes[-1]} bytes"]
    hardware = {
        "intra_bandwidth": most_bytes / largest_seconds,
        "intra_latency": smallest_seconds / (len(ranks) - 1),
        "gpus_per_node": len(ranks),
    }
    text = table.render(["all-to-all, busiest rank", "ms", "GB/s sent"], rows)
    return Found([text], found, hardware)


def _exchange(rank: int, world: int, job: Any) -> dict[str, tuple[int, float]]:
    """The bytes that this rank sends to others, and seconds."""
    job, sizes = job
    laid = lay(job.layout, job.workload, world, job.device)
    calls = engine_view.all_to_alls(contestants.make(job.names[0], laid))
    found = {}
    for size in sizes:
        send = torch.ones(size // world * world, dtype=torch.uint8, device=job.device)
        all_to_all = partial(dist.all_to_all_single, torch.empty_like(send), send)
        sent = send.nbytes * (world - 1) // world
        found[f"{size} bytes"] = sent, middle(all_to_all, job.device)

    def step_exchanges() -> None:
        for call in calls:
            dist.all_to_all_single(*call)

    sent = 0
    for _, source, _, splits, group in calls:
        sent += traffic.all_to_all(source, splits, group)
    found["those of a step"] = sent, middle(step_exchanges, job.device)
    return found


def tests(machine: Machine) -> Found:
    """The classes for GPUs. Interrupted by the time limit, pytest prints the outcomes so far, and where it was."""
    missing = []
    for name in ("pytest", "expecttest", "numpy"):
        if find_spec(name) is None:
            missing.append(name)
    if missing:
        raise NotRun(f"{sys.executable} has no {', '.join(missing)}.")
    paths = [*ROOT.glob("test/optim/*.py"), *ROOT.glob("test/distributed/optim/*.py")]
    chosen = []
    for path in sorted(paths):
        if "GPU" in path.read_text():
            chosen.append(str(path))
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
    costs: 60,
    host: 120,
    waits: 30,
    training: 150,
    exchange: 50,
    tests: 200,
}

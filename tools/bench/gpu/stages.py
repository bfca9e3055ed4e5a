"""The stages. Each measures one thing within a time limit.

Functions with ``rank`` and ``world`` run on every rank. Times are the host's, from one moment at which the
device is idle to another.
"""

import contextlib
import gc
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import _newton_schulz as ns, Muon
from torch.optim._muon_engine.schedule.owners import newton_schulz_flops
from tools.bench.models import MODELS

from .. import contestants, engine_view, fleet, step, table, traffic
from ..layouts import Laid, lay, lay_plain, local_of
from . import training as model


ROOT = Path(__file__).parents[3]
OURS, FUSED = "ours-1-quintic", "ours-1-gram-fused"
OTHERS = "stock", "adamw", "fused"
TEST_LIMIT = 90  # seconds of one test
WARM = 3  # steps: the first makes all state, and libraries choose their kernels


class NotRun(Exception):
    """This machine cannot run a stage. The message says why."""


class CutOff(Exception):
    """A stage ran out of time. The page keeps what it told."""


class Found(NamedTuple):
    """Texts for the page, values for programs, and values of ``Hardware`` for the simulator."""

    texts: list[str]
    values: dict[str, Any]
    hardware: dict[str, float] = {}


class Machine(NamedTuple):
    """The argument of a stage. Without an accelerator, ``gpus`` is 0 and there are two ranks."""

    device: str
    gpus: int
    folder: Path
    ends: float  # of time.monotonic()
    # Puts on the page what a stage has found so far.
    tell: Callable[[Found], None] = lambda found: None

    @property
    def seconds(self) -> float:
        return self.ends - time.monotonic()

    def job(self, *names: str, layout: str = "shard") -> step.Job:
        if self.gpus:
            return step.Job(layout, "llama1b", names, 11, self.device)
        return step.Job(layout, "tiny", names, 3, self.device)

    @property
    def workloads(self) -> tuple[str, ...]:
        """Many small matrices, whose steps wait for the host."""
        return ("small112", "small560") if self.gpus else ("tiny",)

    def run(self, work: Callable, job: Any, world: int | None = None) -> list[Any]:
        world = world or self.gpus or 2
        return fleet.run(work, job, world, self.seconds, self.device)


@contextlib.contextmanager
def started(command: list[str], file: Any, **variables: str) -> Iterator[Any]:
    """A process that writes into ``file``. In the end, it and those that it started are killed."""
    process = subprocess.Popen(
        command,
        env=os.environ | variables,
        stdout=file,
        stderr=file,
        start_new_session=True,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def output(command: list[str], seconds: float) -> str:
    """Runs a command, ends all its processes, and returns its output.

    Raises:
        fleet.Failed: it failed, or did not end. The message ends with the output.
    """
    with tempfile.TemporaryFile("w+") as file:
        with started(command, file) as process:
            try:
                code: Any = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = f"none after {seconds:.0f} s"
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
            links = output(["nvidia-smi", "topo", "-m"], machine.seconds)
            # Without the codes that underline on a terminal.
            texts.append(re.sub(r"\x1b\[[0-9;]*m", "", links))
    return Found(texts, {})


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
    cells, seconds, of_products, names = [], {}, {}, []
    for shape, batch, times in rows:
        names = list(times)
        quintic = times["quintic"]
        of_peak = batch * newton_schulz_flops(shape) / quintic / peak
        height, width = shape
        milliseconds = [f"{1e3 * time:.3f}" for time in times.values()]
        title = f"{batch} x {height} x {width}"
        cells.append([title, *milliseconds, f"{of_peak:.0%}"])
        # A step takes the largest batches, which come last.
        seconds[shape] = counts[shape] * quintic / batch
        of_products[shape] = counts[shape] * times["products alone"] / batch
    flops = sum(counts[shape] * newton_schulz_flops(shape) for shape in seconds)
    used = flops / sum(seconds.values()) / peak
    head = ["ms", *names, "quintic / peak"]
    rate = f"{peak / 1e12:.1f} TFLOP/s"
    text = f"Plain bfloat16 products have {rate}, all these matrices {used:.0%} of it."
    # The simulator counts passes over memory by themselves.
    of_peak = flops / sum(of_products.values()) / peak
    hardware = {"peak_flops": peak, "utilization": of_peak}
    return Found([text, table.render(head, cells)], {"rows": rows}, hardware)


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
    fused = [f"{name}-fused" for name in ours]
    ours += fused
    texts, values = [], {}
    for layout in ("shard", "ddp"):
        job = machine.job(*ours, *OTHERS, layout=layout)
        results = machine.run(step.work, job)
        texts.append(step.text(job, results))
        medians = {}
        for name, times in results[0].items():
            medians[name] = statistics.median(times)
        values[layout] = medians
    return Found(texts, values)


class Cost(NamedTuple):
    """Of one optimizer on one rank: median seconds until step() returns and until the device is done, and bytes."""

    returns: float
    is_done: float
    matrices: int
    state: int
    retained: int
    peak: int


def costs(machine: Machine) -> Found:
    """Time of the host and memory in a step. A training loop waits until step() returns."""
    job = machine.job(OURS, FUSED, *OTHERS)
    found, described = machine.run(_costs, job)[0]
    rows = []
    for name, cost in found.items():
        per_matrix = cost.returns / cost.matrices
        rows.append(
            [
                name,
                f"{1e3 * cost.returns:.2f}",
                f"{1e3 * cost.is_done:.2f}",
                f"{1e6 * per_matrix:.0f}",
                _mebibytes(cost.state),
                _mebibytes(cost.retained),
                _mebibytes(cost.peak),
            ]
        )
    head = [
        "rank 0",
        "step() returns, ms",
        "it is done, ms",
        "host per matrix, us",
        "state, MiB",
        "retained, MiB",
        "peak, MiB",
    ]
    note = "Retained and peak: without parameters, gradients and state. A CPU does not count them."
    return Found([note, table.render(head, rows), described], found)


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


def _costs(rank: int, world: int, job: step.Job) -> tuple[dict[str, Cost], str]:
    laid = lay(job.layout, job.workload, world, job.device)
    # The workspace of the library of products is not the optimizer's.
    square = torch.randn(64, 64, device=job.device)
    _products(square.bfloat16())
    found, described = {}, ""
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
        described = described or optimizer.describe()
        del optimizer
    return found, described


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


def host(machine: Machine) -> Found:
    """Time of the host with small matrices, for which the device has little work.

    Under FSDP2, the device's part of a step shrinks with the number of ranks, and the host's part does not.
    """
    texts, values = [], {}
    for workload in machine.workloads:
        job = machine.job()._replace(workload=workload)
        found = machine.run(_host, job)[0]
        matrices = found.pop("matrices")
        rows = []
        for layout, of_layout in found.items():
            for name, (returns, is_done) in of_layout.items():
                times = f"{1e3 * returns:.2f}", f"{1e3 * is_done:.2f}"
                per_matrix = f"{1e6 * returns / matrices:.0f}"
                rows.append([f"{name}, {layout}", *times, per_matrix])
        head = [f"{matrices} matrices, rank 0", "step() returns, ms", "it is done, ms"]
        texts.append(table.render([*head, "host per matrix, us"], rows))
        values[workload] = {**found, "matrices": matrices}
        machine.tell(Found(texts, values))
    return Found(texts, values)


def _host(rank: int, world: int, job: step.Job) -> dict[str, Any]:
    fsdp2 = lay(job.layout, job.workload, world, job.device)
    found: dict[str, Any] = {"matrices": len(fsdp2.params)}
    found["FSDP2"] = _times_of((OURS, FUSED, *OTHERS), fsdp2, job)
    plain = lay_plain(job.workload, job.device)
    names = OURS, f"{OURS}-foreach", *OTHERS
    found["plain tensors, no config"] = _times_of(names, plain, job)
    return found


def _times_of(
    names: Iterable[str], laid: Laid, job: step.Job
) -> dict[str, tuple[float, float]]:
    """As :func:`_host_and_device`, by implementation."""
    times = {}
    for name in names:
        optimizer = contestants.make(name, laid)
        times[name] = _host_and_device(optimizer, job)
    return times


def waits(machine: Machine) -> Found:
    """Three steps in which the host must not wait for the device."""
    machine.run(_waits, machine.job(OURS))
    watched = machine.device == "cuda"
    text = "Only CUDA reports waits. The steps ran."
    if watched:
        text = "No operation waited."
    return Found([text], {"watched": watched})


def _waits(rank: int, world: int, job: step.Job) -> None:
    muon = _warm(job, world)
    if job.device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        muon.step()
    if job.device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    muon.synchronize()


def _warm(job: step.Job, world: int) -> Muon:
    laid = lay(job.layout, job.workload, world, job.device)
    muon = contestants.make(job.names[0], laid)
    for _ in range(WARM):
        muon.step()
    fleet.synchronize(job.device)
    return muon


def training(machine: Machine) -> Found:
    """What the optimizers' step is of a training step."""
    size, repetitions = (model.BILLION, 3) if machine.gpus else (model.TINY, 1)
    job = size, (OURS, FUSED, "stock", "fused"), machine.device, repetitions
    found = machine.run(model.train, job)[0]
    rows = []
    for name, by_tokens in found.items():
        for tokens, (of_training, of_optimizers) in by_tokens.items():
            cells = [name, f"{tokens}", f"{1e3 * of_training:.1f}"]
            cells += [
                f"{1e3 * of_optimizers:.1f}",
                f"{of_optimizers / of_training:.1%}",
            ]
            rows.append(cells)
    head = [
        "optimizers",
        "tokens a rank",
        "training step, ms",
        "optimizers, ms",
        "share",
    ]
    note = (
        "Forward and backward in bfloat16, with compiled blocks. fused is AdamW for all parameters; the others have it for those "
        "that are no matrices."
    )
    return Found([table.render(head, rows), note], found)


def exchange(machine: Machine) -> Found:
    """In the ring, each rank sends to one neighbour and receives from the other: the link."""
    if machine.gpus == 1:
        raise NotRun("It needs two GPUs: NCCL takes one rank per GPU.")
    powers = range(10, 31 if machine.gpus else 21, 5)
    sizes = [2**power for power in powers]
    ranks = machine.run(_exchange, (machine.job(OURS), sizes))
    found, rates = {}, {}
    for name in ranks[0]:
        nbytes, seconds = max(rank[name] for rank in ranks)
        found[name] = nbytes, seconds
        rates[name] = nbytes / seconds
    link = rates[f"ring of {sizes[-1]} bytes"]
    rows = []
    for name, (_, seconds) in found.items():
        rate = rates[name]
        cells = f"{1e3 * seconds:.3f}", f"{rate / 1e9:.2f}", f"{rate / link:.0%}"
        rows.append([name, *cells])
    _, smallest_seconds = found[f"all-to-all of {sizes[0]} bytes"]
    peers = len(ranks) - 1
    hardware = {
        "intra_bandwidth": rates[f"all-to-all of {sizes[-1]} bytes"],
        "intra_latency": smallest_seconds / peers,
        "gpus_per_node": len(ranks),
    }
    text = table.render(["busiest rank", "ms", "GB/s sent", "of the link"], rows)
    return Found([text], found, hardware)


def _exchange(rank: int, world: int, job: Any) -> dict[str, tuple[int, float]]:
    """The bytes that this rank sends, and seconds."""
    job, sizes = job
    laid = lay(job.layout, job.workload, world, job.device)
    calls = engine_view.all_to_alls(contestants.make(job.names[0], laid))
    found = {}
    for size in sizes:
        part = torch.ones(size // world, dtype=torch.uint8, device=job.device)
        send = part.repeat(world)
        receive = torch.empty_like(send)
        ring = partial(_send_along_ring, send, receive)
        found[f"ring of {size} bytes"] = send.nbytes, middle(ring, job.device)
        all_to_all = partial(dist.all_to_all_single, receive, send)
        sent = send.nbytes * (world - 1) // world
        found[f"all-to-all of {size} bytes"] = sent, middle(all_to_all, job.device)

    def step_exchanges() -> None:
        for call in calls:
            dist.all_to_all_single(*call)

    sent = 0
    for _, source, _, splits, group in calls:
        sent += traffic.all_to_all(source, splits, group)
    found["those of a step"] = sent, middle(step_exchanges, job.device)
    return found


def _send_along_ring(send: Tensor, receive: Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    to_next = dist.P2POp(dist.isend, send, (rank + 1) % world)
    from_previous = dist.P2POp(dist.irecv, receive, (rank - 1) % world)
    for work in dist.batch_isend_irecv([to_next, from_previous]):
        work.wait()


def tests(machine: Machine) -> Found:
    """The classes for GPUs. The page has each outcome when the test ends."""
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
    return run_tests(machine, ["-k", "OnGPU or OnOneGPU or OnSharedGPU", *chosen])


def run_tests(machine: Machine, words: list[str], limit: int = TEST_LIMIT) -> Found:
    """Runs pytest, and tells each outcome when the test ends.

    Args:
        limit: the seconds of one test. Those of its ranks are fewer, so that their traces are told.
    """
    path = machine.folder / "outcomes.jsonl"
    path.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tools.bench.gpu.outcomes",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        *words,
    ]
    variables = {"MUON_TEST_OUTCOMES": str(path), "MUON_TEST_SECONDS": str(limit)}
    lines: list[dict[str, Any]] = []
    found, code = Found([], {}), None
    with tempfile.TemporaryFile("w+") as file:
        with started(command, file, **variables) as process:
            while code is None and machine.seconds > 0:
                code = process.poll()
                new = _new_outcomes(path, len(lines))
                if new:
                    _print_outcomes(new)
                    lines += new
                    found = outcomes(lines)
                    machine.tell(found)
                time.sleep(0.2)
        file.seek(0)
        text = file.read()
    path.unlink(missing_ok=True)
    if code is None:
        raise CutOff(f"The time is over. The end of pytest's output:\n{text[-2000:]}")
    counts = Counter(outcome for outcome, _ in found.values.values())
    if code or counts["failed"]:
        raise fleet.Failed(f"{text[-1000:]}\npytest ended with exit code {code}")
    if not counts["passed"]:
        raise NotRun("No test ran.")
    return found


def _new_outcomes(path: Path, known: int) -> list[dict[str, Any]]:
    """The whole lines of the file after the ``known`` ones."""
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    return [json.loads(line) for line in lines[known:]]


def _print_outcomes(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if line["outcome"] != "running":
            print("  {outcome}, {seconds:.1f} s: {test}".format(**line))
        if line["outcome"] == "failed":
            print(line["text"])
    sys.stdout.flush()


def outcomes(lines: list[dict[str, Any]]) -> Found:
    """The last outcome of each test in a table, then the texts of failures."""
    last: dict[str, dict[str, Any]] = {}
    for line in lines:
        test = line["test"]
        # A test may pass, and fail when it is taken down.
        if test not in last or last[test]["outcome"] != "failed":
            last[test] = line
    counts = Counter(line["outcome"] for line in last.values())
    words = [f"{count} {outcome}" for outcome, count in sorted(counts.items())]
    rows, failures, values = [], [], {}
    for test, line in last.items():
        outcome, seconds, text = line["outcome"], line["seconds"], line["text"]
        values[test] = outcome, seconds
        state = outcome
        if outcome == "skipped":
            reason = text.removeprefix("Skipped: ")
            state = f"skipped ({reason})"
        if outcome == "failed":
            failures.append(f"{test}\n{text}")
        _, _, name = test.partition("::")
        rows.append([name, state, f"{seconds:.1f}"])
    shown = table.render(["", "outcome", "s"], rows)
    return Found([", ".join(words), shown, *failures], values)


# Each with its limit in seconds. Together: less than 15 minutes.
STAGES: dict[Callable[[Machine], Found], float] = {
    environment: 30,
    newton_schulz: 70,
    steps: 90,
    costs: 50,
    host: 70,
    waits: 30,
    training: 150,
    exchange: 50,
    tests: 200,
}

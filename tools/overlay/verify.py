"""Show by numbers that distributed Muon is Muon.

Trains the example's GPT on one process and on four, on the same batches, and prints
what differs: the losses, the parameters, who orthogonalized how many matrices, the bytes
sent, the time. Then both take a few steps with identical gradients, after which the
parameters and the momentum must be equal to the last bit.

The trained parameters are far from equal, and that is not the optimizer's doing. The
processes' gradients are added up in another order, and Newton-Schulz lifts the rounding
of a gradient's small directions to the size of its large ones. One process that adds up
its own gradients in four slices ends as far from itself: 37 % of the way trained, where
four processes end 43 % away (80 steps, torch 2.13, on a CPU).

Only the standard library is used here: all that needs torch runs in
``verify_worker.py``, by the interpreter of the environment that has it.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from .errors import WrongTarget
from .repo import ROOT


WORKER = pathlib.Path(__file__).with_name("verify_worker.py")
GRACE_SECONDS = 5
TAIL_LINES = 20
# The worker's exit code for options that neither it nor the example knows.
USAGE = 64


class Failed(Exception):
    """A run came to no result."""


@dataclasses.dataclass(frozen=True)
class Fleet:
    """The processes of one run, and what they leave behind."""

    folder: pathlib.Path
    size: int

    def figures(self) -> list[dict[str, Any]]:
        """What each process wrote, by rank."""
        return [
            json.loads((self.folder / f"rank{rank}.json").read_text())
            for rank in range(self.size)
        ]


class Progress:
    """A bar on a terminal; elsewhere a line for every tenth of the work."""

    def __init__(self, total: int, plain: bool) -> None:
        self.total = total
        self.bar = (
            not plain and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        )
        self.began = time.monotonic()
        self.tenth = -1

    def show(self, done: int, what: str) -> None:
        seconds = time.monotonic() - self.began
        if self.bar:
            width = max(10, min(40, shutil.get_terminal_size().columns - 50))
            filled = width * done // self.total
            line = f"[{'#' * filled}{'.' * (width - filled)}] {100 * done // self.total:3d} %  {what}"
            print(f"\r{line}  {seconds:.0f} s\x1b[K", end="", flush=True)
        elif (tenth := 10 * done // self.total) > self.tenth:
            self.tenth = tenth
            print(
                f"{100 * done // self.total:3d} %  {what}  {seconds:.0f} s", flush=True
            )

    def close(self) -> None:
        if self.bar:
            print("\r\x1b[K", end="", flush=True)


def run(
    python: pathlib.Path, args: argparse.Namespace, example_arguments: list[str]
) -> int:
    """Train twice with ``python``, report, and write ``verify.json`` and ``losses.png`` into ``args.out``.

    ``args`` is what ``options`` parsed. Returns 0 when everything holds and 1 when something does not.
    """
    out = args.out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongTarget(f"{out} cannot be a folder: {error.strerror}") from None
    for stale in ("verify.json", "losses.png"):
        (out / stale).unlink(missing_ok=True)
    progress = Progress(2 * (args.steps + args.exact_steps) + 1, args.plain)
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="muon-verify-") as scratch:
            fleets = []
            for size, what in (
                (1, "one process"),
                (args.processes, f"{args.processes} processes"),
            ):
                fleet = Fleet(pathlib.Path(scratch, f"{size}"), size)
                done = len(fleets) * (args.steps + args.exact_steps)
                train(
                    python,
                    fleet,
                    args,
                    example_arguments,
                    lambda steps: progress.show(done + steps, what),
                )
                fleets.append(fleet)
            comparison = compare(python, fleets, out, args)
            progress.show(progress.total, "compared")
            figures = gather(fleets, comparison)
    except Failed as error:
        progress.close()
        print(f"verify: {error}", file=sys.stderr)
        return 1
    except BaseException:
        progress.close()
        raise
    progress.close()
    figures["seconds"] = time.monotonic() - began
    figures["problems"] = problems(figures)
    (out / "verify.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(report(figures))
    picture = out / "losses.png"
    print(picture if picture.exists() else "no picture: there is no matplotlib")
    print(out / "verify.json", flush=True)
    for problem in figures["problems"]:
        print(f"verify: {problem}", file=sys.stderr)
    return 1 if figures["problems"] else 0


def options() -> argparse.ArgumentParser:
    """Our own options; what else is given goes on to ``examples/train_gpt.py``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=ROOT / "out",
        metavar="DIR",
        help="where the table and the picture of the loss curves go (default: out)",
    )
    parser.add_argument(
        "--plain", action="store_true", help="no live progress, as if not a terminal"
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=80,
        help="training steps (default: %(default)s)",
    )
    parser.add_argument(
        "--exact-steps",
        type=positive,
        default=5,
        help="steps with identical gradients (default: %(default)s)",
    )
    parser.add_argument(
        "--processes",
        type=several,
        default=4,
        help="of the distributed run (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=600,
        help="seconds that either run may take (default: %(default)s)",
    )
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def several(text: str) -> int:
    value = positive(text)
    if value < 2:
        raise argparse.ArgumentTypeError(
            "one process is what the others are compared with; give at least 2"
        )
    return value


def train(
    python: pathlib.Path,
    fleet: Fleet,
    args: argparse.Namespace,
    example_arguments: list[str],
    show: Any,
) -> None:
    """Run all processes of one training to their end, or none: the first that fails ends the others."""
    fleet.folder.mkdir()
    common = ["train", *example_arguments]
    common += ["--folder", str(fleet.folder), "--processes", str(fleet.size)]
    common += ["--steps", str(args.steps), "--exact-steps", str(args.exact_steps)]
    # So that the first run says what only the second one would trip over.
    common += ["--slices", str(args.processes)]
    commands = [[*common, "--rank", str(rank)] for rank in range(fleet.size)]
    steps = fleet.folder / "log"
    deadline = time.monotonic() + args.timeout
    show(0)
    with started(python, commands, fleet.folder) as processes:
        while True:
            codes = [process.poll() for process in processes]
            for rank, code in enumerate(codes):
                if code == USAGE:
                    words = tail(fleet.folder, rank).strip()
                    raise WrongTarget(f"{words}; see `setup_overlay.py verify --help`")
                if code:
                    raise Failed(
                        f"process {rank} of {fleet.size} {ending(code)}:\n{tail(fleet.folder, rank)}"
                    )
            if all(code == 0 for code in codes):
                return
            if time.monotonic() > deadline:
                raise Failed(
                    f"{fleet.size} process(es) took more than {args.timeout} s; see --timeout and --steps"
                )
            if steps.exists():
                show(steps.read_bytes().count(b"\n"))
            time.sleep(0.1)


def compare(
    python: pathlib.Path,
    fleets: list[Fleet],
    out: pathlib.Path,
    args: argparse.Namespace,
) -> dict[str, Any]:
    one, many = (fleet.folder for fleet in fleets)
    result = many / "comparison.json"
    command = [
        "compare",
        "--one",
        str(one),
        "--many",
        str(many),
        "--processes",
        str(args.processes),
    ]
    command += ["--result", str(result), "--picture", str(out / "losses.png")]
    with started(python, [command], many) as (process,):
        try:
            code = process.wait(args.timeout)
        except subprocess.TimeoutExpired:
            raise Failed(f"the comparison took more than {args.timeout} s") from None
        if code:
            raise Failed(f"the comparison {ending(code)}:\n{tail(many, 0)}")
    return json.loads(result.read_text())


@contextlib.contextmanager
def started(
    python: pathlib.Path, commands: list[list[str]], folder: pathlib.Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a worker for each command; none of them is left when this ends, however it ends.

    Each holds the reading end of a pipe and leaves when the pipe closes, so that not even a killed ``verify`` leaves
    processes behind.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, command in enumerate(commands):
            with open(folder / f"output{rank}", "wb") as output:
                process = subprocess.Popen(
                    [str(python), "-u", str(WORKER), *command],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment(),
                    # Ctrl-C on the terminal is for us; we end the workers ourselves.
                    start_new_session=True,
                )
            processes.append(process)
        yield processes
    finally:
        end(processes)


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()


def environment() -> dict[str, str]:
    """One thread a process, since the number of threads changes rounding, and the CPU, which every machine has."""
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    # gloo otherwise looks up the machine's own name, which not every container can resolve.
    loopback = next(
        (name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None
    )
    if loopback is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return environ


def ending(code: int) -> str:
    return (
        f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
    )


def tail(folder: pathlib.Path, rank: int) -> str:
    lines = (folder / f"output{rank}").read_text(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:])


def gather(fleets: list[Fleet], comparison: dict[str, Any]) -> dict[str, Any]:
    """All figures in one dictionary, which is also what ``verify.json`` holds."""
    one, many = (fleet.figures() for fleet in fleets)
    losses = [ranks[0]["training"]["losses"] for ranks in (one, many)]
    return {
        "processes": len(many),
        "one": one[0],
        "many": many,
        "largest_loss_difference": max(abs(a - b) for a, b in zip(*losses)),
        "parameter_difference": comparison["parameters"],
        "differing": comparison["differing"],
    }


def problems(figures: dict[str, Any]) -> list[str]:
    """What does not hold, in words."""
    found = []
    one, many = [figures["one"]], figures["many"]
    for ranks in (one, many):
        who = "one process" if len(ranks) == 1 else f"{len(ranks)} processes"
        first, last = loss_ends(ranks[0]["training"]["losses"])
        if not last < first:  # also when it is NaN
            found.append(
                f"{who}: the loss did not fall: {first:.4f} at the start, {last:.4f} at the end"
            )
        for part, what in (("training", "training"), ("exact", "identical gradients")):
            calls = sum(rank[part]["newton_schulz_calls"] for rank in ranks)
            expected = (
                ranks[0]["training"]["matrices"] * ranks[0][part]["optimizer_steps"]
            )
            if calls != expected:
                found.append(
                    f"{who}, {what}: {calls} Newton-Schulz calls, not one a matrix and step, {expected}"
                )
    uncounted = {
        name for rank in many for name in rank["training"]["collectives_per_step"]
    } - {"all_to_all_single"}
    if uncounted:
        found.append(
            f"the step uses collectives whose bytes are not counted: {', '.join(sorted(uncounted))}"
        )
    for rank, figure in enumerate(rank["training"] for rank in many):
        sent, needed = figure["bytes_sent_per_step"], figure["bytes_needed_per_step"]
        # With each piece goes a flag of one bf16 element: whether there was a gradient.
        if not needed <= sent <= needed + 2 * figure["pieces_sent_per_step"]:
            found.append(
                f"rank {rank} sends {sent:.0f} bytes a step where {needed} are needed"
            )
    # Before the first update nothing but the sharded forward pass differs.
    starts = [ranks[0]["training"]["losses"][0] for ranks in (one, many)]
    if not abs(starts[0] - starts[1]) < 1e-3:
        found.append(
            f"the runs do not start alike: loss {starts[0]:.6f} and {starts[1]:.6f} before the first update"
        )
    if figures["differing"] is not None:
        found.append(
            f"not bitwise equal with identical gradients: {figures['differing']}"
        )
    return found


def loss_ends(losses: list[float]) -> tuple[float, float]:
    """The first loss, and the mean of the last tenth: a single batch's loss is noisy."""
    last = losses[-max(1, len(losses) // 10) :]
    return losses[0], sum(last) / len(last)


def report(figures: dict[str, Any]) -> str:
    one, many = figures["one"], figures["many"]
    here, there = one["training"], many[0]["training"]
    (here_first, here_last), (there_first, there_last) = (
        loss_ends(here["losses"]),
        loss_ends(there["losses"]),
    )
    ranks = [rank["training"] for rank in many]
    collectives = (
        ", ".join(
            f"{calls:g} {name}" for name, calls in there["collectives_per_step"].items()
        )
        or "none"
    )
    sent, needed = (
        [rank[key] for rank in ranks]
        for key in ("bytes_sent_per_step", "bytes_needed_per_step")
    )
    apart = figures["parameter_difference"]
    step = "seconds_per_optimizer_step"
    rows = [
        ("", "one process", f"{len(many)} processes"),
        ("loss, first step", f"{here_first:.4f}", f"{there_first:.4f}"),
        ("loss, mean of the last tenth", f"{here_last:.4f}", f"{there_last:.4f}"),
        (
            "loss on held-out text",
            f"{here['held_out_loss']:.4f}",
            f"{there['held_out_loss']:.4f}",
        ),
        ("seconds", f"{here['seconds']:.1f}", f"{there['seconds']:.1f}"),
        (
            "seconds a step",
            f"{here['seconds_per_step']:.3f}",
            f"{there['seconds_per_step']:.3f}",
        ),
        ("  of which Muon.step", f"{here[step]:.3f}", f"{there[step]:.3f}"),
        (
            "Newton-Schulz calls",
            f"{here['newton_schulz_calls']}",
            f"{sum(r['newton_schulz_calls'] for r in ranks)}",
        ),
    ]
    first, second, third = (
        max(len(row[column]) for row in rows) for column in range(3)
    )
    lines = [
        "",
        f"GPT of {here['parameters']:,} parameters, {here['matrices']} matrices by Muon, {len(here['losses'])} steps",
        "",
        *(
            f"  {name:<{first}}  {left:>{second}}  {right:>{third}}".rstrip()
            for name, left, right in rows
        ),
        "",
        f"Each of the {len(many)} processes (ranks 0 to {len(many) - 1})",
        f"  Newton-Schulz calls       {' + '.join(str(r['newton_schulz_calls']) for r in ranks)}",
        f"  KiB sent by a Muon step   {' + '.join(kib(value) for value in sent)} = {kib(sum(sent))}",
        f"  cannot be less than       {' + '.join(kib(value) for value in needed)} = {kib(sum(needed))}",
        f"  collectives a Muon step   {collectives}",
        "",
        "Training: the processes add gradients up in another order, and Newton-Schulz in bf16 amplifies rounding",
        f"  largest difference of loss, any step        {figures['largest_loss_difference']:.2g}",
        f"  largest difference of a parameter, at end   {apart['largest']:.2g} ({apart['largest_in']};"
        f" training moved parameters by up to {apart['largest_move']:.2g})",
        f"  distance of all parameters at the end       {100 * apart['norm_ratio']:.1f} % of the distance trained",
        "",
        f"Identical gradients: parameters and momentum after {one['exact']['optimizer_steps']} steps",
    ]
    if figures["differing"] is None:
        lines.append(
            f"  bitwise equal: yes ({here['matrices']} matrices, {one['exact']['optimizer_steps']} steps)"
        )
    else:
        lines.append(f"  bitwise equal: NO, {figures['differing']}")
    lines += ["", f"{figures['seconds']:.0f} s in all"]
    return "\n".join(lines)


def kib(value: float) -> str:
    return f"{value / 1024:.1f}"

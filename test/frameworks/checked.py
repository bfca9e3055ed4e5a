"""Runs a program on several processes, and compares each Muon step in it with stock Muon's.

    python test/frameworks/checked.py [--stand-in NAME] PROCESSES PROGRAM [ARGUMENTS]

PROGRAM is a file, or the name of a module. NAME is a function of stand_ins.py.

Before a step each parameter, gradient and momentum is gathered whole, and the Muon that the overlay
replaced makes the step on the wholes. Afterwards they must be equal, bit for bit. Each rank ends
with a line that says how many matrices it compared.
"""

import argparse
import importlib.util
import os
import runpy
import sys
import traceback
from pathlib import Path

import stand_ins
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


STOCK = Path(torch.__file__).parent / ".muon_overlay/original/optim/_muon.py"
OPTIONS = (
    "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps",
    "adjust_lr_fn",
)  # fmt: skip


def stock_muon():
    spec = importlib.util.spec_from_file_location("torch.optim._stock_muon", STOCK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Muon


class Check:
    """Compares the steps of all Muons that have a ``distributed_config``."""

    def __init__(self):
        self.stock = stock_muon()
        self.expected = []
        self.steps = self.matrices = 0

    def before(self, optimizer, args, kwargs):
        if not is_distributed(optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            # It may compute the gradients, so it is not left to the step.
            with torch.enable_grad():
                loss = closure()
            args, kwargs = (optimizer, lambda: loss), {}
        self.expected = []
        shapes = flat_shapes()
        for group in optimizer.param_groups:
            options = {name: group[name] for name in OPTIONS}
            for param in group["params"]:
                # A rank may hold no element of a matrix that FSDP1 cuts, and no gradient.
                if param.grad is None and id(param) not in shapes:
                    continue
                alone = torch.nn.Parameter(gather(param, shapes).clone())
                alone.grad = gather(param.grad, shapes, param)
                other = self.stock([alone], **options)
                momentum = optimizer.state.get(param, {}).get("momentum_buffer")
                if momentum is not None:
                    momentum = gather(momentum, shapes, param).clone()
                    other.state[alone]["momentum_buffer"] = momentum
                other.step()
                momentum = other.state[alone]["momentum_buffer"]
                self.expected.append((param, alone.detach(), momentum))
        return args, kwargs

    def after(self, optimizer, args, kwargs):
        if not is_distributed(optimizer):
            return
        shapes = flat_shapes()
        for param, value, momentum in self.expected:
            found = optimizer.state[param]["momentum_buffer"]
            if not torch.equal(gather(param, shapes), value):
                raise AssertionError(f"a parameter of {tuple(value.shape)} differs")
            if not torch.equal(gather(found, shapes, param), momentum):
                raise AssertionError(f"a momentum of {tuple(value.shape)} differs")
        self.matrices += len(self.expected)
        self.steps += 1


def is_distributed(optimizer):
    return getattr(optimizer, "_distributed_config", None) is not None


def gather(tensor, shapes, param=None):
    """The whole of a DTensor or of a slice of a flat parameter; a whole is one already."""
    if isinstance(tensor, DTensor):
        return tensor.detach().full_tensor()
    shape = shapes.get(id(tensor if param is None else param))
    if shape is None:
        return tensor.detach()
    slices = [None] * dist.get_world_size()
    dist.all_gather_object(slices, None if tensor is None else tensor.detach().clone())
    return torch.cat([s.flatten() for s in slices if s is not None]).view(shape)


def flat_shapes():
    """FSDP1's original parameters -> the shapes of the matrices of which they are slices."""
    return {
        id(param): shape
        for flat in FLAT
        for param, shape in zip(flat._params, flat._shapes)
    }


FLAT = []


def note_flat_parameters():
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    make = FlatParamHandle._init_flat_param_and_metadata

    def noted(self, *args, **kwargs):
        make(self, *args, **kwargs)
        if self.flat_param._params is not None:
            FLAT.append(self.flat_param)

    FlatParamHandle._init_flat_param_and_metadata = noted


def run(rank, program, arguments, stand_in):
    torch.set_num_threads(1)
    sys.argv = [program, *arguments]
    if stand_in is not None:
        getattr(stand_ins, stand_in)()
    note_flat_parameters()
    check = Check()
    register_optimizer_step_pre_hook(check.before)
    register_optimizer_step_post_hook(check.after)
    if program.endswith(".py"):
        sys.path[0] = os.path.dirname(program)
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    # In one piece: the other ranks write to the same pipe.
    line = f"rank {rank}: {check.matrices} matrices, {check.steps} steps\n"
    os.write(sys.__stdout__.fileno(), line.encode())


def main():
    """Forks the processes after torch is imported, which takes seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stand-in")
    parser.add_argument("processes", type=int)
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    children, pipes = [], []
    for rank in range(args.processes):
        reads, writes = os.pipe()
        if child := os.fork():
            children.append(child)
            pipes.append(writes)
            continue
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": args.processes}
        port = os.read(reads, 10).decode()
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        os.environ.update({k: str(v) for k, v in {**ranks, **address}.items()})
        os.environ["LOCAL_WORLD_SIZE"] = str(args.processes)
        if sys.platform == "linux":
            # gloo otherwise looks up the machine's own name, which not every container can.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        os.environ["TORCHELASTIC_RUN_ID"] = (
            "checked"  # by which Lightning knows torchrun
        )
        try:
            run(rank, args.program, args.arguments, args.stand_in)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    # Not before, since it has threads.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for pipe in pipes:
        os.write(pipe, str(store.port).encode())
    codes = [os.waitpid(child, 0)[1] for child in children]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs a program as one of several processes, and compares each Muon step in it with stock Muon's.

    torchrun --nproc-per-node 2 test/frameworks/checked.py PROGRAM [ARGUMENTS]

PROGRAM is a file, or the name of a module. STAND_IN in the environment names a function of stand_ins.py.

Before a step each parameter, gradient and momentum is gathered whole, and the Muon that the overlay
replaced makes the step on the wholes. Afterwards they must be equal, bit for bit. Each rank ends
with a line that says how many matrices it compared.
"""

import os
import runpy
import sys
from pathlib import Path

import stand_ins
import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.distributed._muon.common_config import parts_of
from torch.testing._internal.distributed._muon.common_stock import stock


RECIPES = Path(__file__).parents[2] / "examples" / "frameworks"
OPTIONS = (
    "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps",
    "adjust_lr_fn",
)  # fmt: skip


class Check:
    """Compares the steps of all Muons that have a ``distributed_config``."""

    def __init__(self):
        self.stock = stock().Muon
        self.expected = []
        self.steps = self.matrices = 0

    def before(self, optimizer, args, kwargs):
        if not is_distributed(optimizer):
            return
        self.expected = []
        for group in optimizer.param_groups:
            options = {name: group[name] for name in OPTIONS}
            for param in group["params"]:
                if param.grad is None:
                    continue
                momentum = optimizer.state.get(param, {}).get("momentum_buffer")
                given = [param, param.grad] + [momentum] * (momentum is not None)
                wholes = list(map(gather, given))
                expected = [self.step(options, *each) for each in cut(wholes, group)]
                self.expected.append((param, group, expected))

    def step(self, options, value, grad, momentum=None):
        """Parameter and momentum of one matrix after a step of stock Muon."""
        alone = torch.nn.Parameter(value.clone())
        alone.grad = grad
        other = self.stock([alone], **options)
        if momentum is not None:
            other.state[alone]["momentum_buffer"] = momentum.clone()
        other.step()
        return alone.detach(), other.state[alone]["momentum_buffer"]

    def after(self, optimizer, args, kwargs):
        if not is_distributed(optimizer):
            return
        for param, group, expected in self.expected:
            momentum = optimizer.state[param]["momentum_buffer"]
            wholes = gather(param), gather(momentum)
            for found, wanted in zip(cut(wholes, group), expected, strict=True):
                for which, a, b in zip(("parameter", "momentum"), found, wanted):
                    if not torch.equal(a, b):
                        raise AssertionError(f"a {which} of {tuple(b.shape)} differs")
            self.matrices += len(expected)
        self.steps += 1


def is_distributed(optimizer):
    return getattr(optimizer, "_distributed_config", None) is not None


def cut(tensors, group):
    """Each matrix of a parameter, in each of some whole tensors of its shape."""
    return zip(*(parts_of(t, group["split"], group["flatten"]) for t in tensors))


def gather(tensor):
    """The whole of a DTensor; other tensors are wholes."""
    whole = tensor.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


def main():
    program, *_ = sys.argv = sys.argv[1:]
    torch.set_num_threads(1)  # their number changes rounding
    sys.path.insert(0, str(RECIPES))
    if stand_in := os.environ.get("STAND_IN"):
        getattr(stand_ins, stand_in)()
    check = Check()
    register_optimizer_step_pre_hook(check.before)
    register_optimizer_step_post_hook(check.after)
    if program.endswith(".py"):
        sys.path.insert(0, os.path.dirname(program))
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    rank = os.environ["RANK"]
    print(f"\nrank {rank}: {check.matrices} matrices, {check.steps} steps")


if __name__ == "__main__":
    main()

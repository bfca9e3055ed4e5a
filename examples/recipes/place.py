"""Where a recipe runs: which one of how many processes this is, and on what device."""

import logging

import torch
from processes import Place


here: Place


def settle(place: Place) -> None:
    """Makes ``place`` that of this process."""
    global here
    here = place
    torch.set_num_threads(1)  # equal bits need equal sums
    # How it does without all-to-all on a CPU is no news here.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    if device().type == "cuda":
        torch.cuda.set_device(device())


def device() -> torch.device:
    """A GPU for each process, if there are as many."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= here.size:
        return torch.device("cuda", here.rank)
    return torch.device("cpu")


def backend() -> str:
    return "nccl" if device().type == "cuda" else "gloo"

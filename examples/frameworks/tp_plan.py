"""A Transformers model that brings its own tensor parallelism, ``tp_plan="auto"``.

torchrun --nproc-per-node 2 examples/frameworks/tp_plan.py
"""

import tempfile

import torch
import torch.distributed as dist
from tiny import llama, muon_and_adamw, train
from transformers import AutoModelForCausalLM


def main() -> None:
    # Instead of a model's name on the hub.
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        llama().save_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto")
    # All ranks of a tensor parallel group see the same tokens.
    train(model, muon_and_adamw(model, "tp"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

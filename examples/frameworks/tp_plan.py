"""A Transformers model that brings its own tensor parallelism, ``tp_plan="auto"``.

torchrun --nproc-per-node 2 examples/frameworks/tp_plan.py
"""

import tempfile

import torch
import torch.distributed as dist
from tiny import llama, muon_and_adamw
from transformers import AutoModelForCausalLM


def main() -> None:
    # Instead of a model's name on the hub.
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        llama().save_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto")
    optimizers = muon_and_adamw(model, "tp")

    # All ranks of a tensor parallel group see the same tokens.
    for tokens in torch.randint(64, (3, 4, 16), device=model.device):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

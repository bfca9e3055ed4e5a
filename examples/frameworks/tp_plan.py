"""A Transformers model that brings its own tensor parallelism, ``tp_plan="auto"``.

torchrun --nproc-per-node 2 examples/frameworks/tp_plan.py
"""

import tempfile

import torch
import torch.distributed as dist
from torch.optim import AdamW, Muon
from torch.optim.muon import partition_named_parameters
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def save_tiny_model(folder: str) -> None:
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    ).save_pretrained(folder)


def main() -> None:
    # In the place of a model's name on the hub.
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        save_tiny_model(name)
        model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto")

    matrices, others = partition_named_parameters(model)
    muon = Muon(matrices, lr=0.02, distributed_config="auto")
    adamw = AdamW(others, lr=3e-4)

    # All ranks of a tensor parallel group see the same tokens.
    for tokens in torch.randint(64, (3, 4, 16), device=model.device):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

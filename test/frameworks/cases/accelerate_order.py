"""Accelerate with FSDP1 or FSDP2, Muon built before or after the model is prepared.

With --ram, the model is loaded with or without ``cpu_ram_efficient_loading``.
"""

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.optim import AdamW, Muon, muon as api
from transformers import LlamaConfig, LlamaForCausalLM


# Odd ones, so that FSDP1 cuts within rows.
SIZES = {
    "vocab_size": 64,
    "hidden_size": 36,
    "intermediate_size": 77,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "tie_word_embeddings": False,
}


def split(model):
    hidden, _ = api.partition_parameters(model.model.layers)
    return hidden, [p for p in model.parameters() if not any(p is h for h in hidden)]


def local(param):
    return getattr(param.detach(), "_local_tensor", param.detach())


def made(fsdp, **options):
    """Accelerate with that FSDP, and a model of odd sizes."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=fsdp,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        **options,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    return accelerator, LlamaForCausalLM(LlamaConfig(**SIZES))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", type=int, required=True)
    parser.add_argument("--order", choices=["before", "after"], required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--ram", type=int)
    args = parser.parse_args()
    options = {"use_orig_params": True} if args.fsdp == 1 else {}
    if args.ram is not None:
        options["cpu_ram_efficient_loading"] = bool(args.ram)
    accelerator, model = made(args.fsdp, **options)
    world = torch.distributed.group.WORLD

    def build():
        if args.config == "dtensor":
            config = api.create_dtensor_config()
        else:
            module = model if args.config == "module" else None
            config = api.create_auto_config(fsdp_process_group=world, module=module)
        hidden, others = split(model)
        return Muon(hidden, lr=0.02, distributed_config=config), AdamW(others, lr=3e-4)

    if args.order == "before":
        model, muon, adamw = accelerator.prepare(model, *build())
    elif args.fsdp == 1:
        model = accelerator.prepare(model)
        muon, adamw = accelerator.prepare(*build())
    else:
        # FSDP2 is only prepared together with an optimizer.
        model, _ = accelerator.prepare(model, AdamW(model.parameters()))
        muon, adamw = build()
    before = [local(p).clone() for p in model.parameters()]
    for tokens in torch.randint(64, (3, 4, 16)):
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(before, model.parameters(), strict=True)
    if any(b.numel() and torch.equal(b, local(p)) for b, p in pairs):
        raise AssertionError("a parameter was never moved")


if __name__ == "__main__":
    main()

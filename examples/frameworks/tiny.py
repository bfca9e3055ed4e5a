"""Shared by the recipes: their optimizers, and tiny models. Put yours there instead."""

from collections.abc import Callable

import torch
from combined import Combined
from torch import nn, Tensor
from torch.optim import AdamW


# Your program knows which one it has, and can import from there.
try:
    from torch.optim.muon import create_auto_config, Muon, partition_named_parameters
# An ImportError of another kind says that a patch has to be applied again.
except ModuleNotFoundError:
    from distributed_muon import create_auto_config, Muon, partition_named_parameters


def muon_and_adamw(
    model: nn.Module, strategy: str, lr: float = 3e-3
) -> tuple[Muon, AdamW]:
    """Muon for the hidden matrices, and AdamW for the rest."""
    config = "auto"  # it reads DTensors, of FSDP2 or tensor parallelism
    if strategy == "ddp":
        config = create_auto_config(ddp_process_group=torch.distributed.group.WORLD)
    matrices, others = partition_named_parameters(model)
    scale = "match_rms_adamw"
    muon = Muon(matrices, lr, adjust_lr_fn=scale, distributed_config=config)
    return muon, AdamW(others, lr)


def factory() -> Callable[..., Combined]:
    """For a Trainer: it calls this, and calls the result with its model."""
    return lambda model, **options: Combined(*muon_and_adamw(model, **options))


def train(model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    for tokens in torch.randint(64, (3, 4, 16), device=model.device):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            print(f"loss {loss:.4f}")


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, intermediate_size=80, tie_word_embeddings=False)
    return LlamaForCausalLM(config)


def moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, head_dim=8))


def tokenizer() -> object:
    """Its words are the numbers of ``llama``'s tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({str(number): number for number in range(64)}, unk_token="0")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="0", eos_token="1"
    )


class Encoder(nn.Module):
    """Returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        # Lightning's checkpoints lack the random state, so a resumed run would drop other features.
        options = {"dropout": 0.0, "batch_first": True}
        layers = [nn.TransformerEncoderLayer(32, 4, 80, **options) for _ in range(2)]
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.layers(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

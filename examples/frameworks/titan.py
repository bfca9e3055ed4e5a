"""torchtitan: Muon for the layers' matrices in its OptimizersContainer, checkpoints included.

    PYTHONPATH=examples/frameworks torchrun --nproc-per-node 2 \\
        -m torchtitan.train --module titan --config tiny

Started again with a larger ``--training.steps``, it goes on from its checkpoint. The model is made on
the meta device and sharded (FSDP2, TP, as ``--parallelism`` says) before the optimizers are built.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tiny import Muon
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer


# torchtitan 0.3.0 is made for a later torch than 2.13, which has this under another name.
if not hasattr(torch.distributed, "set_timeout"):
    torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout


class MuonOptimizers(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str):
        if name == "Muon":
            return Muon
        return OptimizersContainer._resolve_optimizer_factory(name)


def optimizers() -> MuonOptimizers.Config:
    # Embeddings and the output head are matrices too, but AdamW's. With its fused AdamW, the
    # container sets foreach=False for all, which would keep Muon from batching on GPUs.
    return MuonOptimizers.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=r"^layers\..*\.w\w+\.weight$",
                optimizer_name="Muon",
                optimizer_kwargs={
                    "lr": 3e-3,
                    "adjust_lr_fn": "match_rms_adamw",
                    "foreach": None,
                },
            ),
            ParamGroupConfig(
                pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 3e-3}
            ),
        ],
        optimizer_factory_kwargs_by_name={"Muon": {"distributed_config": "auto"}},
    )


def tiny() -> Trainer.Config:
    config = llama3_debugmodel()
    config.optimizer = optimizers()
    # By default, the last checkpoint has the model only.
    config.checkpoint = CheckpointManager.Config(
        enable=True, interval=2, last_save_model_only=False
    )
    config.validator.enable = False
    config.training.local_batch_size = 2
    config.training.seq_len = 32
    config.training.steps = 4
    # The default, spmd_types, needs a later torch for its fully_shard.
    config.parallelism.spmd_backend = "partial_dtensor"
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    # Instead of text and a tokenizer's files.
    config.tokenizer = NoTokenizer.Config()
    config.dataloader = RandomTokens.Config()
    return config


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


class RandomTokens(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_
    ) -> None:
        self.shape = local_batch_size, seq_len + 1
        self.generator = torch.Generator().manual_seed(dp_rank)
        # Each rank's own: of equal names the checkpoint keeps one.
        self.key = f"generator {dp_rank}"

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = torch.randint(256, self.shape, generator=self.generator)
            positions = torch.arange(self.shape[1] - 1).expand(self.shape[0], -1)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {self.key: self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generator.set_state(state_dict[self.key])

"""Prints the table of docs/data/partition.md: partition_named_parameters on models of other packages."""

import contextlib
import io
import re

import peft
import timm
import torch
import torchvision
import transformers
from torch.optim.muon import partition_named_parameters, split_of


TRANSFORMERS = """BartForSequenceClassification BertForPreTraining CLIPModel GPT2LMHeadModel DeepseekV3ForCausalLM
DetrForObjectDetection FalconForCausalLM FlaubertForSequenceClassification FunnelForMaskedLM GPTNeoXForCausalLM
Gemma3ForCausalLM GptOssForCausalLM JetMoeForCausalLM Kosmos2ForConditionalGeneration LlamaForCausalLM MambaForCausalLM
MixtralForCausalLM MusicgenForCausalLM PI0ForConditionalGeneration PerceiverForSequenceClassification
Qwen2MoeForCausalLM RobertaForSequenceClassification RwkvForCausalLM SwinForImageClassification
SwitchTransformersForConditionalGeneration T5ForConditionalGeneration Wav2Vec2ForCTC ViTForImageClassification
XLNetForSequenceClassification"""
LORA = {
    "LlamaForSequenceClassification": {"task_type": "SEQ_CLS"},
    "RobertaForSequenceClassification": {"task_type": "SEQ_CLS", "use_dora": True},
    "MixtralForCausalLM": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "OPTForCausalLM": {"modules_to_save": ["lm_head", "embed_tokens"]},
}
TIMM = "deit_tiny_distilled_patch16_224 levit_128s mixer_s32_224 swin_tiny_patch4_window7_224"


def models():
    for name, options in [(n, None) for n in TRANSFORMERS.split()] + [*LORA.items()]:
        model = (cls := getattr(transformers, name))(cls.config_class())
        lora = options and peft.get_peft_model(model, peft.LoraConfig(**options))
        yield (f"{name}, LoRA {options}", lora) if lora else (name, model)
    for name in TIMM.split():
        yield f"timm {name}", timm.create_model(name)
    for name in ("googlenet", "resnet18", "swin_v2_t", "vgg11", "vit_b_16"):
        yield f"torchvision {name}", torchvision.models.get_model(name)


def row(model):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        options = {"split": split_of(model), "allow_batched_matrices": True}
        partition_named_parameters(model, verbose=True, **options)
    found = {"Muon": {}}
    for name, why in re.findall(
        r"(\S+) \(\d+(?:, \d+)+\) -> (?:rest: )?(.*)", out.getvalue()
    ):
        if why.endswith("D"):
            continue
        name = re.sub(r"\.(\d+|weight|default)\b", "", name)
        short = re.sub(r"_\d+\b", "_*", ".".join(name.split(".")[-2:]))
        if why.startswith("Muon, "):
            short += f" **{form(why.removeprefix('Muon, '))}**"
            why = "Muon"
        found.setdefault(why, {})[short] = None
    yield ", ".join(found.pop("Muon"))
    yield "; ".join(f"**{why}** {', '.join(names)}" for why, names in found.items())


def form(option):
    """How a weight is split, without the numbers of one model."""
    if "split" not in option:
        return option.partition(":")[0]
    repeated = ", repeated" if re.search(r"'repeats': (?!1\b)", option) else ""
    return "split" + repeated + ", columns" * ("'dim': 1" in option)


if __name__ == "__main__":
    print("| model | Muon | elsewhere, and why |\n|---|---|---|")
    with torch.device("meta"):
        for name, model in models():
            print(f"| {name} |", " | ".join(row(model)), "|")

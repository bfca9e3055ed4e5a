"""Prints the table of docs/data/partition.md: partition_named_parameters on models of other packages."""

import contextlib
import io
import re

import diffusers
import peft
import timm
import torch
import torchvision
import transformers
from torch import nn
from torch.optim.muon import partition_named_parameters, split_of


TRANSFORMERS = """AriaForConditionalGeneration BartForSequenceClassification BertForPreTraining CLIPModel DecisionTransformerModel GPT2LMHeadModel
DeepseekV3ForCausalLM LwDetrForObjectDetection RTDetrForObjectDetection
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
DIFFUSERS = """AutoencoderKL AutoencoderKLMochi DiTTransformer2DModel FluxTransformer2DModel HunyuanVideoTransformer3DModel
PixArtTransformer2DModel QwenImageTransformer2DModel SD3Transformer2DModel UNet2DConditionModel WanTransformer3DModel"""
TIMM = """botnet26t_256 coatnet_0_rw_224 convnext_tiny deit_tiny_distilled_patch16_224 efficientnet_b0 halonet26t
inception_resnet_v2 inception_v4 legacy_senet154 levit_128s mixer_s32_224 nasnetalarge swin_tiny_patch4_window7_224
swinv2_tiny_window8_256 vit_srelpos_small_patch16_224"""


class TwoHeads(nn.Module):
    """An actor and a critic, or boxes and classes, in this order or the other one."""

    def __init__(self, **heads):
        super().__init__()
        layers = nn.TransformerEncoderLayer(256, 8, 1024)
        self.body = nn.TransformerEncoder(layers, num_layers=2)
        for name, rows in heads.items():
            setattr(self, name, nn.Linear(256, rows))


# Two classes for each of two tasks, too, and as many classes as no rule can tell from a hidden layer.
TWO_HEADS = (
    {"policy": 6, "value": 1},
    {"value": 1, "policy": 6},
    {"boxes": 4, "classes": 20},
    {"classes": 20, "boxes": 4},
    {"boxes": 4, "classes": 91},
    {"first_task": 2, "second_task": 2},
)


def transformers_model(name):
    model_class = getattr(transformers, name)
    config = model_class.config_class()
    return model_class(config)


def models():
    for name in TRANSFORMERS.split():
        yield name, transformers_model(name)
    for name, options in LORA.items():
        model = transformers_model(name)
        lora = peft.get_peft_model(model, peft.LoraConfig(**options))
        yield f"{name}, LoRA {options}", lora
    for name in DIFFUSERS.split():
        yield f"diffusers {name}", getattr(diffusers, name)()
    for heads in TWO_HEADS:
        yield f"a transformer with heads {heads}", TwoHeads(**heads)
    for name in TIMM.split():
        yield f"timm {name}", timm.create_model(name)
    for name in ("googlenet", "resnet18", "swin_v2_t", "vgg11", "vit_b_16"):
        yield f"torchvision {name}", torchvision.models.get_model(name)


def row(model):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        partition_named_parameters(
            model,
            verbose=True,
            split=split_of(model),
            allow_batched_matrices=True,
        )
    # By reason: short names, once each.
    found = {"Muon": {}}
    line = re.compile(r"(\S+) \(\d+(?:, \d+)+\) -> (?:rest: )?(.*)")
    for name, why in line.findall(printed.getvalue()):
        if why.endswith("D"):
            continue
        short_name = shortened(name)
        if why.startswith("Muon, "):
            option = why.removeprefix("Muon, ")
            short_name += f" **{form(option)}**"
            why = "Muon"
        found.setdefault(why, {})[short_name] = None
    of_muon = found.pop("Muon")
    elsewhere = []
    for why, names in found.items():
        elsewhere.append(f"**{why}** {', '.join(names)}")
    return ", ".join(of_muon), "; ".join(elsewhere)


def shortened(name):
    """The last two words of a parameter's name, without numbers."""
    layer = re.sub(r"\.(\d+|weight|default)\b", "", name)
    last_words = layer.split(".")[-2:]
    return re.sub(r"_\d+\b", "_*", ".".join(last_words))


def form(option):
    """How a weight is split, without the numbers of one model."""
    if "split" not in option:
        return option.partition(":")[0]
    words = ["split"]
    if re.search(r"'repeats': (?!1\b)", option):
        words.append("repeated")
    if "'dim': 1" in option:
        words.append("columns")
    return ", ".join(words)


if __name__ == "__main__":
    print("| model | Muon | elsewhere, and why |\n|---|---|---|")
    with torch.device("meta"):
        for name, model in models():
            of_muon, elsewhere = row(model)
            print(f"| {name} | {of_muon} | {elsewhere} |")

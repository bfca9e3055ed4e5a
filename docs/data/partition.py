"""Public models that need ``exclude``: the table of partition.md.

    python docs/data/partition.py

It makes each model on meta, and prints the patterns and the parameters that they take from Muon.
"""

import re

import diffusers
import timm
import torch
import torchvision
import transformers
from torch.optim.muon import partition_named_parameters


# Models -> the patterns to exclude.
TRANSFORMERS = {
    "BartForSequenceClassification MBartForSequenceClassification MvpForSequenceClassification "
    "PLBartForSequenceClassification T5ForSequenceClassification": "classification_head.*",
    "BigBirdForQuestionAnswering": "qa_classifier.*",
    "ConditionalDetrForObjectDetection DetrForObjectDetection TableTransformerForObjectDetection "
    "YolosForObjectDetection": "class_labels_classifier.*",
    "DabDetrForObjectDetection DeformableDetrForObjectDetection LwDetrForObjectDetection": "*class_embed* *bbox_embed*",
    "DFineForObjectDetection RTDetrForObjectDetection RTDetrV2ForObjectDetection": "*enc_score_head* *enc_bbox_head* "
    "*class_embed* *bbox_embed*",
    "DeiTForImageClassificationWithTeacher": "cls_classifier.*",
    "FlavaForPreTraining": "m*_head.* itm_head.*",
    "IBertForMaskedLM": "ibert.embeddings.*",
    "JanusForConditionalGeneration": "model.generation_head.*",
    "LxmertForPreTraining": "answer_head.* obj_predict_head.* cls.seq_relationship.*",
    "MgpstrForSceneTextRecognition": "char_head.* bpe_head.*",
    "OmDetTurboForObjectDetection": "decoder.*_head.*",
    "OwlViTForObjectDetection Owlv2ForObjectDetection": "box_head.* class_head.*",
    "Qwen2_5OmniForConditionalGeneration": "talker.codec_head.*",
    "Gemma3nForCausalLM": "*.modality_router.*",
    "MambaForCausalLM FalconMambaForCausalLM JambaForCausalLM": "*.A_log",
    "ZambaForCausalLM": "*.mamba.D",
    "GotOcr2ForConditionalGeneration DeepseekVLHybridForConditionalGeneration PPFormulaNetForConditionalGeneration "
    "SLANeXtForTableRecognition SegGptForImageSegmentation UnlimitedOcrForConditionalGeneration "
    "SamModel SamHQModel DeepseekOcr2VisionModel": "*.rel_pos_?",
    "PerceiverForMaskedLM Idefics2ForConditionalGeneration EvollaForProteinText2Text": "*.latents",
    "Kosmos2ForConditionalGeneration Kosmos2_5ForConditionalGeneration": "*.latent_query",
    "AriaForConditionalGeneration": "*projector.query",
    "EdgeTamVideoModel": "*.latents_?d",
    "RadioModel": "*_register_token",
    "Inkling2ForCausalLM": "*.scale *attention_input.query",
    "PatchTSTForPretraining PatchTSTForClassification": "*.position_enc",
}
DIFFUSERS = {
    "Ideogram4Transformer2DModel PRXTransformer2DModel": "final_layer.linear.*",
    "BriaFibo2Transformer2DModel": "final_layer.linear.* *.latent_queries",
    "Kandinsky6Transformer3DModel": "*out_layer.out_layer.*",
    "AllegroTransformer3DModel Krea2Transformer2DModel LTXVideoTransformer3DModel LTX2VideoTransformer3DModel "
    "PixArtTransformer2DModel SanaTransformer2DModel SanaVideoTransformer3DModel SanaWMTransformer3DModel "
    "SanaWMLTX2RefinerTransformer3DModel": "*scale_shift_table",
    "CosmosTransformer3DModel": "*.pos_emb_?",
    "StableAudio3DiTModel": "memory_tokens",
}
TIMM = {
    "volo_d1_224": "aux_head.*",
    "efficientvim_m1": "heads.* *.alpha",
    "botnet26t_256 halonet26t haloregnetz_b": "*_rel",
    "mvitv2_base samvit_base_patch16": "*.rel_pos_?",
}
TORCHVISION = {"googlenet": "aux?.fc2.*"}


def from_transformers(name):
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class())


def of_muon(model, exclude=()):
    matrices, _ = partition_named_parameters(model, exclude=exclude)
    return {name for name, _ in matrices}


def rows(package, tables, make):
    for names, patterns in tables.items():
        excluded = {}
        for name in names.split():
            model = make(name)
            for taken in sorted(of_muon(model) - of_muon(model, patterns.split())):
                excluded[re.sub(r"\.\d+\b", ".*", taken)] = None
        exclude = ", ".join(f"`{pattern}`" for pattern in patterns.split())
        models = ", ".join(names.split())
        yield f"| {package}: {models} | {exclude} | {', '.join(excluded)} |"


if __name__ == "__main__":
    print("| model | `exclude` | what Muon would get |\n|---|---|---|")
    with torch.device("meta"):
        for package, tables, make in (
            ("transformers", TRANSFORMERS, from_transformers),
            ("diffusers", DIFFUSERS, lambda name: getattr(diffusers, name)()),
            ("timm", TIMM, timm.create_model),
            ("torchvision", TORCHVISION, torchvision.models.get_model),
        ):
            print(*rows(package, tables, make), sep="\n")

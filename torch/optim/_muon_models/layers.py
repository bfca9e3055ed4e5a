"""Why the parameters of a layer are not for Muon: by the types of layers, their places, and few names."""

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp._common_utils import clean_tensor_name


# FSDP1, activation checkpointing, torch.compile and PEFT put a layer into another module, under these names.
_WRAPPERS = {
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_orig_mod",
    "base_layer",
    "original_module",
}
_ROUTERS = {"gate", "router"}
_OUTPUT_HEADS = {"classifier", "head", "lm_head", "output", "proj_out", "unembed"}
_EMBEDDING = "embedding"
_OUTPUT_HEAD = "output head"


def reasons_by_layer(model: nn.Module) -> dict[str, str]:
    """Name of a module -> why the parameters in it are not for Muon; "" if they may be."""
    output_embeddings = set()
    for module in model.modules():
        # A method of transformers.
        find = getattr(module, "get_output_embeddings", None)
        if callable(find):
            output_embeddings.add(id(find()))
    reasons: dict[str, str] = {}
    blocks: set[int] = set()
    # The modules inside blocks, and those inside linear layers, which are adapters.
    inner_names: set[str] = set()
    last_layer = None
    # A module comes before those inside it.
    for name, module in model.named_modules():
        parent_name, _, _ = name.rpartition(".")
        layer = _unwrapped(module)
        is_inside = parent_name in inner_names or id(module) in blocks
        reason = reasons.get(parent_name, "")
        if not reason and id(module) in output_embeddings:
            reason = _OUTPUT_HEAD
        reasons[name] = reason or _why_not(layer, name, is_inside)
        blocks.update(map(id, _blocks_in(module)))
        if _is_linear(layer) and not is_inside and reasons[name] != _EMBEDDING:
            last_layer = name
        if _is_linear(layer) or is_inside:
            inner_names.add(name)
    cleaned = {}
    for name, reason in reasons.items():
        if name == last_layer or name.startswith(f"{last_layer}."):
            reason = reason or _OUTPUT_HEAD
        # The names of parameters lack the prefixes of FSDP1 and of activation checkpointing.
        cleaned[clean_tensor_name(f"{name}.")[:-1]] = reason
    return cleaned


def embedding_ids(model: nn.Module, reasons: dict[str, str]) -> set[int]:
    """The parameters of embeddings, which other layers may have, too."""
    found = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer_name, _, _ = clean_tensor_name(name).rpartition(".")
        if reasons[layer_name] == _EMBEDDING:
            found.add(id(parameter))
    return found


def unwrapped(name: str) -> str:
    """The name of a parameter or a module without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _unwrapped(module: nn.Module) -> nn.Module:
    for name, inner in module.named_children():
        if name in _WRAPPERS:
            return _unwrapped(inner)
    return module


def _is_linear(layer: nn.Module) -> bool:
    """Whether a layer has a matrix. FSDP1 may have flattened it."""
    weight = getattr(layer, "weight", None)
    return isinstance(layer, nn.Linear) or getattr(weight, "ndim", 0) == 2


def _why_not(layer: nn.Module, name: str, is_in_block: bool) -> str:
    _, _, own_name = unwrapped(name).rpartition(".")
    # Other packages' embeddings have torch's attributes.
    if hasattr(layer, "num_embeddings") and hasattr(layer, "weight"):
        return _EMBEDDING
    if isinstance(layer, (nn.RNNBase, nn.RNNCellBase)):
        return "recurrent"
    if own_name in _ROUTERS:
        return "router"
    if own_name in _OUTPUT_HEADS and not is_in_block:
        return _OUTPUT_HEAD
    return ""


def _blocks_in(container: nn.Module) -> Iterator[nn.Module]:
    """The elements of a list that are blocks, and not single layers."""
    if not isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return
    counts = Counter(type(_unwrapped(child)) for child in container.children())
    for key, child in container.named_children():
        layer = _unwrapped(child)
        # A pipeline's stage may have one block. A Sequential may have a model and its head.
        is_numbered = key.isdigit() and not isinstance(container, nn.Sequential)
        is_repeated = is_numbered or counts[type(layer)] > 1
        if is_repeated and not _is_linear(layer) and any(layer.children()):
            yield child

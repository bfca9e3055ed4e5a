"""Why the parameters of a layer are not for Muon: by the types of layers, their places, and few names."""

from collections.abc import Iterator

from torch import nn


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
_OUTPUT_HEAD = "output head"
EMBEDDING = "embedding"


def reasons_by_layer(model: nn.Module) -> tuple[dict[str, str], set[nn.Parameter]]:
    """Name of a module, without wrappers -> why the parameters in it are not for Muon; "" if they may be. And the
    parameters of embeddings, which other layers may have, too.
    """
    reasons: dict[str, str] = {}
    tables: set[nn.Parameter] = set()
    # Modules in blocks, and those in linear layers, which are adapters.
    inside: set[nn.Module] = set()
    last_layer = None
    # A module comes before those inside it.
    for wrapped_name, module in model.named_modules():
        name, layer = unwrapped(wrapped_name), _unwrapped(module)
        if name in reasons:  # by its wrapper
            continue
        parent_name, _, own_name = name.rpartition(".")
        reason = reasons.get(parent_name)
        reasons[name] = reason or _why_not(layer, own_name, module in inside)
        for block in _blocks_in(layer):
            inside.update(block.modules())
        if reasons[name] == EMBEDDING:
            tables.update(layer.parameters())
        elif _is_linear(layer):
            if module not in inside:
                last_layer = name
            inside.update(module.modules())
    for name, reason in reasons.items():
        if f"{name}.".startswith(f"{last_layer}."):
            reasons[name] = reason or _OUTPUT_HEAD
    return reasons, tables


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


def _why_not(layer: nn.Module, own_name: str, is_in_block: bool) -> str:
    # Other packages' embeddings have torch's attributes.
    if hasattr(layer, "num_embeddings") and hasattr(layer, "weight"):
        return EMBEDDING
    if isinstance(layer, (nn.RNNBase, nn.RNNCellBase)):
        return "recurrent"
    if own_name in _ROUTERS:
        return "router"
    if own_name in _OUTPUT_HEADS and not is_in_block:
        return _OUTPUT_HEAD
    if isinstance(layer, nn.modules.conv._ConvNd):
        return "convolution"
    return ""


def _blocks_in(container: nn.Module) -> Iterator[nn.Module]:
    """The elements of a list that are blocks, and not single layers."""
    types = [type(_unwrapped(child)) for child in container.children()]
    for key, child in container.named_children():
        layer = _unwrapped(child)
        # A pipeline's stage may have one block. A Sequential may have a model and its head.
        is_block = key.isdigit()
        if isinstance(container, nn.Sequential):
            is_block = types.count(type(layer)) > 1
        if is_block and not _is_linear(layer):
            yield child

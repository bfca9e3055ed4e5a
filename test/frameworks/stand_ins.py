"""Stand-ins for accelerators, for frameworks that refuse a CPU.

Nothing of Muon is touched here.
"""

import os
import sys
from types import SimpleNamespace


def accelerate():
    """FSDP is offered on accelerators only, to the Trainer too."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._prepare_backend = lambda *args, **kwargs: (
        "gloo",
        DistributedType.MULTI_GPU,
    )


def torchtitan():
    """It asks the device's module for its memory; FlexAttention has no backward on a CPU; gloo has
    no sum that multiplies."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.functional import scaled_dot_product_attention
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        device_count=lambda: 1,
        set_device=lambda device: None,
        current_device=lambda: 0,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1),
        memory_stats=lambda device: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        synchronize=lambda: None,
    )
    sys.argv += ["--training.disable-cuda-graphs", "--training.mixed-precision-param"]
    sys.argv += ["float32"]

    from torchtitan.models.common import attention, decoder

    # By these names it is said how they are sharded.
    def attend(self, q_BLNH, k_BLNH, v_BLNH, *, enable_gqa=False, scale=None, **_):
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        options = {"is_causal": True, "enable_gqa": enable_gqa, "scale": scale}
        return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    attention.FlexAttention.forward = attend
    decoder.Decoder.get_attention_masks = lambda self, positions: None

    divide = FSDPModule.set_gradient_divide_factor

    def divide_apart(module, factor):
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_apart

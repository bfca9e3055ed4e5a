"""What the overlay can be laid over: an installed torch, or a PyTorch checkout."""

from .checkout import Checkout, find_checkout
from .interpreter import ask_python
from .tree import Target
from .wheel import find_wheel, Wheel


__all__ = ["Checkout", "Target", "Wheel", "ask_python", "find_checkout", "find_wheel"]

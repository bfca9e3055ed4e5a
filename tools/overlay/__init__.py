"""The overlay: these sources laid over a PyTorch checkout or an installed torch.

Standard library only, and never an ``import torch``: all of it must run before
there is a torch, and on a torch that is broken.
"""

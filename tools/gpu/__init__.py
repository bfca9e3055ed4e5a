"""Runs the tests on a machine with a GPU, on the torch that is installed there.

``python -m tools.gpu --python EXE``. The overlay is laid over that torch and taken off again, if it was
not there before. Nothing is installed. Ranks that find too few GPUs share them, over gloo; NCCL runs
with one rank, or with as many as there are GPUs; the rest is skipped, with the reason printed.
"""

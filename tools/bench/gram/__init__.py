"""``python -m tools.bench gram``: Newton-Schulz by the Gram matrix beside the quintic.

Its speed, its distance from the exact polynomial, and a training run with each.
"""

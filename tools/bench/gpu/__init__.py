"""``python -m tools.bench.gpu``: tests and measures Muon on the accelerators of this machine, on one page.

Without an accelerator, two processes on the CPU play the stages at small sizes.
"""

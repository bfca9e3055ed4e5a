"""One optimizer step at real sizes, simulated from the schedule's own buckets and splits.

``models`` and ``meshes`` give layouts, the engine gives owners and a schedule of these, ``plan`` makes
vectors over ranks of it, and ``timeline`` plays the order of ``runtime/pipeline.py`` for all ranks at
once. No rank is left out and none stands for another.

What a step has beside is not simulated: momentum, packing and updates (passes over local memory), the
all-reduce of statuses, launches, and congestion of the network.
"""

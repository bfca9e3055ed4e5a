"""One optimizer step at real sizes, simulated from the schedule's own buckets and splits.

``cases`` gives the layouts, and the engine gives the owners and the schedule. ``plan`` turns the schedule
into vectors over all ranks, and ``timeline`` plays the order of ``schedule/order.py`` on them.

The simulation leaves out momentum, packing and updates (passes over local memory), the all-reduce of
statuses, launches, and congestion of the network.
"""

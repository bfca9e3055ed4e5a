"""One optimizer step at real sizes, simulated from the schedule's own buckets and splits.

``cases`` gives the layouts, and the engine gives the owners and the schedule. ``plan`` turns the schedule
into vectors over all ranks, ``costs`` has the seconds of a rank's own work, and ``timeline`` plays the order of
``schedule/order.py`` on them, for accelerators. ``search`` simulates combinations of options for a model of the user's
own.

The simulation leaves out the all-reduce of statuses, launches, congestion of the network, and that passes over memory
beside Newton-Schulz slow it down.
"""

"""One optimizer step at real sizes, simulated from the engine's own owners and buckets.

``cases`` has the layouts, and ``own`` those of a model of the user's. ``plan`` turns the buckets into vectors over all
ranks, ``costs`` has the seconds of a rank's own work, ``timeline`` plays the order of ``schedule/order.py``, and
``report`` makes the tables.

The simulation leaves out the all-reduce of statuses, launches, congestion of the network, and that transfers slow down
Newton-Schulz.
"""

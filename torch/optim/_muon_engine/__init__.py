"""The engine behind ``distributed_config``; see ``torch.optim.muon`` for its public face.

Data flows, and imports point, one way::

    config -> reader -> layout -> owners -> schedule -> exchange -> step

A reader asks a framework where the pieces of each matrix are and says it as a layout. Everything
after it knows layouts only, so a new kind of parallelism is a new reader.
"""

"""A source and a target, each a process of its own, and a front that survives the death of either.

``front.py`` starts them, asks, and starts again what died; ``source.py`` and ``target.py`` are what
runs in them. Blocks go from the one to the other by exchange/; the front never sees a block.
"""

"""How blocks travel from a source's worker to a target's, as bytes: nothing here knows a model.

The source offers, the target accepts and *reads* the source's blocks (they are fewer bytes than the
mapped ones would be, and the target knows best where they go), checks every block, and releases
them. ``source_end`` and ``target_end`` are that protocol without any input or output; ``send`` and
``receive`` drive them over a control channel (TCP) and a transport (in_process, nixl, cuda_ipc).
docs/exchange.md tells the whole story.
"""

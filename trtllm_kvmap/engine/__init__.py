"""The TensorRT-engine lane: a source engine, a map engine and a target engine as one pipeline.

Written against the sources of TensorRT-LLM 1.2.1, the last stable release with engines, and run
under a fake alone: nothing here has met a GPU. host.py is where its names are taken from.
"""

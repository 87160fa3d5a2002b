"""The shell for TensorRT-LLM's KV cache connector (PyTorch backend).

Every name of the engine is listed in signatures.py and enters through host.py. Name ``connector``
as the connector module; it needs tensorrt_llm installed. Written against the engine's source and
run under a fake of it only: docs/lanes.md says what was verified how, docs/runbook.md how to verify
the rest.
"""

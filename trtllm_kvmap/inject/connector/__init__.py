"""What every serving engine's connector needs, and no engine is imported for.

An engine asks its scheduler's half how many tokens it need not compute, gives blocks for them, and
lets its worker's half fill the blocks before the forward pass. HandoffScheduler and HandoffWorker
are these halves; LoadOrder travels between them. A shell for one engine (inject/vllm,
inject/trtllm) turns the engine's calls into theirs and holds nothing else.
"""

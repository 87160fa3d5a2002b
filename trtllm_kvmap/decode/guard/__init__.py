"""Whether a mapped cache may stand for this request, and what happens when it may not."""

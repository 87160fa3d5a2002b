"""One conversation over several models: who has read what, and how exactly."""

"""Where a mapped cache goes wrong, and which of it does harm."""

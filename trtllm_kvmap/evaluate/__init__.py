"""Every arm and every control of a hand-over, and the report a map has to earn."""

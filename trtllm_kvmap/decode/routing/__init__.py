"""Whether to hand over, read again or stay, from measured speeds and a map's evidence."""

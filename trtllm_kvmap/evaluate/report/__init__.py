"""What was found, as one self-contained page, Markdown and JSON."""

"""What a model is asked: items read from published files, generated, or cut from text."""

"""A source drafts on the cache it still holds, the target verifies: the same words, sooner."""

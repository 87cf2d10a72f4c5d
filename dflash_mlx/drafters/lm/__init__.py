"""A small language model that drafts token by token for a large one with the same tokenizer."""

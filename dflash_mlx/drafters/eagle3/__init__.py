"""EAGLE-3 (arXiv 2503.01840): one decoder layer that drafts token by token."""

"""Drafters: objects that propose prefix trees. One file each."""

"""How draft distributions become a prefix tree, and which of its nodes are worth verifying."""

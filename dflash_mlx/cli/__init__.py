"""What the command lines share, `generate`, and what the chat's does with the disk."""

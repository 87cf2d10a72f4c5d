"""Gemma 4's assistants: layers that attend to keys and values of their target."""

"""Targets that see, by mlx-vlm: `opening.py` reads them, `prompts.py` their prompts."""

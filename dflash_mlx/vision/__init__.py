"""Targets that see, by mlx-vlm: `opening.py` reads them, `prompts.py` makes prompts with pictures.

`pictures.py` checks what users give, `remote.py` reads addresses, `album.py` has those of a chat.
"""

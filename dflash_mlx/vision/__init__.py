"""Targets that see, by mlx-vlm: pictures.py checks what is given, opening.py reads the models."""

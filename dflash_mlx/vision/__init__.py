"""Targets that see: pictures.py checks what is given, prompts.py makes prompts of it."""

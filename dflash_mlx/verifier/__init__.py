"""The large model: any mlx-lm model, made to verify prefix trees.

The only room that knows mlx-lm. Begin with `model.py`.
"""

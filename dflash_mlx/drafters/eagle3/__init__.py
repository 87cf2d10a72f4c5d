"""EAGLE-3 (arXiv 2503.01840): one decoder layer that drafts token by token, chains and trees.

Begin with `network.py`, then `context.py` (what is remembered of committed tokens), `model.py` (a
draft in the making) and `drafter.py` (the method). `config_file.py` and `checkpoint.py` read files.
"""

"""SpecDiff: masked diffusion models that draft from tokens alone, and their files.

`method.py` says how they are used, `drafter.py` how a block is denoised, `context.py` what is kept
of a text, `checkpoint.py` which files are read.
"""

"""Training drafters on the user's own machine, of all families, and candidate selectors.

Begin with `trainer.py`, what all trainings have in common. `trainee.py` is the drafter that is
trained, `data.py` what it reads, and `dflash_mlx/corpus.py`, which alone imports this room, where
that comes from.
"""

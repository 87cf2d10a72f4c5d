"""Training drafters on the user's own machine, of all families, and candidate selectors.

Nobody imports this room. Begin with `trainer.py` (what all trainings have in common); `trainee.py`
is the drafter that is trained, `data.py` what it reads, `corpus` where that comes from.
"""

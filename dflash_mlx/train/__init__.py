"""Training drafters on the user's own machine: DFlash, D2SD's variable-prefix drafter, selectors.

Nobody imports this room. Begin with `trainer.py` (what all trainings have in common); `trainee.py`
is the drafter that is trained, `data.py` and `features.py` what it reads, `corpus` where that comes
from.
"""

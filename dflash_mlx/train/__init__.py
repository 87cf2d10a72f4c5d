"""Training drafters on the user's own machine: DFlash, D2SD's variable-prefix drafter, selectors.

Nobody imports this room. Begin with `steps.py` (what all trainings have in common), `trainer.py`;
`trainee.py` is the drafter that is trained, `packed.py` its pass over many blocks, `data.py` and
`features.py` what it reads, `corpus` where that comes from.
"""

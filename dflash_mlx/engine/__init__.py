"""READ THIS FIRST: the decode loop. Draft, verify, accept, commit.

Begin with `step.py`, then `drafter.py` (what a drafter is) and `verify.py`.
"""

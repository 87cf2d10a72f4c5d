"""READ THIS FIRST: the decode loop. Draft, verify, accept, commit.

Begin with `decode.py`, then `drafter.py` (what a drafter is) and `verify.py`.
"""

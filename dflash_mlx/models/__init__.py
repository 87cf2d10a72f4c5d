"""From what a user names to a loaded pair, in one straight line: read `load.load_pair`.

`names` and `registry` say which models, `source` where each is (a folder or the hub), `check` what
it is and whether it fits, before any weight is fetched; `parts` takes target and drafters from one
to the next, `numeric_range` looks at their numbers, `report` tells a pair without loading it.
"""

"""From what a user names to a loaded pair, in one straight line: read `load.load_pair`.

`names` says which models, `source` where each is (a folder or the hub), `check` what it is and
whether it fits, before any weight is fetched; `numeric_range` looks at the numbers of what was
loaded, `available` at what there is to choose.
"""

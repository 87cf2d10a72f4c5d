"""From what a user names to a loaded pair, in one straight line: read `load.load_pair`.

`names` says which models, `source` where each is (a folder or the hub), `check` what it is and
whether it fits, before any weight is fetched; `read` makes a target of it, and `library` knows what
there is to choose.
"""

"""From what a user names to a loaded pair, in one straight line: read `load.load_pair`."""

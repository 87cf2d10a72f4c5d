"""What is guessed: one file a method. `methods.py` has the table of `--method`."""

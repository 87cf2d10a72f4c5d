"""What the command lines share, and `generate` and `doctor`."""

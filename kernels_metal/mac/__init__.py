"""What somebody with a Mac runs once: are the kernels right there, are they fast, and a report."""

"""Methods compared on a set of prompts; `python -m dflash_mlx.benchmark` is the command line."""

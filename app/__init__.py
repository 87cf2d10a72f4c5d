"""The terminal chat."""

import dflash_mlx  # noqa: F401 - first, so that Ctrl+C is seen to while the rest is imported

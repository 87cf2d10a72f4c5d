"""The machine: files written whole, versions and chips, and what makes MLX fast on Linux."""

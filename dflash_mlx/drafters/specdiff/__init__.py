"""SpecDiff: masked diffusion models that draft from tokens alone, and their files."""

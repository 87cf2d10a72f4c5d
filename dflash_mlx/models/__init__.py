"""Names to a loaded pair: where a model is, whether it fits, its weights. Begin with `load.py`."""

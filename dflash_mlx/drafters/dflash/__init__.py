"""The DFlash family: networks that draft from hidden states of the target, and their files."""

"""What families of draft models share: layers, heads, the fields and tensors of their files."""

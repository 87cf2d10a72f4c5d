"""GGUF files, as the default target comes in one."""

"""GGUF files, as the default target comes in one: `gguf_target.load_gguf` reads them."""

"""What was said before: what followed, in earlier texts, where they read as this one does now."""

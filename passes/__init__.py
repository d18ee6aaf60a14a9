"""Graph rewrites, one per file."""

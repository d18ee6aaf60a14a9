"""Trace transformers models into FX graphs; carry their math as facts."""

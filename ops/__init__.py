"""Numeric operations, one per file: reference, Triton kernel, native CPU kernel, schema."""

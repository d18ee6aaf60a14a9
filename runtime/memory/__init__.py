"""KV memory that grows and shrinks without moving."""

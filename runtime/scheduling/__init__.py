"""Who runs next, and on which KV blocks. No torch here."""

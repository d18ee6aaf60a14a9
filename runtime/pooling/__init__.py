"""Models that answer with numbers for each whole input: embeddings and scores."""

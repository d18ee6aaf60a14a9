"""Load tools: make requests, send them at given times to any OpenAI-compatible server, say what came back."""

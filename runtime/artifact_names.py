"""Names in an artifact's folder that several modules know; `artifact.py` says what the files hold."""

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"

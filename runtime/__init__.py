"""Compile driver, artifact, KV memory, scheduler, engine, server."""

"""What a model writes becomes events: content, reasoning, tool calls."""

"""How long a model may think: a budget of tokens, and how thoughts are ended when it is spent."""

"""Does a prompt fit into the context window? The one rule, for server, `LLM`, engine and scheduler."""

from __future__ import annotations

from ostinato.errors import ContextTooLong


def kept_tokens(asked: int | None, limit: int | None, window: int) -> int | None:
    """How many tokens at a prompt's end `truncate_prompt_tokens` keeps; None: all, whatever their number.

    -1 keeps as many as leave room for `limit` tokens (None: for one), and at least one.
    """
    return max(1, window - (limit or 1)) if asked == -1 else asked


def room_left(prompt_tokens: int, window: int, *, param: str, at_least: bool = False) -> int:
    """Tokens that may still be generated after this prompt.

    A prompt must leave room for one: ContextTooLong names both numbers; `at_least`: the first is a lower
    bound.  A larger `max_tokens` is no error; it is an upper bound, cut to what this returns.  The message
    has the words by which OpenAI and Anthropic say so, for clients look for them.
    """
    if prompt_tokens >= window:
        count = f"at least {prompt_tokens}" if at_least else f"{prompt_tokens}"
        raise ContextTooLong(
            f"the prompt is too long: it has {count} tokens, this model's maximum context length is {window} "
            f"tokens and the answer needs at least one of them; shorten the prompt to {window - 1} tokens",
            param=param,
        )
    return window - prompt_tokens

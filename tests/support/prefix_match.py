"""What a new request would find in the prefix cache."""

from ostinato.runtime.scheduling.block_pool import BlockPool, PrefixKeys


def matched(pool: BlockPool, token_ids: list[int] | tuple[int, ...], salt: str) -> tuple[list[int], int]:
    """Blocks that hold the longest known prefix, and its tokens; at least one token is left to compute."""
    keys = PrefixKeys(token_ids, pool.block_tokens, salt)
    blocks: list[int] = []
    for index in range((len(token_ids) - 1) // pool.block_tokens):
        block = pool.lookup(keys[index])
        if block is None:
            break
        blocks.append(block)
    return blocks, len(blocks) * pool.block_tokens

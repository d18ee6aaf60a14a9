"""Each open connection is a file descriptor, and the usual limit of 1024 is soon reached."""

from __future__ import annotations

import resource

from ostinato.errors import ConfigError

_SPARE = 64  # for libraries, logs and pipes


def raise_fd_limit(connections: int) -> None:
    """Allow `connections` sockets in this process. ConfigError when the hard limit forbids it."""
    wanted = connections + _SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigError(
            f"{connections} connections at once need {wanted} file descriptors; the hard limit is {hard}: "
            "raise it (ulimit -Hn), lower --max-concurrency or use more --processes"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

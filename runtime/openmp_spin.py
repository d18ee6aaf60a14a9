"""How long an OpenMP thread spins before it sleeps. libgomp reads it when torch is loaded: set it before."""

from __future__ import annotations

from collections.abc import MutableMapping

# About 25 us (a pause is at least 25 ns on Zen 4). While torch's thread spins, it keeps its core from the
# kernels' team: with 250 us the norms of a prefill of 512 tokens took 1.3 to 1.5 times as long.
SPIN_COUNT = "1000"


def shorten_spin(environ: MutableMapping[str, str]) -> None:
    """Cut the spin short, unless the user has chosen one.

    With libgomp's default a busy neighbour (our HTTP server is one) made a step of 9 ms take 68 ms on two
    cores: the thread that everyone waits for has no core, because the others spin on it.
    """
    if "GOMP_SPINCOUNT" not in environ and "OMP_WAIT_POLICY" not in environ:
        environ["GOMP_SPINCOUNT"] = SPIN_COUNT

"""The engine process with the toy model in place of an artifact: `python -m tests.support.toy_worker FD`."""

import sys

from ostinato.runtime.engine_worker import main
from tests.support.toy_model import load_toy

if __name__ == "__main__":
    sys.exit(main(load=load_toy))

"""python -m jaxvllm: the `jaxvllm` command, where its script isn't on the path."""

import sys

from jaxvllm.cli import main

if __name__ == "__main__":
    sys.exit(main())

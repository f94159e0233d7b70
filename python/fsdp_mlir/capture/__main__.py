"""`python -m fsdp_mlir.capture`: captures a model named on the command line."""

import sys

from fsdp_mlir.capture.cli import main

if __name__ == "__main__":
    sys.exit(main())

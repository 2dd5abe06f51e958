"""`python -m keras_spmd` is the command `keras-spmd`."""

import sys

from keras_spmd.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks`: the same as `longitude bench`."""

import sys

from longitude.cli.main import run

if __name__ == "__main__":
    sys.exit(run(["bench", *sys.argv[1:]]))

"""`python -m longitude`: the command line."""

from longitude.cli.main import main

if __name__ == "__main__":
    main()

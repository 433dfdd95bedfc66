"""`python -m batchfit` is the command `batchfit`."""

from batchfit._cli import main

if __name__ == "__main__":
    main()

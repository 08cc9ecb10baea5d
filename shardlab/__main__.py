"""`python -m shardlab` is the command `shardlab`."""

from shardlab.cli import main

if __name__ == "__main__":
    main()

"""The `lowbit` command."""

from lowbit_run.cli import main

if __name__ == "__main__":
    main()

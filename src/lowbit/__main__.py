"""`python -m lowbit` is the `lowbit` command; so is `torchrun ... -m lowbit`."""

from lowbit.cli import main

if __name__ == "__main__":
    main()

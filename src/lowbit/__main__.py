"""`python -m lowbit` is the `lowbit` command, which `lowbit_run` contains; so is `torchrun ... -m lowbit`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("lowbit_run", run_name="__main__", alter_sys=True)

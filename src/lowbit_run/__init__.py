"""The program that is built on lowbit: what `lowbit train`, `plan`, `doctor`, `generate` and `report` do.

Programs of your own may import from

* `lowbit_run.train`: training as `lowbit train` does it, with its configuration;
* `lowbit_run.plan`: what `lowbit plan` measures and predicts;
* `lowbit_run.config`, `lowbit_run.report` and `lowbit_run.simulate`, of which these are made.

All other modules may change with any version.
"""

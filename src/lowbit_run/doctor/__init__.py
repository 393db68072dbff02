"""`lowbit doctor`: what keeps several machines from training together, and a description of them for the plan."""

__all__: list[str] = []

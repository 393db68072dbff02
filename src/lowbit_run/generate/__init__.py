"""`lowbit generate`: run on several machines a model that no single one can hold, with what training made of it."""

__all__: list[str] = []

"""`lowbit doctor`, between real processes."""

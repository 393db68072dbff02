"""Charts of rows, declared by the values that they show, and pages of results with tables and charts."""

from lowbit_lab.charts.charts import Bars, Stacks
from lowbit_lab.charts.curves import Heights, Lines, Points

__all__ = ["Bars", "Heights", "Lines", "Points", "Stacks"]

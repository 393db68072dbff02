"""A slow simulator of a step, written to be obviously right: it asks at every moment what can begin."""

import math
from dataclasses import dataclass, field
from typing import Any

from lowbit_run.simulate import Actions, Network, StageTimes


@dataclass
class Task:
    seconds: float
    needs: Any = None
    sends: Any = None
    to: int = 0
    nbytes: float = 0.0
    label: str = ""
    begin: float = math.inf
    end: float = math.inf


@dataclass
class Line:
    rate: float
    latency: float
    queue: list[tuple[Any, float]] = field(default_factory=list)
    until: float = math.inf


def seconds_of(
    actions: Actions, stages: list[StageTimes], network: Network, optimizer: float
) -> tuple[float, dict[str, tuple[float, float]]]:
    programs = [_program(actions, stages, rank, optimizer) for rank in range(actions.ranks)]
    lines = [Line(c.bytes_per_second, c.latency) for c in network.channels]
    routes = network.routes
    at, arrived, arriving, now = [0] * actions.ranks, set(), [], 0.0
    while True:
        if not _begin(programs, at, now, arrived):
            times = [tasks[i].end for tasks, i in zip(programs, at, strict=True) if i < len(tasks)]
            times += [line.until for line in lines] + [time for time, _ in arriving]
            now = min(times, default=math.inf)
            if now == math.inf:
                break
        for rank, tasks in enumerate(programs):
            if at[rank] < len(tasks) and (task := tasks[at[rank]]).end <= now:
                at[rank] += 1
                if task.sends:
                    lines[routes[rank, task.to]].queue.append((task.sends, task.nbytes))
        for line in lines:
            if line.until <= now:
                message, _ = line.queue.pop(0)
                arriving.append((now + line.latency, message))
                line.until = math.inf
            if line.queue and line.until == math.inf:
                line.until = now + line.queue[0][1] / line.rate
        arrived |= {message for time, message in arriving if time <= now}
        arriving = [(time, message) for time, message in arriving if time > now]
    assert all(i == len(tasks) for i, tasks in zip(at, programs, strict=True))
    spans = {task.label: (task.begin, task.end) for tasks in programs for task in tasks if task.label}
    return max(task.end for tasks in programs for task in tasks), spans


def _begin(programs, at, now, arrived) -> bool:
    """Begin what can begin now; return whether anything has ended at once."""
    begun = False
    for rank, tasks in enumerate(programs):
        if at[rank] < len(tasks):
            task = tasks[at[rank]]
            if task.begin == math.inf and (task.needs is None or task.needs in arrived):
                task.begin, task.end = now, now + task.seconds
                begun = begun or task.end <= now
    return begun


def _program(actions: Actions, stages: list[StageTimes], rank: int, optimizer: float) -> list[Task]:
    others = range(1, actions.ranks)
    tasks = [Task(0.0, sends=("go", r), to=r) for r in others] if rank == 0 else []
    tasks.append(Task(optimizer, needs=None if rank == 0 else ("go", rank)))
    owner = dict(zip(actions.stage.tolist(), actions.rank.tolist(), strict=True))
    last = len(stages) - 1
    for name in actions.names(rank):
        kind = next(letter for letter in name if letter in "FBIW")
        s, micro_batch = (int(part) for part in name.split(kind))
        times, needs, sends, to, nbytes, coding = stages[s], None, None, 0, 0.0, 0.0
        source, target = (s - 1, s + 1) if kind == "F" else (s + 1, s - 1)
        way = "forward" if kind == "F" else "backward"
        if kind != "W" and 0 <= source <= last and owner[source] != rank:
            needs, coding = (way, source, micro_batch), getattr(times, f"decode_{way}")
        first = 0.0
        if kind != "W" and 0 <= target <= last and owner[target] != rank:
            sends, to, nbytes = (way, s, micro_batch), owner[target], getattr(times, f"{way}_bytes")
            first = getattr(times, f"encode_{way}")
        compute = {"F": times.forward, "B": times.backward}.get(kind, times.backward * (0.5 if s else kind == "W"))
        tasks.append(Task(coding + compute + first, needs, sends, to, nbytes, name))
    tasks.append(Task(0.0) if rank == 0 else Task(0.0, sends=("done", rank)))
    return tasks + [Task(0.0, needs=("done", r)) for r in others if rank == 0]

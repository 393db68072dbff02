"""Over a slow link the stage carries both directions at once: faster than the stock one with the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit_lab.network import SlowLink

WORKER = """
import json, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from lowbit.codecs import Cast
from lowbit.pipeline import LowBitStage

torch.set_num_threads(1)
rank, address = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://{address}:29500", rank=rank, world_size=2)
x = torch.randn(8, 64, 512)  # 8 micro-batches of 128 KB


def seconds(kind, **codecs):
    stages = [kind(nn.Linear(512, 512), i, 4, torch.device("cpu"), **codecs) for i in (rank, rank + 2)]
    schedule = ScheduleInterleaved1F1B(stages, 8, loss_fn=nn.functional.mse_loss)
    found = []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        schedule.step(x) if rank == 0 else schedule.step(target=x)
        dist.barrier()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def attempt():
    # on the slower rank: the same on all
    both = torch.tensor([seconds(PipelineStage), seconds(LowBitStage, forward=Cast(), backward=Cast())])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return both.tolist()


for _ in range(4):  # other work on this machine may take either's time
    both = attempt()
    if both[1] < 0.85 * both[0]:
        break
dist.destroy_process_group()
print(json.dumps(both), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(SlowLink.available() is not None, reason=f"no shaped link here: {SlowLink.available()}")
def test_overlap_beats_the_stock_stage_with_the_same_bytes(tmp_path: Path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with SlowLink(rate_mbit=50) as link:
        processes = [
            link.popen(
                host,
                [sys.executable, str(script), str(host), link.address(0)],
                env=os.environ | {"GLOO_SOCKET_IFNAME": link.interface(host)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in range(2)
        ]
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    for output in outputs:
        stock, ours = json.loads(output)
        # 24 messages of 128 KB each way take 0.53 s at least.
        assert 0.5 < ours < 0.85 * stock, (ours, stock)

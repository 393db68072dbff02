"""A predicted step by hand."""

import pytest

from lowbit.simulate import Channel, Network, actions
from lowbit.simulate.predict import predicted_step


def test_each_end_codes_and_each_way_takes_its_own_bytes():
    network = Network(channels=[Channel(bytes_per_second=1000.0)] * 2, routes={(0, 1): 0, (1, 0): 1})
    coding = {0: (0.1, 9.0, 9.0, 0.4), 1: (9.0, 0.2, 0.3, 9.0)}
    step = predicted_step(
        actions("GPipe", ranks=2, microbatches=1), [3.0, 3.0], [0, 1], network, formats=["x"],
        sizes=lambda text: (1000, 500), coding=lambda rank, text: coding[rank], checksum=100,
    )  # fmt: skip
    assert step.nbytes.tolist() == [1100, 600]
    assert step.seconds == pytest.approx(1 + 0.1 + 1.1 + 0.2 + 1 + 2 + 0.3 + 0.6 + 0.4 + 2)

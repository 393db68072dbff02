"""The one table of tags: which messages can meet."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from lowbit.collectives.algorithms import Shards
from lowbit.wire import tags

SOURCE = Path(tags.__file__).parents[1]


def test_no_two_kinds_of_message_can_meet():
    for kind, following in itertools.pairwise(tags.KINDS):
        assert kind.first < kind.end == following.first
    assert tags.KINDS[0].first == 0
    assert tags.KINDS[-1].end <= tags.CHANNELS
    assert tags.tag(tags.CHANNELS - 1, tags.CAPACITIES[-1]) < 1 << 31, "Gloo's tags are int32"


@pytest.mark.parametrize("kind", tags.KINDS, ids=lambda kind: f"{kind.name} from {kind.first}")
def test_members_of_a_kind_share_no_channel(kind: tags.Kind):
    first, last = kind.channels(0), kind.channels(kind.members - 1)
    assert (first.start, last.stop) == (kind.first, kind.end)
    if kind.members > 1:
        assert kind.channels(1).start == first.stop
    with pytest.raises(RuntimeError, match=f"has had {kind.members} {kind.name}, and no more are allowed"):
        kind.channels(kind.members)


def test_a_receive_has_room_for_every_message_with_its_tag():
    assert len(tags.CAPACITIES) <= 32, "else classes of one channel reach the next"
    assert list(tags.CAPACITIES) == sorted(set(tags.CAPACITIES))
    ends = {n + more for n in tags.CAPACITIES for more in (-1, 0, 1)} - {tags.CAPACITIES[-1] + 1}
    for nbytes, other in itertools.product(sorted({0, 1, 72, 4104, *ends}), repeat=2):
        assert nbytes <= tags.capacity(nbytes)
        if tags.tag(5, nbytes) == tags.tag(5, other):
            assert other <= tags.capacity(nbytes)
        assert tags.tag(5, nbytes) // 32 == 5
    with pytest.raises(ValueError, match="has 68719476737 bytes; allowed: at most 68719476736"):
        tags.capacity(tags.CAPACITIES[-1] + 1)


def test_a_call_has_a_channel_for_each_message():
    assert 2 * Shards(numel=1 << 40, ranks=2, chunk=1).chunks <= tags.COLLECTIVES.width


def test_tags_stand_in_the_table_only():
    calls = re.compile(r"\b(dist\.(send|recv|isend|irecv)|(group|carrier)\.(send|recv))\b[^`]*$|\btag=", re.M)
    files = {str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*.py") if calls.search(file.read_text())}
    # Those of the pipeline that use no tags: operations of the schedule's own, for NCCL, and layouts of a trial.
    assert files == {"wire/mailbox.py", "pipeline/transport.py", "pipeline/layouts.py"}

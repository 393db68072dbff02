"""Codecs of other packages that keep state; and what is wrong with one is a line that names it."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.codecs import AQSGD, Codec, Session, StatefulCodec, names
from lowbit.codecs.foreign import CodecError, open_session
from lowbit.pipeline import AgreementError
from lowbit.pipeline.boundary import warm_up
from lowbit_run.train import TrainConfig
from tests.lowbit.codecs.test_names import install
from tests.lowbit.pipeline import toy
from tests.lowbit_run.train.runs import again, losses, tiny
from tests.processes import Ranks
from tests.refused import refused

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "codecs.md"
SHAPE = torch.Size((2, 3, 8))


def train_in_parts(folder: str, config: TrainConfig, steps: int) -> tuple[list[float], list[float]]:
    """Losses of a run, and of one that ends in the middle and goes on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(names, "outside", inspect.unwrap(names.outside))  # not cached
        whole = losses(config)
        parts = {"output": config.run.output + "-in-parts", "checkpoint_every": steps // 2}
        first = losses(again(config, run=parts | {"steps": steps // 2}))
        allowed = {"resume": True, "overwrite": False, "allow_change": ["run.steps"]}
        return whole, [*first[:-1], *losses(again(config, run=parts | allowed))]


def test_the_example_of_the_page_trains_and_resumes(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    [example] = (b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "class RunningMean(" in b)
    install(monkeypatch, tmp_path, "running", {"running-mean": "running_mean:RunningMean"}, running_mean=example)
    boundary = {"forward": "running-mean", "backward": "RunningMean(rate=0.5)"}
    config = tiny(tmp_path / "run", pipeline=boundary, run={"steps": 4})
    for whole, parts in ranks.run(train_in_parts, str(tmp_path), config, 4):
        assert parts == whole


class TheirSession(Session):
    """Numbers as they are, and the sum of all that crossed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.total = torch.zeros(())

    def _encode(self, x: Tensor, payload: Tensor, training: bool) -> None:
        payload.copy_(x.bfloat16().contiguous().view(-1).view(torch.uint8))
        self._follow(payload, training)

    def _decode(self, payload: Tensor, out: Tensor, training: bool) -> None:
        out.copy_(payload.view(torch.bfloat16).view(out.shape))
        self._follow(payload, training)

    def _follow(self, payload: Tensor, training: bool) -> None:
        if training:
            self.total.add_(payload.view(torch.bfloat16).float().sum())  # in place: a state must not follow it

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


@dataclass(frozen=True, kw_only=True)
class Theirs(StatefulCodec):
    session: type[Session] = field(default=TheirSession, repr=False)
    changes: tuple[tuple[str, Callable[..., Any]], ...] = field(default=(), repr=False)  # of the session's methods

    def format_nbytes(self, shape: Any) -> int:
        return 2 * prod(shape)

    def open(self, *, shape: Any, dtype: torch.dtype, device: Any = "cpu") -> Session:
        session = self.session(self, torch.Size(shape), dtype, torch.device(device))
        for name, change in self.changes:
            setattr(session, name, change.__get__(session))
        return session


def theirs(**changes: Callable[..., Any]) -> Theirs:
    return Theirs(changes=tuple(changes.items()))


def raises(self: Any, *args: Any, **kwargs: Any) -> Any:
    return {}["mean"]


def half_written(self: Any, x: Tensor, payload: Tensor, training: bool) -> None:
    payload[::2].zero_()


def from_total(self: Any, x: Tensor, payload: Tensor, training: bool) -> None:
    """A message that depends on those before."""
    payload.copy_((x + self.total).bfloat16().contiguous().view(-1).view(torch.uint8))
    self._follow(payload, training)


ENCODE, OTHERS = ("encode", "_encode"), ("decode", "nbytes", "state_dict", "load_state_dict", "state_bytes")
WRONG: list[tuple[dict[str, Callable[..., Any]], str]] = [
    *(({name: raises}, r"encode raised KeyError: 'mean' \(test_foreign.py, line \d+, in raises\)") for name in ENCODE),
    *(({name: raises}, rf"{name} raised KeyError: 'mean' \(test_foreign.py") for name in OTHERS),
    ({"state_dict": lambda s: None}, r"state_dict returned NoneType; allowed: a dictionary"),
    ({"state_dict": lambda s: [1]}, r"state_dict returned list; allowed: a dictionary"),
    ({"state_dict": lambda s: {"a/b": 1}}, r"state_dict returned the key 'a/b'; allowed: texts without '/'"),
    ({"state_dict": lambda s: {3: 1}}, r"state_dict returned the key 3"),
    ({"state_dict": lambda s: {"x": {"y": 1}}}, r"state_dict returned dict under 'x'; allowed: tensors, numbers"),
    ({"state_dict": lambda s: {"who": id(s)}}, r"state_dict returned other values of who at the sender than at"),
    (
        {"_follow": lambda s, payload, training: s.total.add_(1)},
        r"a message with training=False changed total; ",
    ),
    ({"_encode": half_written, "_follow": lambda *_: None}, r"encode leaves bytes of its payload unwritten"),
    (
        {"_encode": from_total, "state_dict": lambda s: {}},
        r"a session that load_state_dict has restored codes the",
    ),
]


def opened(codec: Codec, about: str = "") -> Session:
    return open_session(codec, shape=SHAPE, dtype=torch.float32, device=torch.device("cpu"), about=about)


def prepared(codec: Codec) -> None:
    """Before anything is sent, as a pipeline tries it; the rest is noticed when it is called."""
    warm_up(codec, SHAPE, torch.float32, torch.device("cpu"))
    opened(codec).state_bytes()


def test_what_is_wrong_names_codec_and_method():
    rows = ((partial(prepared, theirs(**changes)), CodecError, rf"^Theirs\(\): {said}") for changes, said in WRONG)
    assert not [text for text in refused(*rows) if "\n" in text]


def test_a_codec_that_uses_one_of_theirs_is_theirs():
    session = opened(AQSGD(inner=Fails()), "here")
    session.samples = (1, 2)
    session.encode(torch.ones(SHAPE))
    with pytest.raises(CodecError, match=r"^here: AQSGD\(inner=Fails\(\)\): encode raised TypeError: no \(test_for"):
        session.encode(torch.ones(SHAPE))


@dataclass(frozen=True, kw_only=True)
class Fails(Codec):
    def format_nbytes(self, shape: Any) -> int:
        return prod(shape)

    def _encode(self, *args: Any) -> None:
        raise TypeError("no")

    def _decode(self, *args: Any) -> None:
        raise TypeError("no")


class WithFeedback(TheirSession):
    """What was rounded off is kept at the sender only, beside a generator of random numbers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rest, self.messages = torch.zeros(self.shape), 0
        self.generator = torch.Generator().manual_seed(1)

    def _encode(self, x: Tensor, payload: Tensor, training: bool) -> None:
        noise = torch.rand(x.shape, generator=self.generator) * 1e-3
        sent = (x + self.rest + noise).bfloat16()
        payload.copy_(sent.contiguous().view(-1).view(torch.uint8))
        if training:
            self.rest, self.messages = x + self.rest - sent.float(), self.messages + 1

    def _decode(self, payload: Tensor, out: Tensor, training: bool) -> None:
        out.copy_(payload.view(torch.bfloat16).view(out.shape))
        self.messages += training

    def state_dict(self) -> dict[str, Any]:
        return {"rest": self.rest, "random": self.generator.get_state(), "digest": self.messages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rest, self.messages = state["rest"], state["digest"]
        self.generator.set_state(state["random"])


def test_what_only_one_end_keeps_goes_on_too():
    codec, rows = Theirs(session=WithFeedback), torch.randn(4, *SHAPE)
    through, first, resumed = (opened(codec) for _ in range(3))
    expected = [through.encode(x) for x in rows]
    for x in rows[:2]:
        first.encode(x)
    state = first.state_dict()
    first.encode(rows[2])
    resumed.load_state_dict(state)
    assert all(torch.equal(resumed.encode(x), y) for x, y in zip(rows[2:], expected[2:], strict=True))
    prepared(codec)


def test_states_are_copies():
    session = opened(theirs())
    session.load_state_dict(given := {"total": torch.zeros(())})
    state = session.state_dict()
    session.encode(torch.ones(SHAPE))
    assert given["total"] == state["total"] == 0 != session.state_dict()["total"]


def fails_between_ranks(method: str, from_step: int) -> None:
    """The method fails from a step on; in a warm-up of no use, since that is over by then."""
    calls = {"now": 0}

    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        if calls["now"] >= from_step:
            return {}["mean"]
        return getattr(TheirSession, method)(self, *args, **kwargs)

    run = toy.Run("1f1b", toy.lowbit(forward=theirs(**{method: change}), backward=toy.FP32, timeout=20))
    for step in range(3):
        calls["now"] = step
        run.train(step)


@pytest.mark.parametrize(("method", "step"), [("decode", 0), ("nbytes", 0), ("encode", 1), ("decode", 1)])
def test_an_error_is_named_on_both_ranks(ranks: Ranks, method: str, step: int):
    """In one line: the same before the first byte, and in a later step either the error or that the peer had it."""
    outcomes = toy.timely(ranks, fails_between_ranks, method, step)
    said = rf"boundary 0 forward: Theirs\(\): {method} raised KeyError: 'mean'"
    assert all(re.search(said if step else "^" + said, o.text) for o in outcomes), outcomes
    assert all(len(o.text.splitlines()) == 1 for o in outcomes)
    later = {"CodecError", "PeerError", AgreementError.__name__, "RuntimeError"}
    assert {o.kind for o in outcomes} <= (later if step else {"ValueError"})

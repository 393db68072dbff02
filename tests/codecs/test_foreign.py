"""Codecs of other packages that keep state; and what is wrong with one is a line that names it."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
from lowbit.train import TrainConfig
from tests.codecs.test_names import install
from tests.pipeline import toy
from tests.processes import Ranks
from tests.train.runs import again, losses, tiny

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "codecs.md"
SHAPE = torch.Size((2, 3, 8))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The example of the page as an installed package, in a folder on the path."""
    [example] = (b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "class RunningMean(" in b)
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "running_mean.py").write_text(example)
    install(folder, "running-mean", {"running-mean": "running_mean:RunningMean"})
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("running_mean", None)
    names.outside.cache_clear()


def train_in_parts(folder: str, config: TrainConfig, steps: int) -> tuple[list[float], list[float]]:
    """Losses of a run, and of one that ends in the middle and goes on."""
    sys.path.insert(0, folder)
    names.outside.cache_clear()
    try:
        whole = losses(config)
        parts = {"output": config.run.output + "-in-parts", "checkpoint_every": steps // 2}
        first = losses(again(config, run=parts | {"steps": steps // 2}))
        allowed = {"resume": True, "overwrite": False, "allow_change": ["run.steps"]}
        return whole, [*first[:-1], *losses(again(config, run=parts | allowed))]
    finally:
        sys.path.remove(folder)
        names.outside.cache_clear()


def test_the_example_trains_and_resumes(ranks: Ranks, package: Path, tmp_path: Path):
    boundary = {"forward": "running-mean", "backward": "RunningMean(rate=0.5)"}
    config = tiny(tmp_path / "run", pipeline=boundary, run={"steps": 4})
    for whole, parts in ranks.run(train_in_parts, str(package), config, 4):
        assert parts == whole


@dataclass(frozen=True, kw_only=True)
class Theirs(StatefulCodec):
    """Numbers as they are, and the sum of all that crossed; `changes` replaces methods of its session."""

    changes: tuple[tuple[str, Callable[..., Any]], ...] = field(default=(), repr=False)
    needs_key = False

    def format_nbytes(self, shape: Any) -> int:
        return 2 * prod(shape)

    def open(self, *, shape: Any, dtype: torch.dtype, device: Any = "cpu") -> Session:
        session = TheirSession(self, torch.Size(shape), dtype, torch.device(device))
        for name, change in self.changes:
            setattr(session, name, change.__get__(session))
        return session


class TheirSession(Session):
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


def theirs(**changes: Callable[..., Any]) -> Theirs:
    return Theirs(changes=tuple(changes.items()))


def raises(self: Any, *args: Any, **kwargs: Any) -> Any:
    return {}["mean"]


WRONG: list[tuple[dict[str, Callable[..., Any]], str]] = [
    ({"encode": raises}, r"encode raised KeyError: 'mean' \(test_foreign.py, line \d+, in raises\)"),
    ({"_encode": raises}, r"encode raised KeyError: 'mean' \(test_foreign.py, line \d+, in raises\)"),
    ({"decode": raises}, r"decode raised KeyError: 'mean' \(test_foreign.py"),
    ({"nbytes": raises}, r"nbytes raised KeyError: 'mean'"),
    ({"state_dict": raises}, r"state_dict raised KeyError: 'mean'"),
    ({"load_state_dict": raises}, r"load_state_dict raised KeyError: 'mean'"),
    ({"state_dict": lambda s: None}, r"state_dict returned NoneType; allowed: a dictionary"),
    ({"state_dict": lambda s: [1]}, r"state_dict returned list; allowed: a dictionary"),
    ({"state_dict": lambda s: {"a/b": 1}}, r"state_dict returned the key 'a/b'; allowed: texts without '/'"),
    ({"state_dict": lambda s: {"choice": 1}}, r"state_dict returned the key 'choice'"),
    ({"state_dict": lambda s: {3: 1}}, r"state_dict returned the key 3"),
    ({"state_dict": lambda s: {"x": {"y": 1}}}, r"state_dict returned dict under 'x'; allowed: tensors, numbers"),
    ({"state_dict": lambda s: {"who": id(s)}}, r"state_dict returned other values of who at the sender than at"),
    ({"state_bytes": raises}, r"state_bytes raised KeyError: 'mean'"),
]


def test_what_is_wrong_names_codec_and_method():
    """Before anything is sent, as a pipeline tries it; the rest is noticed when it is called."""
    unnoticed = []
    for changes, said in WRONG:
        try:
            prepared(theirs(**changes))
            unnoticed.append(said)
        except CodecError as error:
            if not re.match(r"Theirs\(\): " + said, str(error)) or "\n" in str(error):
                unnoticed.append(f"{said}: {error}")
    assert not unnoticed


def prepared(codec: Codec) -> None:
    warm_up(codec, SHAPE, torch.float32, torch.device("cpu"))
    open_session(codec, shape=SHAPE, dtype=torch.float32, device=torch.device("cpu")).state_bytes()


def test_a_codec_that_uses_one_of_theirs_is_theirs():
    codec = AQSGD(inner=Fails())
    session = open_session(codec, shape=SHAPE, dtype=torch.float32, device=torch.device("cpu"), about="here")
    session.samples = (1, 2)
    session.encode(torch.ones(SHAPE))
    with pytest.raises(CodecError, match=r"^here: AQSGD\(inner=Fails\(\)\): encode raised TypeError: no \(test_for"):
        session.encode(torch.ones(SHAPE))


@dataclass(frozen=True, kw_only=True)
class Fails(Codec):
    def format_nbytes(self, shape: Any) -> int:
        return prod(shape)

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        raise TypeError("no")

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
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


@dataclass(frozen=True, kw_only=True)
class Feedback(Theirs):
    def open(self, *, shape: Any, dtype: torch.dtype, device: Any = "cpu") -> Session:
        return WithFeedback(self, torch.Size(shape), dtype, torch.device(device))


def test_what_only_one_end_keeps_goes_on_too():
    def opened() -> Session:
        return open_session(Feedback(), shape=SHAPE, dtype=torch.float32, device=torch.device("cpu"))

    through, first, resumed = opened(), opened(), opened()
    rows = torch.randn(4, *SHAPE)
    expected = [through.encode(x) for x in rows]
    for x in rows[:2]:
        first.encode(x)
    state = first.state_dict()
    first.encode(rows[2])
    resumed.load_state_dict(state)
    assert all(torch.equal(resumed.encode(x), y) for x, y in zip(rows[2:], expected[2:], strict=True))
    prepared(Feedback())


def test_states_are_copies():
    session = open_session(theirs(), shape=SHAPE, dtype=torch.float32, device=torch.device("cpu"))
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

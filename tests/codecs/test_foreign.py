"""Codecs of other packages that keep state; and what is wrong with one is a line that names it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.codecs import AQSGD, Codec, Session, StatefulCodec, registry
from lowbit.codecs.foreign import CodecError, open_session
from lowbit.pipeline import AgreementError, emulate_
from lowbit.pipeline.boundary import warm_up
from lowbit.train import TrainConfig
from tests.codecs.test_registry import install
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
    registry.outside.cache_clear()


def train_in_parts(folder: str, config: TrainConfig, steps: int) -> tuple[list[float], list[float]]:
    """Losses of a run, and of one that ends in the middle and goes on."""
    sys.path.insert(0, folder)
    registry.outside.cache_clear()
    try:
        whole = losses(config)
        parts = {"output": config.run.output + "-in-parts", "checkpoint_every": steps // 2}
        first = losses(again(config, run=parts | {"steps": steps // 2}))
        allowed = {"resume": True, "overwrite": False, "allow_change": ["run.steps"]}
        return whole, [*first[:-1], *losses(again(config, run=parts | allowed))]
    finally:
        sys.path.remove(folder)
        registry.outside.cache_clear()


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


def in_place(self: Any, x: Tensor, **kwargs: Any) -> Tensor:
    x.mul_(2)
    return Session.encode(self, x, **kwargs)


BYTES = 2 * SHAPE.numel()
WRONG: list[tuple[dict[str, Callable[..., Any]], str]] = [
    ({"encode": raises}, r"encode raised KeyError: 'mean' \(test_foreign.py, line \d+, in raises\)"),
    ({"_encode": raises}, r"encode raised KeyError: 'mean' \(test_foreign.py, line \d+, in raises\)"),
    ({"decode": raises}, r"decode raised KeyError: 'mean' \(test_foreign.py"),
    ({"nbytes": raises}, r"nbytes raised KeyError: 'mean'"),
    ({"max_nbytes": raises}, r"max_nbytes raised KeyError: 'mean'"),
    ({"state_dict": raises}, r"state_dict raised KeyError: 'mean'"),
    ({"load_state_dict": raises}, r"load_state_dict raised KeyError: 'mean'"),
    ({"max_nbytes": lambda s: 1.5}, r"max_nbytes returned 1.5; allowed: a number of bytes, an integer"),
    ({"nbytes": lambda s: -1}, r"nbytes returned -1; allowed"),
    ({"nbytes": lambda s: 7}, rf"nbytes returned 7; allowed: {BYTES}, the result of `max_nbytes`"),
    ({"encode": in_place}, r"encode changed the tensor that it was given"),
    ({"encode": lambda s, x, **k: None}, rf"encode returned NoneType; allowed: uint8 \({BYTES},\) on cpu"),
    ({"encode": lambda s, x, **k: x}, r"encode returned float32 \(2, 3, 8\) on cpu; allowed: uint8"),
    ({"encode": lambda s, x, **k: x.view(-1).view(torch.uint8)}, r"encode returned uint8 \(192,\) on cpu; allowed"),
    ({"encode": lambda s, x, out, **k: out.to("meta")}, r"encode returned uint8 \(96,\) on meta; allowed"),
    ({"decode": lambda s, p, **k: p}, r"decode returned uint8 \(96,\) on cpu; allowed: float32 \(2, 3, 8\) on cpu"),
    ({"decode": lambda s, p, **k: None}, r"decode returned NoneType; allowed: float32"),
    ({"decode": lambda s, p, out, **k: out.double()}, r"decode returned float64 \(2, 3, 8\)"),
    ({"state_dict": lambda s: None}, r"state_dict returned NoneType; allowed: a dictionary"),
    ({"state_dict": lambda s: [1]}, r"state_dict returned list; allowed: a dictionary"),
    ({"state_dict": lambda s: {"a/b": 1}}, r"state_dict returned the key 'a/b'; allowed: texts without '/'"),
    ({"state_dict": lambda s: {"choice": 1}}, r"state_dict returned the key 'choice'"),
    ({"state_dict": lambda s: {3: 1}}, r"state_dict returned the key 3"),
    ({"state_dict": lambda s: {"x": {"y": 1}}}, r"state_dict returned dict under 'x'; allowed: tensors, numbers"),
    ({"state_dict": lambda s: {"who": id(s)}}, r"state_dict returned other values of who at the sender than at"),
    ({"state_bytes": lambda s: None}, r"state_bytes returned None; allowed"),
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


def emulated(codec: Codec) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return emulate_(model, at=["0"], forward=codec, backward=codec), model


@pytest.mark.parametrize("method", ["encode", "decode", "state_dict", "load_state_dict"])
def test_in_an_emulation_the_boundary_is_named_too(method: str):
    emulation, model = emulated(theirs(**{method: raises}))
    with pytest.raises(CodecError, match=rf"^boundary 0 forward: Theirs\(\): {method} raised KeyError: 'mean'"):
        sent_and_restored(emulation, model)


def sent_and_restored(emulation: Any, model: nn.Module) -> None:
    model(torch.ones(3, 8))
    load(emulation, saved(emulation))


def saved(emulation: Any) -> list[dict[str, Any]]:
    """The states of both ends of both directions."""
    return [states.state_dict() for pair in emulation._pairs for states in pair.every_state()]


def load(emulation: Any, saved: list[dict[str, Any]]) -> None:
    every = [states for pair in emulation._pairs for states in pair.every_state()]
    for states, state in zip(every, saved, strict=True):
        states.load_state_dict(state)


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


def test_own_tensors_are_taken_in_and_states_are_copies():
    """A payload and a tensor that are returned rather than written; a state that the session changes in place."""

    def encode(self: Any, x: Tensor, **options: Any) -> Tensor:
        return Session.encode(self, x, **(options | {"out": None}))

    def decode(self: Any, payload: Tensor, **options: Any) -> Tensor:
        return Session.decode(self, payload, **(options | {"out": None}))

    emulation, model = emulated(theirs(encode=encode, decode=decode))
    _, same = emulated(theirs())
    for step in range(3):
        x = torch.full((3, 8), float(step))
        y = model(x)
        assert torch.equal(y, same(x))
        y.sum().backward()
        if step == 0:
            state, text = saved(emulation), str(saved(emulation))
    assert str(state) == text != str(saved(emulation))
    load(emulation, state)
    assert str(saved(emulation)) == text
    model(x)
    assert str(state) == text, "what was loaded stays as it was"


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
    _, model = emulated(Feedback())
    emulation, other = emulated(Feedback())
    rows = torch.randn(4, 3, 8)
    expected = [model(x) for x in rows]
    for x in rows[:2]:
        other(x)
    resumed, third = emulated(Feedback())
    third(rows[0])  # opens the sessions
    load(resumed, saved(emulation))
    assert all(torch.equal(third(x), y) for x, y in zip(rows[2:], expected[2:], strict=True))


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


@pytest.mark.parametrize("method", ["decode", "nbytes"])
def test_ranks_say_the_same_before_the_first_byte(ranks: Ranks, method: str):
    outcomes = toy.timely(ranks, fails_between_ranks, method, 0)
    said = rf"boundary 0 forward: Theirs\(\): {method} raised KeyError: 'mean'"
    assert [o.kind for o in outcomes] == ["ValueError"] * 2
    assert all(re.match(said, o.text) for o in outcomes), outcomes


@pytest.mark.parametrize("method", ["encode", "decode"])
def test_an_error_in_a_later_step_is_named_on_both_ranks(ranks: Ranks, method: str):
    outcomes = toy.timely(ranks, fails_between_ranks, method, 1)
    said = rf"boundary 0 forward: Theirs\(\): {method} raised KeyError: 'mean'"
    assert all(re.search(said, o.text) for o in outcomes), outcomes
    assert all(len(o.text.splitlines()) == 1 for o in outcomes)
    assert {o.kind for o in outcomes} <= {"CodecError", "PeerError", AgreementError.__name__, "RuntimeError"}

"""Token anchors: both ends predict activations from token ids, and code what is left."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.codecs import Codec, TransformQuant
from lowbit.codecs.aq_sgd.codec import AQSGD
from lowbit.pipeline import LowBitStage, TokenAnchor, emulate_
from lowbit.pipeline.anchors import Fit
from tests.lowbit.pipeline import toy
from tests.lowbit.pipeline.toy import FP32, INT4, INT6
from tests.processes import Ranks
from tests.refused import refused

TOKENS, FEATURES, LENGTH = 16, 6, 8
WARM, STEPS = 1, 5
WITHOUT = 3  # a training step without ids
MIXED: dict[int, Codec] = {0: INT4, 1: FP32, 2: INT4}


def embedding(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(1)).to(dtype)


def ids_of(step: int, rows: int = toy.ROWS * toy.MICRO_BATCHES) -> Tensor:
    return torch.randint(TOKENS, (rows, LENGTH), generator=torch.Generator().manual_seed(step))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs that are mostly what their tokens say."""
    x, target = toy.batch(step)
    out = torch.randn(FEATURES, toy.WIDTH, generator=torch.Generator().manual_seed(2))
    return embedding().float()[ids_of(step)] @ out + 0.2 * x, target


def make(renew: int = 0, **options: Any) -> dict[str, Any]:
    return {
        "anchor": TokenAnchor(embedding=embedding(), renew=renew),
        "warmup_steps": WARM,
        "backward": INT6,
        **options,
    }


def pipeline(schedule: str = "1f1b", **options: Any) -> toy.Run:
    return toy.Run(schedule, toy.lowbit(timeout=30, **options), batch=batch)


def set_tokens(run: toy.Run, ids: Tensor) -> None:
    for stage in run.stages:
        stage.set_tokens(ids)


def train(run: toy.Run, steps: range) -> list[Tensor]:
    for step in steps:
        set_tokens(run, ids_of(step))
        run.train(step)
    return run.losses


def trained(in_pipeline: bool, schedule: str, anchor: bool, options: dict[str, Any]) -> tuple[list[Tensor], int, int]:
    """Losses of training steps and of evaluations in between, bytes sent forward, and bytes of state at the end."""
    options = make(**options) if anchor else {k: v for k, v in make(**options).items() if k != "anchor"}
    stages = 2 * toy.SCHEDULES[schedule][1]
    run = pipeline(schedule, **options) if in_pipeline else toy.Emulated(batch=batch, stages=stages, **options)
    losses = []
    for step in range(STEPS):
        ids = None if step == WITHOUT else ids_of(step)
        if isinstance(run, toy.Run):
            if ids is not None:
                set_tokens(run, ids)
            run.train(step)
            set_tokens(run, ids_of(step + 100))
            losses += run.feed(*batch(step + 100), training=False)[1]
        else:
            run.train(step, tokens=ids)
            run.model.eval()
            with torch.no_grad():
                parts = [x.split(toy.ROWS) for x in (*batch(step + 100), ids_of(step + 100))]
                for x, target, tokens in zip(*parts, strict=True):
                    run.emulation.set_tokens(tokens)
                    losses.append(toy.loss_of(run.model(x), target))
            run.model.train()
    ends = run.stages if isinstance(run, toy.Run) else [run.emulation]
    traffic = [end.traffic.forward_bytes for end in ends]
    return run.losses + losses, sum(traffic), sum(end.state_bytes() for end in ends)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {"forward": TransformQuant(), "backward": None}),
        ("1f1b", {"forward": INT4, "renew": 2}),
        ("interleaved-2", {"forward": MIXED}),
    ],
    ids=["transform", "renewed", "one at full precision"],
)
def test_numbers_are_those_of_the_pipeline(ranks: Ranks, schedule: str, options: dict[str, Any]):
    outcomes = ranks.run(trained, True, schedule, True, options)
    losses, sent, state = (sum(column, type(column[0])()) for column in zip(*outcomes, strict=True))
    [(expected, expected_sent, expected_state)] = ranks.run(trained, False, schedule, True, options, ranks=1)
    assert toy.same(losses, expected)
    assert (sent, state) == (expected_sent, expected_state)
    [(without, without_sent, _)] = ranks.run(trained, False, schedule, False, {**options, "renew": 0}, ranks=1)
    warm = WARM * toy.MICRO_BATCHES
    assert toy.same(losses[:warm], without[:warm])
    assert not toy.same(losses[warm : 2 * warm], without[warm : 2 * warm])
    assert (sent > without_sent) == ("renew" in options)


def resumed(after: int, renew: int) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of the last steps, after a restart and without one."""
    run = pipeline(**make(renew, forward=TransformQuant(), backward=None, warmup_steps=2))
    train(run, range(after))
    again = run.restarted()
    again.losses, run.losses = [], []
    return train(again, range(after, STEPS)), train(run, range(after, STEPS))


@pytest.mark.parametrize(("after", "renew"), [(1, 0), (3, 0), (4, 2)])
def test_a_resumed_run_continues_as_if_it_had_not_stopped(ranks: Ranks, after: int, renew: int):
    _, (again, uninterrupted) = ranks.run(resumed, after, renew)
    assert toy.same(again, uninterrupted)
    assert len(again) == (STEPS - after) * toy.MICRO_BATCHES


def from_plain(codec: Codec) -> list[Tensor]:
    """Losses of a run whose warm-up is over when its format changes."""
    run = pipeline(**make(forward=codec))
    train(run, range(WARM))
    for stage in run.stages:
        stage.set_codecs(INT4, INT6)
    return train(run, range(WARM, STEPS))


def test_fits_are_there_when_a_plain_format_changes_to_another(ranks: Ranks):
    plain, other = (ranks.run(from_plain, codec)[1] for codec in (FP32, INT4))
    assert toy.same(plain, other)


def test_a_plain_format_keeps_the_fit_but_not_its_sums(caplog: pytest.LogCaptureFixture):
    """And says nothing of an anchor that nobody uses."""
    caplog.set_level("INFO", "lowbit.pipeline.anchors")
    ids, x = spoken(4096)
    model, emulation = identity(TokenAnchor(embedding=embedding()), forward=FP32)
    for _ in range(2):
        emulation.set_tokens(ids)
        assert torch.equal(model(x), x)
        emulation.step()
    assert emulation.state_bytes() == 2 * 2 * (FEATURES + 1) * x.shape[-1]
    assert not caplog.messages


def contradicting(kind: str) -> Any:
    run = pipeline(**make(forward=INT4))
    train(run, range(2))
    rank = run.stages[0].stage_index
    if kind == "other" or rank == 0:
        set_tokens(run, ids_of(2 + rank))
    run.train(2)


@pytest.mark.parametrize("kind", ["other", "none"])
def test_ids_that_differ_between_ranks_are_an_error(ranks: Ranks, kind: str):
    text = toy.disagreement(toy.timely(ranks, contradicting, kind, limit=100))
    assert "token ids: (8, 8) [" in text
    assert ("; none on rank 1" in text) == (kind == "none")


def refusing() -> list[Tensor]:
    run = pipeline(**make(forward=INT4))
    for shape in ((8, 7), (7, 8)):
        set_tokens(run, torch.zeros(shape, dtype=torch.int32))
        with pytest.raises(ValueError, match=r"ids of a micro-batch have shape .*allowed: .*\(2, 8\)"):
            run.train(0)
    return train(run, range(2))


def test_ids_of_another_shape_are_refused_on_all_ranks_and_training_goes_on(ranks: Ranks):
    assert all(len(losses) in (0, 2 * toy.MICRO_BATCHES) for losses in ranks.run(refusing))


def one_without() -> None:
    options = make(forward=INT4)
    if torch.distributed.get_rank():
        del options["anchor"]
    train(pipeline(**options), range(1))


def test_ranks_agree_on_the_anchor(ranks: Ranks):
    assert "token anchor: TokenAnchor(embedding=bfloat16 (16, 6) [" in toy.disagreement(ranks.outcomes(one_without))


def with_another_row() -> None:
    table = torch.randn(128, FEATURES, generator=torch.Generator().manual_seed(1)).bfloat16()
    table[101] += dist.get_rank()
    run = pipeline(**make(forward=INT4, anchor=TokenAnchor(embedding=table)))
    train(run, range(3))
    set_tokens(run, ids_of(3).clamp(min=101))
    run.train(3)


def test_ranks_compare_rows_when_their_tokens_occur(ranks: Ranks):
    """Not each row is in the description that they compare at first, nor does each token occur in the warm-up."""
    text = toy.disagreement(ranks.outcomes(with_another_row))
    assert "token ids: (8, 8) [" in text
    assert ", rows " in text


def with_another_fit() -> None:
    rows = TokenAnchor.rows
    with mock.patch.object(TokenAnchor, "rows", lambda *args: rows(*args) + dist.get_rank()):
        train(pipeline(**make(forward=INT4)), range(3))


def test_ranks_compare_what_they_fitted(ranks: Ranks):
    assert "boundary 0 forward token anchor" in toy.disagreement(ranks.outcomes(with_another_fit))


# One end of a boundary, in one process.


def a_fit(table: Tensor | None = None, renew: int = 0, channels: int = 32) -> Fit:
    anchor = TokenAnchor(embedding=embedding(torch.float32) if table is None else table, renew=renew)
    return Fit(anchor, "here", channels, torch.device("cpu"))


def spoken(count: int, noise: float = 0.1, channels: int = 32) -> tuple[Tensor, Tensor]:
    """Ids, and activations that follow from them, and noise."""
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(TOKENS, (count // LENGTH, LENGTH), generator=generator)
    out = torch.randn(FEATURES, channels, generator=torch.Generator().manual_seed(3))
    x = embedding(torch.float32)[ids] @ out + 5
    return ids, x + noise * torch.randn(x.shape, generator=generator)


def test_a_fit_predicts_what_tokens_say_whatever_sinks_and_broken_tensors():
    fit, (ids, x) = a_fit(), spoken(4096)
    expected = x.clone()
    x[:, 0] *= 1000
    fit.learn(ids, x)
    fit.learn(ids, x.index_fill(0, torch.tensor([3]), torch.nan))
    predicted = fit.predict(ids)
    assert predicted is not None
    assert torch.equal(predicted, predicted.bfloat16().float())
    inner = slice(1, None)
    error = (predicted.float() - expected)[:, inner].square().mean().sqrt()
    assert error < 0.15  # noise of 0.1, and bfloat16's steps of 0.03 near 5 to 15


def test_both_ends_get_the_same_bits_whatever_their_threads_and_order_of_tokens():
    ids, x = spoken(4096)
    fits, threads = [a_fit(), a_fit()], torch.get_num_threads()
    for count, fit in enumerate(fits, 1):
        torch.set_num_threads(count)
        fit.learn(ids, x)
    torch.set_num_threads(threads)
    first, second = (fit.state_dict() for fit in fits)
    assert torch.equal(first["sums"], second["sums"])
    whole = fits[0].predict(ids)
    pieces = [fits[1].predict(part) for part in ids.flip(0).split(1)]
    assert whole is not None
    assert torch.equal(whole, torch.cat(pieces).flip(0))  # type: ignore[arg-type]
    assert fits[0].digest() == fits[1].digest()


def test_ends_whose_processors_round_a_fit_differently_still_agree(monkeypatch: pytest.MonkeyPatch):
    """A run that resumes compares them again."""
    ids, x = spoken(4096)
    fits, solve = [a_fit(), a_fit(), a_fit()], torch.cholesky_solve
    for fit, shift in zip(fits, (0, 0, 1e-3), strict=True):
        fit.learn(ids, x + shift)
    fits[0].predict(ids)
    monkeypatch.setattr(torch, "cholesky_solve", lambda *args: solve(*args) * (1 + 1e-2))
    for fit in fits[1:]:
        fit.predict(ids)
    first, second = (fit.state_dict() for fit in fits[:2])
    assert not torch.equal(first["weights"], second["weights"])
    fits[1].load_state_dict(second)
    assert fits[0].digest() == fits[1].digest()
    assert fits[1].digest() != fits[2].digest(), "they have learned something else"
    fits[1].load_state_dict({name: value for name, value in second.items() if name != "weights"})
    assert fits[0].digest() != fits[1].digest(), "one is off"


def test_a_fit_is_off_until_it_pays(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "lowbit.pipeline.anchors")
    none, silent = a_fit(), a_fit(renew=1)
    ids, x = spoken(4096)
    silent.learn(ids, torch.randn_like(x))
    assert none.predict(ids) is None
    for step in range(3):  # and said once
        assert silent.predict(ids) is None
        silent.learn(ids, torch.randn(x.shape, generator=torch.Generator().manual_seed(step)))
    assert caplog.messages == [
        "here: token anchor is off: no activations crossed exactly with token ids",
        "here: token anchor is off: tokens leave 100 % of the activations' energy",
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert none.nbytes() == 0


def test_passes_without_ids_are_said_once(caplog: pytest.LogCaptureFixture):
    _, x = spoken(4096, channels=64)
    model, emulation = identity(TokenAnchor(embedding=embedding()))
    for _ in range(3):
        model(x)
        emulation.step()
    ends = ["boundary 0 forward: token anchor is off in passes without token ids; set_tokens gives them"] * 2
    assert [message for message in caplog.messages if "token ids" in message] == ends


def test_an_embedding_may_say_nothing_but_must_be_finite():
    ids, x = spoken(4096)
    mute = Fit(TokenAnchor(embedding=torch.zeros(TOKENS, 3)), "here", 32, torch.device("cpu"))
    mute.learn(ids, x)
    predicted = mute.predict(ids)
    if predicted is not None:  # the mean alone
        assert predicted.isfinite().all()
    broken = embedding().index_fill(0, torch.tensor([5]), torch.inf)
    fit = Fit(TokenAnchor(embedding=broken), "here", 32, torch.device("cpu"))
    with pytest.raises(ValueError, match="embedding has NaN or Inf in row 5; allowed: finite features"):
        fit.learn(torch.tensor([[4, 5]]), x[:1, :2])


def test_a_state_of_something_else_is_refused():
    fit, (ids, x) = a_fit(renew=1), spoken(4096)
    fit.learn(ids, x)
    fit.predict(ids)
    state = fit.state_dict()
    weights = state["weights"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"weights": weights[:1]}, r"weights of shape \(1, 32\); allowed: \(7, 32\)"),
        ({"weights": weights.float()}, "weights, torch.float32; allowed: torch.bfloat16"),
        ({"weights": [1.0]}, "weights, list; allowed: torch.bfloat16"),
        ({"weights": torch.full_like(weights, torch.nan)}, "weights with NaN or Inf"),
        ({"tokens": -1}, "tokens -1; allowed: a number from 0"),
        ({"energy": torch.nan}, "energy nan; allowed: a number from 0"),
        ({"energy": "much"}, "energy 'much'; allowed: a number from 0"),
        ({"tokens": 0}, "sums, seen or tokens without the others"),
        ({"more": 1}, r"state has missing or unknown entries: \['more'\]"),
    ]
    refused(*((partial(fit.load_state_dict, state | wrong), ValueError, f"here: .*{words}") for wrong, words in cases))
    without = {name: value for name, value in state.items() if name != "tokens"}
    with pytest.raises(ValueError, match=r"here: state has missing or unknown entries: \['tokens'\]"):
        fit.load_state_dict(without)
    fit.load_state_dict(state | {"sums": -state["sums"].abs(), "stale": True})
    assert fit.predict(ids) is None, "of sums that are none"
    fit.load_state_dict(state)


def test_zeros_say_nothing():
    fit = a_fit()
    fit.learn(ids_of(0), torch.zeros(*ids_of(0).shape, 32))
    assert fit.predict(ids_of(0)) is None


def test_bytes_and_what_renewal_keeps():
    ids, x = spoken(4096)
    sums, weights, table = 4 * 7 * (7 + 32) + TOKENS, 2 * 7 * 32, 2 * TOKENS * 32
    for renew, kept in ((0, 0), (3, sums)):
        fit = a_fit(renew=renew)
        fit.learn(ids, x)
        assert fit.nbytes() == sums
        fit.predict(ids)
        assert fit.nbytes() == weights + table + kept
    before = fit.predict(ids)  # type: ignore[reportPossiblyUnbound]
    fit.learn(ids, x + 1)  # counts twice as much
    after = fit.predict(ids)
    assert before is not None
    assert after is not None
    assert float((after.float() - before.float()).mean()) == pytest.approx(2 / 3, abs=0.1)


def identity(anchor: TokenAnchor, forward: Codec = INT4) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Identity())
    return model, emulate_(model, at=["0"], forward=forward, backward=INT6, anchor=anchor, warmup_steps=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_rest_is_coded_in_every_dtype_and_evaluation(dtype: torch.dtype):
    ids, x = spoken(4096, noise=0.1, channels=64)
    model, emulation = identity(TokenAnchor(embedding=embedding()))
    emulation.set_tokens(ids)
    assert torch.equal(model(x.to(dtype)), x.to(dtype))
    emulation.step()
    emulation.set_tokens(ids[:1])  # what is kept from inference mode must take new tokens outside of it
    with torch.inference_mode():
        inferred = model.eval()(x[:1].to(dtype))
    emulation.set_tokens(ids)
    y = model.train()(x.to(dtype))
    assert y.dtype == dtype
    assert torch.equal(y[:1], inferred)
    plain = (INT4.round_trip(x) - x).square().mean()
    assert (y.float() - x).square().mean() < plain / 20
    emulation.set_tokens(None)
    assert torch.equal(model(x), INT4.round_trip(x))


def test_what_is_not_coded_and_what_needs_samples():
    ids, x = spoken(4096, channels=64)
    model = nn.Sequential(nn.Identity())
    anchor = TokenAnchor(embedding=embedding())
    emulation = emulate_(model, at=["0"], forward=AQSGD(inner=INT4), backward=INT6, anchor=anchor, warmup_steps=1)
    errors = []
    for step in range(3):
        emulation.set_tokens(ids)
        emulation.set_samples(range(step % 2 * len(ids), (step % 2 + 1) * len(ids)))
        errors.append(float((model(x) - x).square().mean()))
        emulation.step()
    assert errors[0] == 0
    assert errors[1] < 1e-9
    assert errors[2] < 1e-2


def test_wrong_arguments_are_one_line():
    table, stage = embedding(), partial(LowBitStage, nn.Identity(), 0, 2, "cpu")
    anchor, wrong = TokenAnchor(embedding=table), partial(TokenAnchor, embedding=table)
    model = nn.Sequential(nn.Identity())
    emulation = emulate_(model, at=["0"], anchor=anchor, warmup_steps=1)
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (partial(TokenAnchor, embedding=3), TypeError, "embedding is 3; allowed: a floating tensor"),
        (partial(TokenAnchor, embedding=table[0]), TypeError, r"embedding is torch.bfloat16 \(6,\)"),
        (partial(TokenAnchor, embedding=nn.Embedding(4, 3).weight), ValueError, "embedding requires a gradient"),
        (partial(wrong, renew=-1), ValueError, "renew is -1"),
        (partial(stage, anchor=table), TypeError, "anchor is tensor"),
        (partial(stage, anchor=anchor), ValueError, "anchor needs exact tensors; allowed: warmup_steps"),
        (
            partial(emulation.set_tokens, torch.zeros(2, 3)),
            TypeError,
            "ids are torch.float32; allowed: a tensor of i",
        ),
        (partial(emulation.set_tokens, torch.zeros(3, dtype=torch.long)), ValueError, r"ids have shape \(3,\)"),
        (partial(emulation.set_tokens, torch.full((1, 2), 16)), ValueError, "ids are from 16 to 16; allowed: 0 to 15"),
        (partial(emulation.set_tokens, torch.full((1, 2), -1)), ValueError, "ids are from -1 to -1"),
    ]
    refused(*cases)
    emulation.set_tokens(torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"ids of a micro-batch have shape \(2, 3\); allowed: .* \(2, 4\)"):
        model(torch.zeros(2, 4, 8))

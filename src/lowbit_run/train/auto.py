"""`pipeline.forward = "auto"`: choose formats by the measured speed of the first steps and of the links.

Rank 0 simulates a step (`lowbit_run.simulate`) with the compute and coding seconds of all ranks and the measured links,
for each format of `AUTO_FORMATS`. Every boundary between two machines takes the most exact format with which a step is
about as fast as with the fastest, and every other boundary the most exact of all. Then all ranks watch the seconds for
which machines wait, summed over ranks and so the same on each: if they change for good, the links are measured and the
formats chosen again. Where coding or computing takes as long as a step, nobody waits less when a link becomes faster,
so the links are also measured about twice a minute.

On a busy machine a forecast is not enough: the system runs a process that mostly waits for its link as soon as it can,
and one that always computes only for its share of the time, so that computing takes longer with fewer bits. So a run
returns to the former formats if steps take longer than with these, and tries others again after some minutes.
"""

import functools
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lowbit.codecs import parse_pair
from lowbit.codecs.speed import coding_speed
from lowbit.wire.checksum import CHECKSUM_BYTES
from lowbit.wire.messages import gather_json
from lowbit_run.train.boundaries import AUTO_FORMATS, codecs_of, usable
from lowbit_run.train.checkpoints.save import together
from lowbit_run.train.config import FULL_PRECISION, PipelineConfig
from lowbit_run.train.layout import Pair, PipelineLayout
from lowbit_run.train.metrics import StepMetrics, Work

if TYPE_CHECKING:
    from lowbit_run.train.members import Members
    from lowbit_run.train.stages import Pipeline

_FIRST = 5  # steps before the first choice, at least; the very first compiles kernels and does not count
_USUAL = 10  # steps after a choice whose medians later steps are compared with
_CHANGES = ((3, 3.0), (5, 1.6), (20, 1.25))  # steps, and the factor by which their waiting must change a step
_LOOK_SECONDS = 30.0  # of steps after which the links are measured again, whatever the steps do
_RARELY = 10  # times as long, where formats with more bits do not exist: steps show links that become slower
_LOOK_SHARE, _SOONER_SHARE = 1 / 20, 1 / 8  # most of the time that looks may take: these, and those after a change
_OTHER_RATE = 1.5  # factor by which a link must differ from the last choice's for another choice without a change
_WORSE = 1.1  # times as long as with the former formats: after such steps, these are used again
_RETRY_SECONDS = 300.0  # of steps after such a return, until the formats are chosen by forecast again
_FRESH = 3  # steps after such a look whose durations count: those before may be of the old rate
_KEEP = 1.10  # relative to the fastest: present formats with more bits than the best stay up to this duration
_SLOWER = 1.35  # more bits must also do on links that are slower by this, so that formats do not follow a wobble


@dataclass(frozen=True, kw_only=True)
class FormatChoice:
    """The chosen formats of all boundaries, and the measurements behind them.

    Attributes:
        step: steps done before. formats: one for each boundary, from `AUTO_FORMATS`.
        predicted: seconds of a step with each format at all boundaries, and with `formats`.
        mbit: Mbit/s of each link between machines. round_trip: the longest, in seconds; None on one rank.
        share: fraction of these rates that training gets, inferred from the duration of earlier steps.
        compute: seconds of each rank in a step.
        change: duration of a step relative to that after the previous choice; None for the first.
    """

    step: int
    formats: tuple[str, ...]
    predicted: dict[str, float]
    mbit: dict[str, float]
    round_trip: float | None
    compute: list[float]
    share: float = 1.0
    change: float | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "FormatChoice":
        """Make a choice from JSON that `dataclasses.asdict` produced.

        Raises:
            KeyError, TypeError: `values` do not describe a choice.
        """
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        return cls(**{**known, "formats": tuple(values["formats"])})

    def __str__(self) -> str:
        links = ", ".join(f"{name}: {rate:,.1f} Mbit/s" for name, rate in self.mbit.items()) or "one machine"
        if self.round_trip is not None:
            links += f", {1e3 * self.round_trip:.1f} ms there and back"
        links += f", {self.share:.0%} of the rates in training" if self.share < 1 else ""
        seconds = "; ".join(f"{name}: {value:.3f} s" for name, value in self.predicted.items())
        changed = "" if self.change is None else f" (a step took {self.change:.2f} times as long as before)"
        return (
            f"formats from step {self.step + 1} on{changed}: {described(self.formats)}; links {links}; "
            f"compute {max(self.compute):.3f} s; predicted step with {seconds}"
        )


def forecast(
    layout: PipelineLayout,
    pipeline: PipelineConfig,
    timings: Sequence[Any],
    formats: Mapping[str, tuple[int, int]],
    trips: Mapping[Pair, float],
    rates: Mapping[Pair, float],
    *,
    checksum: int,
    rest: float,
    overlapped: bool,
    whole: bool = False,
) -> Callable[[Sequence[str], float], float]:
    """Return a function that predicts the seconds of a step of one pipeline.

    It takes the formats of the boundaries, and the share of the links' rates that the step gets.

    Args:
        timings: for each rank, seconds of a step: compute, work after the pipeline, and coding by format.
        formats: their sizes. trips (seconds), rates (Mbit/s): by pair of ranks. checksum: bytes. rest: seconds.
        overlapped: coding overlaps with computing. whole: no backward pass is split.
    """
    from lowbit_run.simulate import Channel, Network, actions_from
    from lowbit_run.simulate.predict import predicted_step
    from lowbit_run.simulate.step import order_of

    order = order_of(
        pipeline.schedule, ranks=layout.ranks, stages_per_rank=layout.stages_per_rank,
        microbatches=pipeline.microbatches, split=not whole,
    )  # fmt: skip
    steps = actions_from(order)
    ranks, counts = [layout.rank_of(stage) for stage in range(layout.stages)], layout.layer_counts
    compute = [
        timings[rank][0] / pipeline.microbatches * counts[stage] / sum(counts[held] for held in layout.stages_of(rank))
        for stage, rank in enumerate(ranks)
    ]
    crossing = [(ranks[i], ranks[i + 1]) for i in range(layout.stages - 1) if layout.crosses(i)]
    pairs = sorted({*crossing, *((b, a) for a, b in crossing)})

    def seconds(names: Sequence[str], share: float) -> float:
        channels = [
            Channel(
                bytes_per_second=share * rates.get(pair, math.inf) * 1e6 / 8, latency=trips[min(pair), max(pair)] / 2
            )
            for pair in pairs
        ]
        return predicted_step(
            steps, compute, ranks, Network(channels=channels, routes={pair: i for i, pair in enumerate(pairs)}),
            formats=names, sizes=formats.__getitem__, coding=lambda rank, name: timings[rank][2][name],
            checksum=checksum, optimizer=rest, overlaps_coding=overlapped,
        ).seconds  # fmt: skip

    return seconds


def pick_formats(
    predict: Callable[[tuple[str, ...], float], float],
    formats: Mapping[str, tuple[int, int]],
    crosses: Sequence[bool],
    current: tuple[str, ...] | None = None,
) -> tuple[tuple[str, ...], dict[str, float]]:
    """Pick the most exact formats that are about as fast as the fastest.

    The current formats stay if they have more bits than these and are not much slower, or fewer than these and the
    links are not fast enough by a margin.

    Args:
        predict: seconds of a step, from the format of each boundary and a factor for the rates of all links.
        formats: sizes by name, the most exact first.
        crosses: for each boundary, whether it lies between two machines; others take the most exact format.

    Returns:
        The format of each boundary; and predicted seconds with each format at all boundaries, and with the chosen ones.
    """
    from lowbit_run.simulate.predict import AS_FAST, choose_formats

    names, timed = list(formats), functools.cache(lambda mix: predict(mix, 1.0))
    uniform = {name: tuple(name if does else names[0] for does in crosses) for name in names}
    places = [i for i, does in enumerate(crosses) if does]

    def fastest(seconds: Callable[[tuple[str, ...]], float]) -> tuple[tuple[str, ...], float]:
        return choose_formats(seconds, names, places, min(uniform.values(), key=seconds), as_fast=AS_FAST)

    def nbytes(formats_of: tuple[str, ...]) -> int:
        return sum(sum(formats[name]) for name in formats_of)

    mix, best = fastest(timed)
    # More bits only if slower links would carry them, too; fewer only if they gain much: formats must not alternate.
    if current is not None and nbytes(mix) > nbytes(current):
        mix = max(current, fastest(functools.cache(lambda mix: predict(mix, 1 / _SLOWER)))[0], key=nbytes)
    elif current is not None and timed(current) <= best * _KEEP:
        mix = current
    return mix, {**{name: timed(formats_of) for name, formats_of in uniform.items()}, "these": timed(mix)}


def described(formats: Sequence[str]) -> str:
    """Describe the formats of all boundaries in a line."""
    texts, first = [], 0
    for name, same in groupby(formats):
        last = first + len(list(same)) - 1
        texts.append(f"boundary {first}{f' to {last}' if last > first else ''} {name}")
        first = last + 1
    return ", ".join(texts)


def why(choice: FormatChoice, metrics: StepMetrics | None = None) -> str:
    """Say in a few words what few bits save, or would save; `metrics`: of the last step before the choice."""
    if not choice.mbit:
        return "all ranks are on one machine, where few bits save nothing"
    seconds = {name: value for name, value in choice.predicted.items() if name != "these"}
    exact, these, link = next(iter(seconds)), choice.predicted["these"], ""
    if metrics is not None:
        used = {name: 8 * metrics.links.get(name, 0) / metrics.seconds / 1e6 for name in choice.mbit}
        name = max(used, key=lambda name: used[name] / choice.mbit[name])
        link = f"link {name} carries {used[name]:,.1f} of its {choice.mbit[name]:,.0f} Mbit/s, and "
    if set(choice.formats) == {exact}:
        saved = max(0.0, 1 - min(seconds.values()) / these)
        return f"{link}fewer bits would save {saved:.0%} of a step"
    return f"{link}a step takes {these:.2f} s by forecast, {seconds[exact]:.2f} s with {exact}"


class Watch:
    """Decides when to look at the links again, from numbers that are the same on all ranks.

    Attributes:
        former: the formats before the last choice and the seconds of a step with them; None if they are the same ones.
        returned: the last choice returned to the former formats.
    """

    def __init__(self) -> None:
        self._elapsed, self._cost = 0.0, 0.0  # seconds of steps since the last look, and seconds that it took
        self.restart()

    def restart(self, former: tuple[tuple[str, ...], float] | None = None, *, returned: bool = False) -> None:
        """Begin anew after a choice: the steps that follow are the usual ones."""
        self.former, self.returned = former, returned
        self._elapsed, self._since = 0.0, 0.0  # the second: seconds of steps since the choice
        self._steps: deque[tuple[float, float]] = deque(maxlen=max(span for span, _ in _CHANGES))
        self._count, self._looks, self._usual = 0, 0, (0.0, 0.0)

    def looked(self, seconds: float) -> None:
        self._elapsed, self._cost, self._looks = 0.0, seconds, self._looks + 1

    def note(self, seconds: float, waited: float, *, exact: bool = False) -> int | None:
        """Note a step, and return how many of the last steps have changed, if it is time to look at the links.

        Args:
            seconds: of the step, mean over ranks. waited: for messages, on the machine that waited least: if a machine
                becomes slower, the others wait for it, but if a link does, all wait.
            exact: the formats are the most exact ones.
        """
        self._elapsed += seconds
        self._since += seconds
        self._count += 1
        if self._count > 1:  # the first step compiles kernels
            self._steps.append((seconds, waited))
        after = self._count - 1 - _USUAL
        if after == 0:
            self._usual = self._medians(_USUAL)
        if after >= 0 and self._cost <= _SOONER_SHARE * self._elapsed:
            usual, usually_waited = self._usual
            if self.worse:
                return _USUAL
            for span, factor in _CHANGES:
                change = 1 + (self._medians(span)[1] - usually_waited) / usual
                if after >= span and not 1 / factor < change < factor:
                    return span
        pause = max(_LOOK_SECONDS, self._cost / _LOOK_SHARE)
        return 0 if self._elapsed >= (_RARELY * pause if exact and self._looks else pause) else None

    @property
    def worse(self) -> float | None:
        """How many times as long steps take as with the former formats, if they take much longer."""
        if self.former is None or self._usual[0] <= _WORSE * self.former[1]:
            return None
        return self._usual[0] / self.former[1]

    @property
    def retries(self) -> bool:
        """Whether the return to the former formats is so long ago that others may be chosen."""
        return self.returned and self._since >= _RETRY_SECONDS

    def seconds(self, span: int) -> float:
        """Return the seconds of the median of the last steps, or of all since the last choice if `span` is 0."""
        return self._medians(span or len(self._steps))[0]

    def change(self, span: int) -> float | None:
        """Return how many times as long as before the last steps took; None if it is not known what is usual."""
        return self.worse or (self.seconds(span) / self._usual[0] if self._usual[0] else None)

    def _medians(self, span: int) -> tuple[float, float]:
        seconds, waited = zip(*list(self._steps)[-span:], strict=True)
        return statistics.median(seconds), statistics.median(waited)


class StepTimes:
    """Seconds of this rank's steps with the same formats: compute, what follows the pipeline, and all."""

    def __init__(self) -> None:
        self.count = 0  # steps since the last choice, of which the very first compiles kernels and is not kept
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=max(span for span, _ in _CHANGES))

    def __len__(self) -> int:
        return len(self._steps)

    def forget(self) -> None:
        """Forget the steps so far: those that follow are not like them."""
        self._steps.clear()

    def restart(self) -> None:
        """Begin anew after a choice."""
        self.count = 0
        self.forget()

    def note(self, seconds: float, work: Work) -> None:
        """Note a step of this duration, and this rank's work in it."""
        passed = work.compute_seconds + work.codec_seconds + work.wait_seconds
        self._steps.append((work.compute_seconds, seconds - passed, seconds))

    def medians(self, span: int) -> tuple[float, float, float]:
        """Return medians over the last steps; `span` 0: over all."""
        compute, rest, whole = (statistics.median(values) for values in zip(*list(self._steps)[-span:], strict=True))
        return compute, rest, whole


class Candidates:
    """The formats to choose from, and what they cost.

    Attributes:
        formats: bytes of a message forward and backward by name, the most exact first. sizes: also of full precision.
        coding: seconds to encode and to decode activations, and the same for gradients, on this rank.
    """

    def __init__(self, members: "Members", width: int) -> None:
        shape = (members.config.rows, members.config.data.sequence, width)
        self.formats = usable(AUTO_FORMATS, shape)
        self.sizes = self.formats | usable((FULL_PRECISION,), shape)
        device = members.prepared.device

        def coding(text: str) -> list[float]:
            speeds = (coding_speed(codec, shape, device, seconds=0.0) for codec in parse_pair(text))
            return [4 * math.prod(shape) / speed for pair in speeds for speed in pair]

        self.coding = together(lambda: {text: coding(text) for text in self.sizes}, members.side)[members.rank]


class Auto:
    """Chooses the formats of a run; every rank makes one and calls the same methods.

    Attributes:
        choice: the last one; None before the first.
    """

    def __init__(self, members: "Members", pipeline: "Pipeline") -> None:
        self._members, self._pipeline = members, pipeline
        self.choice: FormatChoice | None = None
        self._candidates = Candidates(members, pipeline.width)
        self._times, self._watch = StepTimes(), Watch()
        self._steps_to_look: int | None = None  # steps before the next look; None: none is announced
        self._measured_steps = 0  # whose durations the next choice uses; 0: only the rates are looked at
        self._rates_rechecked = False  # whether a share of these rates was inferred again, from later steps

    def restore(self, stored: Any) -> None:
        """Take over the choice of a checkpoint, unless it has another number of boundaries or unknown formats."""
        try:
            choice = FormatChoice.of(stored)
            boundaries, known = self._members.layout.stages - 1, set(self._candidates.formats)
            fits = len(choice.formats) == boundaries and set(choice.formats) <= known
            fits = fits and choice.step >= 0 and all(rate > 0 for rate in choice.mbit.values())
        except (AttributeError, KeyError, TypeError):
            return
        if fits:
            self._use(choice)

    def due(self, metrics: StepMetrics, work: Work) -> bool:
        """Note a step and this rank's work in it; return whether to look at the links after it, the same on all ranks.

        A look is announced one step ahead: the step before it must not post receives, whose sizes may change.
        """
        times, warmup = self._times, self._members.config.codec_warmup_steps
        times.count += 1
        if times.count > 1:
            if metrics.step == warmup + 1:
                times.forget()
            times.note(metrics.seconds, work)
        if self.choice is not None and not self._members.links.pairs:  # one machine
            return False
        seconds = metrics.compute_seconds + metrics.codec_seconds + metrics.wait_seconds
        exact = self.choice is not None and set(self.choice.formats) == {next(iter(self._candidates.formats))}
        span = self._watch.note(seconds, min(metrics.waiting.values()), exact=exact)
        if self.choice is None:
            left = max(_FIRST - times.count, warmup - metrics.step)
        else:
            if self._steps_to_look is None:
                if span is None:
                    return False
                self._steps_to_look, self._measured_steps = 2, span  # the step in between posts no receives
            self._steps_to_look = left = self._steps_to_look - 1
        self._pipeline.look_ahead(left != 1)
        return left <= 0

    def looked(self, mbit: Mapping[str, float], seconds: float) -> bool:
        """Note measured Mbit/s of links and the seconds that this took; return whether to choose formats now."""
        assert self.choice is not None
        before = self.choice.mbit
        factors = [max(rate / before[name], before[name] / rate) for name, rate in mbit.items() if name in before]
        self._watch.looked(max(gather_json(seconds, self._members.side)))
        self._steps_to_look = None
        other = max(factors, default=1.0) >= _OTHER_RATE
        if other:  # which explains other durations
            self._watch.former = None
        if not self._measured_steps and other:
            self._times.forget()
            self._steps_to_look, self._measured_steps, self._rates_rechecked = _FRESH, _FRESH, False
        elif not self._measured_steps and (
            self._watch.retries or (self.choice.share < 1 and not self._rates_rechecked)
        ):
            # The steps may have been long for another reason. Only once, or formats would go back and forth.
            self._measured_steps, self._rates_rechecked = len(self._times), True
        self._pipeline.look_ahead(True)
        return bool(self._measured_steps) and self._steps_to_look is None

    def adopt(
        self, step: int, trips: Sequence[Mapping[Pair, float]], rates: Mapping[Pair, float], mbit: dict[str, float]
    ) -> FormatChoice:
        """Let rank 0 choose the formats after `step` steps, and use them on all ranks.

        Args:
            trips: for each pipeline, seconds of a round trip by pair of its ranks.
            rates: Mbit/s by (sender, receiver) ranks of the run. mbit: the same by link.
        """
        from lowbit_run.simulate.predict import share_of_rates

        side, config, layout = self._members.side, self._members.config, self._members.layout
        ranks, boundaries, candidates = layout.ranks, layout.stages - 1, self._candidates
        start = FULL_PRECISION if step <= config.codec_warmup_steps else AUTO_FORMATS[0]
        before = (start,) * boundaries if self.choice is None else self.choice.formats
        back = self._watch.former if self._watch.worse else None
        compute, rest, measured = self._times.medians(self._measured_steps)  # all for the first choice
        timings = gather_json([compute, rest, candidates.coding], side)
        decided: Any = None
        if self._members.rank == 0:
            forecasts = [
                forecast(
                    layout, config.pipeline, timings[first : first + ranks], candidates.sizes,
                    trips[first // ranks], {(a - first, b - first): rate for (a, b), rate in rates.items()},
                    checksum=CHECKSUM_BYTES * config.run.checksums,
                    rest=min(rest for _, rest, _ in timings), overlapped=self._members.prepared.device.type == "cuda",
                    whole=config.checkpoints,
                )
                for first in range(0, len(timings), ranks)
            ]  # fmt: skip

            def seconds(mix: Sequence[str], share: float) -> float:
                return max(predict(mix, share) for predict in forecasts)

            share = share_of_rates(lambda share: seconds(before, share), measured)
            # Within a machine, few bits save nothing, and the durations of coding are too noisy to decide.
            rank_of = layout.rank_of
            linked = [
                any((first + rank_of(i), first + rank_of(i + 1)) in rates for first in range(0, len(timings), ranks))
                for i in range(boundaries)
            ]
            formats, predicted = pick_formats(
                lambda mix, factor: seconds(mix, share * factor), candidates.formats, linked,
                None if self.choice is None else before,
            )  # fmt: skip
            if back:
                formats = back[0]
                predicted["these"] = seconds(formats, share)
            decided = asdict(
                FormatChoice(
                    step=step, formats=formats, predicted=predicted, mbit=mbit, share=share,
                    change=None if self.choice is None else self._watch.change(self._measured_steps),
                    round_trip=max(max(pipeline.values()) for pipeline in trips),
                    compute=[compute for compute, *_ in timings],
                )
            )  # fmt: skip
        decided = gather_json(decided, side)[0]
        choice = FormatChoice.of(decided)
        # After a warm-up: the most exact format takes no longer than full precision.
        left = (AUTO_FORMATS[0],) * boundaries if self.choice is None else before
        former = None
        if self._members.links.pairs and not back and left != choice.formats:
            former = left, self._watch.seconds(self._measured_steps)
        same = self.choice is not None and before == choice.formats
        self._use(choice, same=same)
        self._watch.restart(former, returned=bool(back))
        return choice

    def _use(self, choice: FormatChoice, *, same: bool = False) -> None:
        self.choice, self._steps_to_look, self._measured_steps = choice, None, 0
        self._times.restart()
        if not same:
            self._pipeline.use_codecs(codecs_of(choice.formats))
        self._pipeline.look_ahead(True)

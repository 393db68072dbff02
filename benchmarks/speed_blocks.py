"""Texts of pages that come from the records of `make speeds`: tables between marks, and sentences.

The wording follows the numbers: which format is fastest, and where few bits gain nothing, is read from the record.
"""

import csv
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.speed_records import Missing, Records
from lowbit_lab.bench.settings import link_name
from lowbit_run.report import Report, Row

PIPELINE, CODECS, PREDICTIONS = (f"docs/results/{name}.md" for name in ("pipeline", "codecs", "predictions"))
README, INDEX, FIRST_RUN, TWO_PCS = (
    "README.md",
    "docs/results/index.md",
    "docs/start/first-run.md",
    "docs/start/two-pcs.md",
)
STOCK = ("stock-fp32", "stock-bf16")
PUBLISHED, BY_TOKEN = "tah-quant-published", "tah-quant-published-token"
SIX, INT8 = "TAHQuant(high_bits=6, low_bits=5)", "int8 / int8"
FEWER = [f"TransformQuant(bits={a}) / TransformQuant(bits={b}, step='message')" for a, b in ((2.7, 1.8), (2.0, 1.5))]
FORMATS = ("fp32", "bf16", INT8, "int4", "aq-sgd", PUBLISHED, BY_TOKEN, "tah-quant", SIX, "transform", *FEWER, "auto")
"""Boundaries of `LowBitStage`, in the order of the tables."""
NAMES = {
    "stock-fp32": "PyTorch's stage, FP32", "stock-bf16": "PyTorch's stage, BF16", "fp32": "FP32", "bf16": "BF16",
    INT8: "INT8 both ways", "int4": "INT4", "int8": "INT8", "fp8": "FP8", "aq-sgd": "AQ-SGD, 4 bits",
    PUBLISHED: "TAH-Quant as published, by tile (v2)", BY_TOKEN: "TAH-Quant as published, by token (v1)",
    "tah-quant": "`TAHQuant()`", SIX: f"`{SIX}`", "transform": "`TransformQuant`", "auto": "`auto`",
    FEWER[0]: "`TransformQuant`, 2.7 / 1.8 bits", FEWER[1]: "`TransformQuant`, 2.0 / 1.5 bits",
    "TransformQuant(step='message')": "`TransformQuant`, for gradients",
}  # fmt: skip
TIE = 0.02
"""Speeds that differ by less are no different: medians of a few steps vary by as much."""
SLOW, MIDDLE, FAST, ANY = "25mbit", "100mbit", "1000mbit", "unlimited"
Block = Callable[[Records], str]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    first, *others = [f"| {' | '.join(line)} |" for line in (heads, *rows)]
    return "\n".join([first, "|---" * len(heads) + "|", *others])


def details(summary: str, *parts: str) -> str:
    """Return parts that a reader unfolds."""
    return "\n\n".join([f'<details markdown="1">\n<summary>{summary}</summary>', *parts, "</details>"])


def command(*lines: str) -> str:
    """Return a command, a part of it on each line."""
    return "```bash\n" + " \\\n    ".join(lines) + "\n```"


def simd(machine: Row) -> str:
    """Return the name of the best instructions of a machine."""
    return re.sub(r"^AVX512", "AVX-512", machine["simd"])


def processor(report: Report) -> str:
    """Return the processor of a record."""
    about = report.machine
    return f"{about['cpu']} ({simd(about)}), {about['cores']} cores"


def when(report: Report) -> str:
    """Return date and commit of a record."""
    commit = report.machine.get("commit")
    return report.machine["date"] + (f", commit {commit}" if commit else "")


def title(link: str) -> str:
    """Return the name of a link in tables."""
    return link_name({"link": link})


def listed(words: Sequence[str]) -> str:
    """Return words with "and" before the last one."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def name_of(row: Row) -> str:
    """Return the name of a row's format in tables."""
    name = NAMES[row["boundary"]]
    # Until 2026-11-24 this name meant another setting.
    old = row["boundary"] == "tah-quant" and "pivot_ratio=None" in row["forward"]
    return f"{name} ([old default](../glossary.md#tah-quant))" if old else name


def speed_rows(records: Records, link: str, *, stock: bool = True) -> list[Row]:
    """Return the rows of pipeline.json over a link that have a name, in the order of the tables."""
    order = (*STOCK, *FORMATS) if stock else FORMATS
    rows = [row for row in records.report("pipeline").rows if row["link"] == link and row["boundary"] in order]
    if not rows:
        raise Missing(f"pipeline.json has no link {link}")
    return sorted(rows, key=lambda row: order.index(row["boundary"]))


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the fastest formats that a user names, the first one first: all within `TIE` of it."""
    named = [row for row in rows if row["boundary"] not in (*STOCK, "fp32", "auto", *FEWER)]
    return leading(sorted(named, key=lambda row: -row["tokens_per_second"]))


def leading(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose speed is within `TIE` of the fastest."""
    best = max(row["tokens_per_second"] for row in rows)
    return [row for row in rows if row["tokens_per_second"] >= (1 - TIE) * best]


def transform(records: Records, link: str) -> Row:
    """Return the row of `TransformQuant` over a link."""
    return records.row("pipeline", boundary="transform", link=link)


def of_race(records: Records, boundary: str, field: str) -> Any:
    """Return a value of a format in the race."""
    return records.value("race", field, boundary=boundary)


def sooner(records: Records) -> float:
    """Return how many times faster than FP32 `TransformQuant` reaches the loss."""
    return of_race(records, "transform", "speedup_fp32")


def sooner_than_bf16(records: Records) -> float:
    """Return how many times faster than BF16 `TransformQuant` reaches the loss."""
    return sooner(records) / of_race(records, "bf16", "speedup_fp32")


def loss_and_minutes(records: Records) -> list[float]:
    """Return the loss that all reach, and the minutes of `TransformQuant`, BF16 and FP32."""
    minutes = [of_race(records, name, "seconds_to_loss") / 60 for name in ("transform", "bf16", "fp32")]
    return [of_race(records, "fp32", "target_loss"), *minutes]


def more_loss(records: Records) -> float:
    """Return the last loss of `TransformQuant` minus FP32's."""
    ends = [of_race(records, name, "curve")[-1][1] for name in ("transform", "fp32")]
    return ends[0] - ends[1]


def over_fp32(loss: float) -> str:
    """Return a difference of losses in words."""
    return f"{abs(loss):.3f} {'below' if loss < 0 else 'above'}"


def codec_nanoseconds(records: Records, link: str) -> float:
    """Return the nanoseconds of all ranks for each element that crosses a boundary."""
    elements = records.value("pipeline", "bytes_per_step", boundary="fp32", link=link) / 4
    ranks = records.report("pipeline").settings["pipeline"]["ranks"]
    return 1e9 * ranks * transform(records, link)["codec_seconds"] / elements


def by_processor(records: Records) -> str:
    """Return what the codec takes on processors that were measured."""
    with (records.data / "codec-machines.csv").open(encoding="utf-8") as file:
        rows = [f"{r['ns_low']} to {r['ns_high']} ns with {simd(r)} ({r['date']})" for r in csv.DictReader(file)]
    return listed(rows)


def headline(records: Records) -> str:
    """Return what the page of pipelines begins with."""
    slow, fast = transform(records, SLOW), transform(records, FAST)
    middle = fastest(speed_rows(records, MIDDLE))
    ratio = middle[0]["tokens_per_second"] / transform(records, MIDDLE)["tokens_per_second"]
    at_middle = (
        "At 100 Mbit/s it is among the fastest, too."
        if any(row["boundary"] == "transform" for row in middle)
        else f"At 100 Mbit/s {listed([name_of(row) for row in middle])} {'is' if len(middle) == 1 else 'are'} "
        f"fastest, {ratio:.1f} times as fast as `TransformQuant`."
    )
    best = fastest(speed_rows(records, FAST))
    at_fast = f"At 1 Gbit/s {name_of(best[0])} is {best[0]['speedup_fp32']:.2f} times as fast as FP32"
    if fast not in best:
        at_fast += f", `TransformQuant` {fast['speedup_fp32']:.2f} times"
    report = records.report("pipeline")
    share = slow["codec_seconds"] / slow["seconds_per_step"]
    return "\n\n".join([
        f"At 25 Mbit/s, `TransformQuant` is {slow['speedup_fp32']:.1f} times as fast as FP32 through the same stage, "
        f"{slow['speedup_stock_fp32']:.1f} times as fast as PyTorch's stage, and reaches the same held-out loss "
        f"{sooner(records):.1f} times faster.\n{at_middle} {at_fast}.",
        f"One machine: {processor(report)}, one rank on each; torch {report.machine['torch'].partition('+')[0]}, CPU, "
        "FP32 compute, hardly anything else running. All formats of a table take turns in the same processes.",
        "**The processor matters**: the link sets FP32's speed, the processor that of `TransformQuant`. Here encoding "
        f"and decoding took {codec_nanoseconds(records, SLOW):.0f} ns an element, {100 * share:.0f} % of its step at "
        f"25 Mbit/s. Alone they took [{by_processor(records)}](codecs.md#half-the-time-for-gradients).",
    ])  # fmt: skip


def bits(row: Row) -> str:
    """Return the bits per element in both directions."""
    return "/".join(f"{b:.0f}" if b >= 16 else f"{b:.2f}" for b in (row["bits_forward"], row["bits_backward"]))


def race(records: Records) -> str:
    """Return the section about the time to the same loss."""
    rows = [records.row("race", boundary=name) for name in ("fp32", "bf16", "transform")]
    report, target = records.report("race"), rows[0]["target_loss"]
    best = min(rows, key=lambda row: row["seconds_to_loss"])
    lines = []
    for row in rows:
        values = [
            NAMES[row["boundary"]], f"{row['seconds']:.1f}", f"{row['tokens_per_second']:.0f}",
            f"{row['seconds_to_loss']:.1f}", f"{row['speedup_fp32']:.2f}x",
        ]  # fmt: skip
        rest = [f"{row['curve'][-1][1]:.4f}", bits(row), f"{row['megabytes']:.0f}"]
        lines.append([*([f"**{value}**" for value in values] if row is best else values), *rest])
    s, model = report.settings, report.settings["model"]
    texts = []
    if s["data"]["text"]:
        texts = ["--start-text valid.txt --data.text valid.txt", "--data.held_out test.txt"]
    heads = [
        "format", "seconds", "tokens/s", f"seconds to loss {target:.4f}", "speed-up to this loss",
        "final held-out loss", "bits fwd/bwd", "MB sent",
    ]  # fmt: skip
    return "\n\n".join([
        table(heads, lines),
        f"{target:.4f} is the lowest loss that all three reach. A Llama with {model['layers']} layers and dim "
        f"{model['dim']}, one seed; all runs start from the same weights, trained for {s['start_steps']} steps.",
        details(
            "The command", f"{when(report)}; [texts](../papers.md#texts).",
            command(
                f"python -m benchmarks race --link {','.join(s['links'])}",
                f"--boundary {','.join(s['boundaries'])} --precision {s['precision']}", *texts,
                f"--start-steps {s['start_steps']} --samples {s['samples']} --epochs {s['epochs']}",
                f"--evaluations {s['evaluations']} --lr {s['lr']} --eval-batches {s['eval_batches']} --json race.json",
            ),
        ),
    ])  # fmt: skip


def links_of(records: Records) -> list[str]:
    """Return the links of pipeline.json."""
    return records.report("pipeline").settings["links"]


def _speed(row: Row, best: Sequence[Row], over: str = "speedup_fp32", base: str = "fp32") -> str:
    text = f"{row['tokens_per_second']:.0f}"
    if row["boundary"] != base:
        text += f" ({row[over]:.2f}x)"
    return f"**{text}**" if row in best else text


def speed_table(records: Records, boundaries: Sequence[str]) -> str:
    """Return the tokens per second of these boundaries by link."""
    links = [link for link in links_of(records) if "/" not in link]
    columns = [[row for row in speed_rows(records, link) if row["boundary"] in boundaries] for link in links]
    lines = [[name_of(row), "by link" if row["boundary"] == "auto" else bits(row)] for row in columns[0]]
    for rows in columns:
        best = leading(rows)
        for line, row in zip(lines, rows, strict=True):
            line.append(_speed(row, best))
    return table(["format", "bits fwd/bwd", *map(title, links)], lines)


def spread_of(records: Records, links: Sequence[str]) -> str:
    """Return the range of the relative ranges of steps."""
    shares = [
        (row["tokens_per_second_high"] - row["tokens_per_second_low"]) / row["tokens_per_second"]
        for link in links for row in speed_rows(records, link) if row["boundary"] not in FEWER
    ]  # fmt: skip
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %"


def by_link(records: Records) -> str:
    """Return the section about speed by link and format."""
    report, slow = records.report("pipeline"), transform(records, SLOW)
    links, s = links_of(records), report.settings
    busy = (slow["compute_seconds"] + slow["codec_seconds"]) / slow["seconds_per_step"]
    fast = transform(records, FAST)
    full = records.value("pipeline", "speedup_stock_fp32", boundary="fp32", link=SLOW)
    low, high = [[x for x in links if (x in (SLOW, MIDDLE)) == slow] for slow in (True, False)]
    return "\n\n".join([
        speed_table(records, [name for name in (*STOCK, *FORMATS) if name not in FEWER]),
        f"- **25 Mbit/s**: compute and codec are {100 * busy:.0f} % of `TransformQuant`'s step. Overlap alone makes "
        f"FP32 {full:.1f} times as fast as PyTorch's stage.\n"
        f"- **1 Gbit/s**: the codec takes {fast['codec_seconds']:.2f} s of a step of {fast['seconds_per_step']:.1f} s, "
        "but at C = 4096 only\n  [a few percent of a decoder layer's time](codecs.md#compared-with-a-decoder-layer).",
        f"[All rows](data/pipeline.json), with compute, codec and waiting time. From the slowest to the fastest of "
        f"{slow['steps']} steps are {spread_of(records, low)} of the median on the two slow links, and "
        f"{spread_of(records, high)} on the others.",
        details(
            "Conditions and command",
            f"{when(report)}. Sequence {s['data']['sequence']}, batch {s['data']['batch']} in "
            f"{s['pipeline']['microbatches']} micro-batches. INT4, AQ-SGD and TAH-Quant send gradients in "
            "`GroupInt(bits=6, group=32, symmetric=True)`. AQ-SGD has seen all samples before. Rows without "
            "\"PyTorch's stage\" use `LowBitStage`.",
            command(
                f"lowbit bench pipeline --precision {s['precision']} --link {','.join(links)} "
                f"--rounds {s['rounds']} --steps {s['steps']} --json pipeline.json",
                f'--boundary "{",".join(s["boundaries"])}"',
            ),
        ),
    ])  # fmt: skip


def published(records: Records) -> str:
    """Return the section about TAH-Quant as published."""
    links = [SLOW, MIDDLE, "500mbit"]
    shown = ("bf16", "int4", "aq-sgd", PUBLISHED, BY_TOKEN, "tah-quant", "transform")
    rows = {
        link: {name: records.row("pipeline", boundary=name, link=link) for name in ("fp32", *shown)} for link in links
    }
    first = ["FP32, tokens/s", "32/32", *(f"{rows[link]['fp32']['tokens_per_second']:,.0f}" for link in links), ""]
    lines = [first]
    for name in shown:
        row = rows[SLOW][name]
        state = f"{row['state_bytes'] / 1e6:.1f} MB" if row["state_bytes"] else ""
        speeds = [f"{rows[link][name]['speedup_fp32']:.2f}x" for link in links]
        lines.append([name_of(row), bits(row), *speeds, state])
    return "\n\n".join([
        "The paper's formats and its baseline, AQ-SGD, in the record of [speed by link and format]"
        "(#speed-by-link-and-format); *state*: what is kept between steps. Ratios to FP32:",
        table(["format", "bits fwd/bwd", *map(title, links), "state"], lines),
        "The paper reports up to 4.3x end to end, with other models and links.",
    ])  # fmt: skip


WIDTHS = (1024, 4096)
OF_WIDTH = ("stock-fp32", "bf16", "int4", "tah-quant", "transform")


def rounded(mbit: float) -> str:
    """Format a rate with two or three digits."""
    return f"{round(mbit, 1 - int(math.log10(mbit)) if mbit < 100 else 2 - int(math.log10(mbit))):,.0f}"


def widths(records: Records) -> str:
    """Return the section about widths that GPUs train."""
    reports = {width: records.report(f"width-{width}") for width in WIDTHS}
    links = reports[WIDTHS[0]].settings["links"]
    columns = [(link, width) for link in links for width in WIDTHS]
    rows = {
        (link, width): {name: records.row(f"width-{width}", boundary=name, link=link) for name in OF_WIDTH}
        for link, width in columns
    }
    best = {at: leading([*of.values()]) for at, of in rows.items()}
    rates = {
        name: " / ".join(rounded(rows[links[-1], width][name]["codec_mbit"]) for width in WIDTHS)
        for name in OF_WIDTH if name not in STOCK
    }  # fmt: skip
    lines = [
        [
            NAMES[name], rates.get(name, "–"),
            *(_speed(rows[at][name], best[at], "speedup_stock_fp32", "stock-fp32") for at in columns),
        ]
        for name in OF_WIDTH
    ]  # fmt: skip
    firsts = {
        link: list(dict.fromkeys(NAMES[row["boundary"]] for width in WIDTHS for row in best[link, width]))
        for link in links
    }
    s = reports[WIDTHS[-1]].settings
    heads = [f"{title(link)}, {width}" if width == WIDTHS[0] else str(width) for link, width in columns]
    return "\n\n".join([
        table(["format", "codec, C = 1024 / 4096", *heads], lines),
        f"**Fastest**: {'; '.join(f'{title(link)}: {listed(names)}' for link, names in firsts.items())}. One core "
        f"codes `TransformQuant` for links of up to {rates['transform']} Mbit/s (C = 1024 / 4096), `TAHQuant()` for "
        f"{rates['tah-quant']}; on faster links give it more cores, or take a cheaper format.",
        details(
            "Conditions and command",
            f"{when(reports[WIDTHS[-1]])}; {processor(reports[WIDTHS[-1]])}. 2 ranks with one stage each, 1F1B, 4 "
            "micro-batches of 512 tokens. A thin Llama makes the recorded tensors. For C = 1024: `--model.dim 1024`.",
            command(
                f"lowbit bench pipeline --compute 50ms --link {','.join(links)} --rounds {s['rounds']} --steps "
                f"{s['steps']} --samples 4 --precision fp32",
                f"--boundary {','.join(s['boundaries'])} --model.dim 4096 --model.layers 2 --model.heads 16",
                "--model.kv_heads 4 --model.ffn 128 --pipeline.stages_per_rank 1 --pipeline.schedule 1F1B",
                "--data.batch 4 --data.sequence 512",
            ),
        ),
    ])  # fmt: skip


def fell_short(records: Records) -> str:
    """Return what few bits do not do."""
    lines = [
        f"- **The loss is not the same**: `TransformQuant` ends {over_fp32(more_loss(records))} FP32 in the first "
        "table, on one seed ([other runs](convergence.md))."
    ]
    slower = [link for link in links_of(records) if transform(records, link)["speedup_fp32"] < 1]
    if slower:
        lines.append(
            f"- **`TransformQuant` makes training slower** with this narrow model: "
            f"{listed([title(x) for x in slower])}."
        )
    return "\n".join(lines)


def ends_between(records: Records) -> list[Any]:
    """Return the fastest link on which `TransformQuant` gains 5 %, the next one, and the best format's gain there."""
    links = [link for link in links_of(records) if link != ANY]
    gains = [link for link in links if transform(records, link)["speedup_fp32"] >= 1.05]
    if not gains or gains[-1] == links[-1]:
        raise Missing(f"pipeline.json does not show where TransformQuant's gain ends: {', '.join(gains)}")
    after = links[links.index(gains[-1]) + 1]
    return [title(gains[-1]), title(after), fastest(speed_rows(records, after))[0]["speedup_fp32"]]


def formats(records: Records) -> str:
    """Return the speeds of the formats that `auto` chooses from."""
    shown = ("bf16", INT8, SIX, "transform", *FEWER, "auto")
    for name in shown:
        records.row("pipeline", boundary=name, link=SLOW)
    slow = transform(records, SLOW)
    stock, full = (
        records.value("pipeline", "tokens_per_second", boundary=b, link=SLOW) for b in ("stock-fp32", "fp32")
    )
    fewer = [records.value("pipeline", "tokens_per_second", boundary=b, link=SLOW) for b in FEWER]
    speed = slow["tokens_per_second"]
    return "\n\n".join([
        f"Tokens per second of these formats in the record of [pipeline speed](pipeline.md#speed-by-link-and-format), "
        f"{when(records.report('pipeline'))}, and the ratio to FP32:",
        speed_table(records, shown),
        f"There, at 25 Mbit/s, PyTorch's stage in FP32 reached {stock:,.0f} tokens/s, ours in FP32 {full:,.0f} "
        f"({full / stock:.2f}x), and `transform` {speed:,.0f} ({speed / stock:.1f}x); `TransformQuant` in 2.7 / 1.8 "
        f"bits is {fewer[0] / speed:.2f} times as fast as `transform`, in 2.0 / 1.5 bits {fewer[1] / speed:.2f} times.",
    ])  # fmt: skip


def nanoseconds(row: Row) -> float:
    """Return the nanoseconds to encode and decode an element."""
    size = {"float32": 4, "bfloat16": 2}[row["dtype"]]
    return size * (1 / row["encode_gb_s"] + 1 / row["decode_gb_s"])


def codecs(records: Records) -> str:
    """Return the section about the speed of codecs."""
    report = records.report("codecs")
    names = report.settings["codecs"]
    lines = []
    for name in names:
        one, half = (records.row("codecs", codec=name, dtype=dtype) for dtype in ("float32", "bfloat16"))
        ways = [f"{one[f'{way}{rest}']:{form}}" for way in ("encode", "decode")
                for rest, form in (("_gb_s", ".2f"), ("_share_of_copy", ".0%"))]  # fmt: skip
        lines.append([NAMES.get(name, f"`{name}`"), *(w.replace("%", " %") for w in ways),
                      f"{nanoseconds(one):.1f}", f"{nanoseconds(half):.1f}"])  # fmt: skip
    row = records.row("codecs", codec="transform", dtype="float32")
    s, about = report.settings, report.machine
    return "\n\n".join([
        f"{when(report)}, {about['cpu']} ({simd(about)}), one thread, torch "
        f"{about['torch'].partition('+')[0]}, float32 of ("
        f"{', '.join(map(str, s['shape']))}), cold caches; *ns*: to encode and decode an element.",
        table(["codec", "encode GB/s", "of a copy", "decode GB/s", "of a copy", "ns", "ns, bfloat16"], lines),
        f"Decoding can beat a copy, because it reads fewer bytes. **The processor matters** most to `TransformQuant`: "
        f"{nanoseconds(row):.0f} ns here; in [other measurements](#half-the-time-for-gradients) "
        f"{by_processor(records)}.",
        command(
            f"lowbit bench codecs --data gaussian --dtype float32,bfloat16 --thread 1 --shape "
            f"{','.join(map(str, s['shape']))}",
            f'--codec "{",".join(names)}" --rounds {s["rounds"]} --no-reference',
        ),
    ])  # fmt: skip


def layer(records: Records) -> str:
    """Return the section about the time of a decoder layer."""
    report = records.report("codecs-layer")
    one, half = (records.row("codecs-layer", dtype=dtype) for dtype in ("float32", "bfloat16"))
    about, shape = report.machine, report.settings["shape"]

    def speeds(row: Row) -> str:
        return f"encodes {row['encode_gb_s']:.2f} and decodes {row['decode_gb_s']:.2f} GB/s ({nanoseconds(row):.0f} ns)"

    return "\n\n".join([
        f"{when(report)}, {about['cpu']} ({simd(about)}), one thread. On float32, `TransformQuant` {speeds(one)}: "
        f"{100 * one['share_of_layer']:.1f} % of the time of forward and backward of a Llama decoder layer at C = "
        f"{shape[2]} with {shape[1]} tokens. On bfloat16 it {speeds(half)}: {100 * half['share_of_layer']:.1f} %.",
        command(
            f"lowbit bench codecs --codec transform --shape {','.join(map(str, shape))}",
            f"--data gaussian --dtype float32,bfloat16 --thread 1 --rounds {report.settings['rounds']} --no-reference "
            "--layer",
        ),
    ])  # fmt: skip


def demo(records: Records) -> str:
    """Return what `lowbit demo` has found."""
    report = records.report("demo")
    rows = [row for row in report.rows if row["boundary"] == "auto"]
    speeds = [f"{row['speedup_stock_fp32']:.1f} times as fast over {link_name(row)}" for row in rows]
    return (
        f"On {report.machine['cores']} cores of an {report.machine['cpu']} with {simd(report.machine)} "
        f"({when(report)}) lowbit trained {listed(speeds)} as PyTorch's stage in FP32."
    )


def terminals(records: Records) -> list[float]:
    """Return the tokens per second of the two terminals, in few bits and in FP32."""
    return [records.value("terminals", "tokens_per_second", boundary=name) for name in ("transform", "fp32")]


def trained_on(records: Records) -> list[Any]:
    """Return steps and text of the race."""
    s = records.report("race").settings
    text = "WikiText-2" if s["data"]["text"] else "Python's language reference"
    return [s["samples"] * s["epochs"] // s["data"]["batch"], text]


def of_published(records: Records) -> list[float]:
    """Return the speeds of TAH-Quant as published over FP32."""
    return [
        records.value("pipeline", "speedup_fp32", boundary=name, link=link)
        for link in (SLOW, MIDDLE, "500mbit") for name in (PUBLISHED, BY_TOKEN)
    ]  # fmt: skip


def machine_of_race(records: Records) -> list[Any]:
    """Return cores and processor of the race."""
    about = records.report("race").machine
    return [about["cores"], f"{about['cpu']} with {simd(about)}"]


SPEED_BLOCKS: dict[tuple[str, str], Block] = {
    (PIPELINE, "headline"): headline,
    (PIPELINE, "race"): race,
    (PIPELINE, "by link"): by_link,
    (PIPELINE, "widths"): widths,
    (PIPELINE, "published"): published,
    (PIPELINE, "fell short"): fell_short,
    (PREDICTIONS, "formats"): formats,
    (CODECS, "speed"): codecs,
    (CODECS, "layer"): layer,
    (FIRST_RUN, "demo"): demo,
}
MINUTES = "TransformQuant reaches {:.2f} after {:.1f} minutes, BF16 after {:.1f}, FP32 after {:.1f}"
SPEED_QUOTES: list[tuple[str, str, Callable[[Records], list[Any]]]] = [
    (README, "held-out loss {:.1f} times faster than FP32, and {:.1f} times faster than BF16",
     lambda r: [sooner(r), sooner_than_bf16(r)]),
    (README, "than BF16 ({} cores of an {}).", machine_of_race),
    (README, MINUTES, loss_and_minutes),
    (README, "the small Llama of the picture {} it (one seed)", lambda r: [over_fp32(more_loss(r))]),
    (PIPELINE, MINUTES, loss_and_minutes),
    (PIPELINE, "take the same {} steps of 4096 tokens with LowBitStage, on {}.", trained_on),
    (PIPELINE, "at 25 Mbit/s TransformQuant is {:.1f} times as fast as FP32, without a limit {:.2f} times",
     lambda r: [transform(r, link)["speedup_fp32"] for link in (SLOW, ANY)]),
    (INDEX, "{:.1f}x as fast as FP32 through the same stage, {:.1f}x as fast as FP32 through PyTorch's",
     lambda r: [transform(r, SLOW)[f"speedup_{name}"] for name in ("fp32", "stock_fp32")]),
    (INDEX, "the same held-out loss {:.1f}x faster", lambda r: [sooner(r)]),
    (INDEX, "INT4 encodes float32 at {:.0f} % of the rate of a copy, on one core",
     lambda r: [100 * r.value("codecs", "encode_share_of_copy", codec="int4", dtype="float32")]),
    ("docs/questions.md", "the gain of TransformQuant ends between {} and {} for narrow models on CPUs, where cheaper "
     "formats are {:.1f} times as fast as FP32", ends_between),
    ("docs/papers.md", "25 Mbit/s: {:.2f}x and {:.2f}x (v2, v1); 100: {:.2f}x and {:.2f}x; 500: {:.2f}x and {:.2f}x",
     of_published),
    (TWO_PCS, "{:,.0f} tokens a second in few bits, {:,.0f} in FP32", terminals),
    (TWO_PCS, "on two hosts of one machine, one core each ({}).", lambda r: [when(r.report("terminals"))]),
]  # fmt: skip
"""By page: a sentence with a form for each figure, and the figures."""

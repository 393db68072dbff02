"""Clusters, and the plan for one."""

import contextlib
import json
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowbit.config import ConfigError, to_toml
from lowbit.plan.cluster import Cluster, ClusterLink, Machine
from lowbit.plan.predict import MemoryShort, PipelineChoice, Predictor, best_split, search
from lowbit.plan.sizes import ModelSizes
from lowbit.train import load
from tests.command_line import invoke
from tests.train.runs import tiny

CODING = ("fp32=10/10", "bf16=8/8", "int4=5/8", "GroupInt(bits=6, group=32)=5/8")
SIZES = ModelSizes(
    layers=8, width=64, layer_parameters=10_000, first_parameters=5_000, last_parameters=5_000, tied=0,
    layer_flops=1e8, last_flops=0.0, layer_saved=1000.0, last_saved=500.0, logits=100,
)  # fmt: skip


def machine(name: str, tflops: float = 1.0, **fields) -> Machine:
    return Machine(name=name, tflops=tflops, coding=CODING, optimizer_ns=1.0, **fields)


def predictor(*machines: Machine, mbit: float = 1000.0, sizes: ModelSizes = SIZES, **link) -> Predictor:
    cluster = Cluster(machines, (ClusterLink(mbit=mbit, **link),))
    return Predictor(cluster, sizes, sequence=64, batch=8)


def plan(of: Predictor, **changes):
    options = {
        "formats": ("fp32", "bf16", "int4"), "schedules": ("1F1B", "GPipe"), "stages_per_rank": (1,),
        "microbatches": (2, 4, 8),
    }  # fmt: skip
    return search(of, **(options | changes))


def _with(**changes) -> ModelSizes:
    return ModelSizes(**(vars(SIZES) | changes))


@pytest.mark.parametrize("seed", range(20))
def test_the_split_has_the_fastest_slowest_rank_of_all(seed: int):
    draw = random.Random(seed)
    ranks, layers = draw.randint(1, 4), draw.randint(4, 9)
    speeds, extras = ([draw.choice((1, 2, 3, 5)) for _ in range(ranks)] for _ in range(2))
    most = [draw.randint(1, layers) for _ in range(ranks)]
    costs = [lambda count, s=s, e=e: s * count + e for s, e in zip(speeds, extras, strict=True)]
    every = [
        _slowest_and_sum(costs, counts)
        for counts in product(range(1, layers + 1), repeat=ranks)
        if sum(counts) == layers and all(c <= m for c, m in zip(counts, most, strict=True))
    ]
    found = best_split(costs, layers, most=most)
    if found is None:
        assert not every
    else:
        assert sum(found) == layers
        assert all(c <= m for c, m in zip(found, most, strict=True))
        assert _slowest_and_sum(costs, found) == min(every)


def _slowest_and_sum(costs, counts) -> tuple[float, float]:
    seconds = [cost(count) for cost, count in zip(costs, counts, strict=True)]
    return max(seconds), sum(seconds)


def test_what_every_micro_batch_costs_makes_them_larger():
    def of(overhead: float) -> Predictor:
        speed = {"tflops": 0.0, "layer_seconds": 1.0, "layer_tokens": 64, "layer_overhead": overhead}
        return predictor(*(machine(name, **speed) for name in "ab"), mbit=1e6)

    assert of(0.5).layer_seconds(of(0.5).machines[0], 4 * 64) == 0.5 + 4 * 0.5
    assert [plan(of(overhead))[0].choice.microbatches for overhead in (0.0, 0.9)] == [8, 2]


def test_the_first_choice_is_the_fastest_of_all_there_are():
    of = predictor(machine("a", 2.0), machine("b", 1.0), machine("c", 1.0), mbit=30, rtt_ms=5)
    best = plan(of, formats=("int4",))[0]
    every = []
    for schedule, cut, layers in product(("1F1B", "GPipe"), (2, 4, 8), product(range(1, 7), repeat=3)):
        if sum(layers) == 8:
            choice = PipelineChoice(
                schedule=schedule, stages_per_rank=1, microbatches=cut, layers=layers, formats=("int4",)
            )
            with contextlib.suppress(ConfigError) if (schedule, cut) == ("1F1B", 2) else contextlib.nullcontext():
                every.append(of.predict(choice).seconds)
    assert best.seconds == pytest.approx(min(every), rel=0.01)


def test_slow_links_take_few_bits_and_fast_ones_as_many_as_there_are():
    slow, fast = (plan(predictor(machine("a"), machine("b"), mbit=mbit))[0] for mbit in (5.0, 1e6))
    assert slow.choice.formats == ("int4",)
    assert fast.choice.formats == ("fp32",)
    assert slow.nbytes < fast.nbytes / 4


def test_each_boundary_has_the_format_of_its_link():
    links = (ClusterLink(mbit=5.0, between=("a", "b")), ClusterLink(mbit=1e6))
    cluster = Cluster((machine("a"), machine("b"), machine("c")), links)
    of = Predictor(cluster, SIZES, sequence=64, batch=8)
    assert plan(of)[0].choice.formats == ("int4", "fp32")


def test_more_bits_cost_a_hundredth_of_the_speed_at_most(monkeypatch: pytest.MonkeyPatch):
    """Not one for the format of all boundaries, and another for those of single ones."""
    of = predictor(machine("a"), machine("b"), machine("c"))
    predict, cost = of.predict, {"fp32": 1.018, "bf16": 1.009, "int4": 1.0}

    def predicted(choice: PipelineChoice) -> Any:
        names = choice.formats * (2 if len(choice.formats) == 1 else 1)
        return replace(predict(choice), step=SimpleNamespace(seconds=max(map(cost.__getitem__, names))))

    monkeypatch.setattr(of, "predict", predicted)
    best, *others = plan(of)
    assert set(best.choice.formats) == {"bf16"}
    assert best.seconds <= 1.01 * min(each.seconds for each in others)


def test_memory_bounds_the_layers_of_a_machine():
    choice = PipelineChoice(schedule="GPipe", stages_per_rank=1, microbatches=4, layers=(2, 6))
    roomy = predictor(machine("a"), machine("b"))
    need = roomy.rank_bytes(choice, (2, 6), 0)
    small = predictor(machine("a", memory=str(int(need))), machine("b"))
    assert plan(small, schedules=("GPipe",), microbatches=(4,))[0].choice.layers == (2, 6)
    with pytest.raises(MemoryShort, match="machine 'a' has 0.0 MB and needs"):
        plan(predictor(machine("a", memory="1kb"), machine("b")))
    with pytest.raises(MemoryShort, match="machine 'a' has"):
        small.predict(PipelineChoice(schedule="GPipe", stages_per_rank=1, microbatches=4, layers=(3, 5)))


def test_rows_of_a_tied_embedding_cross_the_link():
    """In bf16, there and back; the first rank has no optimizer for its copy, and the last one knows the copy."""
    tied, own = (predictor(machine("a"), machine("b"), mbit=1, sizes=_with(tied=tied)) for tied in (64 * 60, 0))
    choice = PipelineChoice(schedule="1F1B", stages_per_rank=1, microbatches=2)
    one_way = 60 * 64 * 2 + 8  # 512 tokens of 60
    extra = tied.predict(choice).seconds - own.predict(choice).seconds
    assert extra == pytest.approx(2 * one_way * 8 / 1e6, rel=0.01)
    assert tied.predict(choice).nbytes - own.predict(choice).nbytes == 2 * one_way
    memory = [of.predict(choice).memory for of in (tied, own)]
    assert [a - b for a, b in zip(*memory, strict=True)] == [-8 * 64 * 60, 4 * 64 * 60]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages_per_rank": (9,), "schedules": ("LoopedBFS",)}, "the pipeline has 18 stages .* the model 8"),
        ({"microbatches": (3,)}, "data.batch is 8; allowed: a multiple of 3"),
        ({"schedules": ("ZBVZeroBubble",)}, "stages_per_rank is 1; allowed with ZBVZeroBubble: 2"),
    ],
)
def test_what_is_impossible_is_said_in_one_line(changes, message: str):
    with pytest.raises(ConfigError, match=message):
        plan(predictor(machine("a"), machine("b")), **changes)


CLUSTER = """
[[machine]]
name = "fast"
tflops = 0.2
optimizer_ns = 2
coding = ["fp32=7/7", "bf16=5/5", "int4=5/8", "GroupInt(bits=6, group=32)=5/8"]

[[machine]]
name = "slow"
tflops = 0.1
optimizer_ns = 2
coding = ["fp32=7/7", "bf16=5/5", "int4=5/8", "GroupInt(bits=6, group=32)=5/8"]

[[link]]
mbit = 20
rtt_ms = 10
"""


def test_the_command_writes_what_train_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("cluster.toml").write_text(CLUSTER)
    mixed = "int4 / GroupInt(bits=6, group=32)"
    model = ["--model.dim", "32", "--model.heads", "2", "--model.layers", "6", "--data.sequence", "32"]
    words = ["--format", f"{mixed},fp32", "--schedule", "1F1B", "--data.batch", "8", "--tokens", "100000", *model]
    result = invoke("plan", "pipeline", "cluster.toml", "--output", "run.toml", "--json", "plan.json", *words)
    assert result.exit_code == 0, result.output
    rows = json.loads(Path("plan.json").read_text())["rows"]
    first = rows[0]
    assert (first["formats"], first["steps"], sum(first["layers"])) == ([mixed], 391, 6)
    assert first["layers"][0] > first["layers"][1]
    assert first["rank_layers"] == [[layers] for layers in first["layers"]]
    assert first["warmup_steps"] == 97
    assert [row["choice"] for row in rows] == [1, 2, None]
    assert sorted(row["formats"] for row in rows) == [["bf16"], ["fp32"], [mixed]]
    assert first["hours"] == pytest.approx(
        (97 * rows[1]["seconds_per_step"] + 294 * first["seconds_per_step"]) / 3600, rel=0.2
    )
    again = ["plan", "pipeline", "cluster.toml", "--output", "run.toml", *words]
    assert invoke(*again).exit_code == 0, "nobody has changed it"
    mine = Path("run.toml").read_text() + "# mine\n"
    Path("run.toml").write_text(mine)
    assert "not written by lowbit, or was changed since; allowed: another file, or --overwrite" in invoke(*again).stderr
    assert Path("run.toml").read_text() == mine
    dry = invoke("train", "run.toml", "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert f"rank 0, layers 0 to {first['layers'][0] - 1}" in dry.stdout
    assert "GroupInt(bits=4" in dry.stdout


def test_a_recipe_says_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("cluster.toml").write_text(CLUSTER)
    changes = {"pipeline": {"warmup_steps": 3}, "optimizer": {"lr": 0.5}, "run": {"steps": 77}}
    recipe = tiny(tmp_path, model={"layers": 6}, **changes)
    Path("recipe.toml").write_text(to_toml(recipe))
    words = [
        "plan",
        "pipeline",
        "cluster.toml",
        "--recipe",
        "recipe.toml",
        "--output",
        "run.toml",
        "--schedule",
        "1F1B",
    ]
    result = invoke(*words, "--format", "int4,fp32", "--json", "plan.json")
    assert result.exit_code == 0, result.output
    first = json.loads(Path("plan.json").read_text())["rows"][0]
    planned = load("run.toml")
    assert (first["steps"], sum(first["layers"]), first["warmup_steps"]) == (77, 6, 3)
    assert (planned.model, planned.data, planned.optimizer) == (recipe.model, recipe.data, recipe.optimizer)
    assert planned.pipeline.warmup_steps == 3
    assert planned.pipeline.forward == ("int4",)
    both = invoke(*words, "--model.layers", "4").stderr
    assert both == "error: model is given, and recipe is 'recipe.toml'; allowed: one of them\n"
    assert "nothing.toml: No such file" in invoke("plan", "pipeline", "cluster.toml", "--recipe", "nothing.toml").stderr


def test_a_hugging_face_folder_and_one_machine_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import GPT2Config

    monkeypatch.chdir(tmp_path)
    GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=3, n_head=2).save_pretrained("my_model")
    Path("cluster.toml").write_text(CLUSTER.split('[[machine]]\nname = "slow"')[0])
    words = ["--model.pretrained", "my_model", "--data.sequence", "32", "--data.batch", "4", "--format", "fp32"]
    result = invoke("plan", "pipeline", "cluster.toml", "--stages-per-rank", "1", "--json", "plan.json", *words)
    assert result.exit_code == 0, result.output
    [row, plain] = json.loads(Path("plan.json").read_text())["rows"]
    assert (row["layers"], row["forward"], row["bytes_per_step"]) == ([3], [], 0)
    assert plain["formats"] == ["bf16"]


def test_impossible_clusters_are_one_line_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("cluster.toml").write_text(CLUSTER.replace("tflops = 0.1", 'tflops = 0.1\nmemory = "1kb"'))
    small = ["--model.dim", "32", "--model.heads", "2", "--data.sequence", "32", "--format", "fp32"]
    for words, message in {
        ("--model.layers", "2"): "machine 'slow' has 0.0 MB and needs",
        ("--model.layers", "1"): "the pipeline has 2 stages (2 ranks x 1), the model 1 layers",
        ("--format", "int9"): "codec is 'int9'; allowed",
    }.items():
        result = invoke("plan", "pipeline", "cluster.toml", "--stages-per-rank", "1", *small, *words)
        assert result.exit_code == 2
        assert message in result.stderr
        assert len([line for line in result.stderr.splitlines() if line.startswith("error")]) == 1, result.stderr


TWO = """
[[machine]]
name = "desk"
cores = 8
memory = "16gb"
tflops = 0.5
coding = ["transform=0.9/1.6"]

[[machine]]
name = "server"
gpus = 2
layer_seconds = 0.01
"""


def read(folder: Path, text: str) -> Cluster:
    (folder / "cluster.toml").write_text(text)
    return Cluster.read(folder / "cluster.toml")


def test_machines_and_links_are_read(tmp_path: Path):
    cluster = read(tmp_path, TWO + '[[link]]\nbetween = ["server", "desk"]\nmbit = 50\nback_mbit = 20\nrtt_ms = 40\n')
    desk, server = cluster.machines
    assert (desk.bytes, desk.ranks, server.ranks) == (16e9, 1, 2)
    assert desk.coding_speeds == {"transform": (0.9e9, 1.6e9)}
    assert [machine.name for machine in cluster.of_ranks] == ["desk", "server", "server"]
    link = cluster.link("desk", "server")
    assert link is not None
    assert (link.mbit, link.back_mbit, link.rtt_ms) == (50, 20, 40)
    assert cluster.link("server", "server") is None


def test_a_link_between_nobody_is_of_all_other_pairs(tmp_path: Path):
    third = '[[machine]]\nname = "laptop"\ntflops = 0.1\n'
    links = '[[link]]\nmbit = 10\n[[link]]\nbetween = ["desk", "server"]\nmbit = 1000\n'
    cluster = read(tmp_path, TWO + third + links)
    found = [cluster.link(*pair) for pair in (("desk", "server"), ("laptop", "desk"))]
    assert [link.mbit for link in found if link] == [1000, 10]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('[[link]]\nbetween = ["desk", "sever"]\nmbit = 1', "there is no machine 'sever'; known: desk, server"),
        ('[[link]]\nbetween = ["desk"]\nmbit = 1', "link.between is .* allowed: two machines, or nothing"),
        ('[[link]]\nbetween = ["desk", "desk"]\nmbit = 1', "link.between is .* allowed: two machines, or nothing"),
        ('[[link]]\nbetween = ["desk", "server"]', "link.mbit is missing"),
        ("[[link]]\nmbit = 0", "link.mbit is 0; allowed: more than 0"),
        ("[[link]]\nmbit = 1\n[[link]]\nmbit = 2", "two links between all other pairs"),
        ("[[link]]\nmbit = 1\nback_mbit = 2\nhalf_duplex = true", "link.half_duplex is true; allowed: one rate"),
        ("[[link]]\nmbit = 1\nmbits = 2", "unknown key link.mbits; did you mean link.mbit"),
        ('[[machine]]\nname = "desk"\ntflops = 1', "machines .* allowed: at least one, each with its own name"),
        ('[[machine]]\ntflops = 1\nname = ""', "machine.name is empty"),
        ('[[machine]]\nname = "c"', "machine 'c' has no speed; allowed: layer_seconds or tflops"),
        ('[[machine]]\nname = "c"\nlayer_seconds = 1\nlayer_overhead = 2', "machine 'c' has layer_overhead 2; allowed"),
        ('[[machine]]\nname = "c"\ntflops = 1\nmemory = "lots"', "machine 'c': memory is 'lots'; allowed: bytes"),
        ('[[machine]]\nname = "c"\ntflops = 1\ncoding = ["int4"]', "machine 'c' has coding 'int4'; allowed: such as"),
        (
            '[[link]]\nmbit = 1\nshared = "x"\n[[link]]\nbetween = ["desk", "server"]\nmbit = 2\nshared = "x"',
            "share 'x'",
        ),
        ("[machines]\na = 1", r"has machines; known: \[\[machine\]\], \[\[link\]\]"),
        ("[link]\nmbit = 1", r"has \[link\]; allowed: \[\[link\]\], once for each"),
        ("a = [", "is not TOML"),
    ],
)
def test_mistakes_are_named_in_one_line(tmp_path: Path, more: str, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, TWO + more + "\n")
    assert "\n" not in str(caught.value)


def test_a_missing_file_or_link_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="configuration file .*: No such file"):
        Cluster.read(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="the cluster has no link between desk and server"):
        read(tmp_path, TWO).link("desk", "server")
    with pytest.raises(ConfigError, match="at least one, each with its own name"):
        read(tmp_path, "")

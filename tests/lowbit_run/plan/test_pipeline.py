"""Clusters, and the plan for one."""

import json
import random
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowbit_run.config import ConfigError, to_toml
from lowbit_run.plan.cluster import Cluster, ClusterLink, Machine
from lowbit_run.plan.predict import MemoryShort, PipelineChoice, Predictor, best_split, saved_itemsize, search
from lowbit_run.plan.sizes import ModelSizes
from lowbit_run.train import load
from lowbit_run.train.config import from_mapping
from lowbit_run.train.footprint import BatchBytes, Held, Line, ModelBytes
from tests.command_line import invoke
from tests.lowbit_run.train.runs import tiny
from tests.refused import refused

CODING = ("fp32=10/10", "bf16=8/8", "int4=5/8", "GroupInt(bits=6, group=32)=5/8")


def held(elements: int) -> Held:
    """Float32 weights and gradients, and AdamW's states."""
    sizes = {"weights": 4 * elements, "gradients": 4 * elements, "optimizer": 8 * elements}
    return Held(elements=elements, trained=elements, **sizes)


def with_tied(elements: int) -> ModelSizes:
    kept = ModelBytes(
        layers=(held(10_000),) * 8, first=held(5_000), last=held(5_000), tied=held(elements), rows=4 * elements
    )
    return replace(SIZES, tied=elements, kept=kept)


NONE = Line()
SIZES = ModelSizes(
    layers=8, width=64, layer_parameters=10_000, first_parameters=5_000, last_parameters=5_000, tied=0,
    layer_flops=1e8, last_flops=0.0,
    kept=ModelBytes(layers=(held(10_000),) * 8, first=held(5_000), last=held(5_000)),
    batch=lambda saves: BatchBytes(
        layers=(Line(window=64_000),) * 8, first=NONE, middle=NONE, last=Line(window=32_000), extra=NONE,
        extra_last=Line(window=6400),
    ),
)  # fmt: skip
one_stage = partial(PipelineChoice, stages_per_rank=1)


def machine(name: str, tflops: float = 1.0, **fields) -> Machine:
    return Machine(name=name, tflops=tflops, coding=CODING, optimizer_ns=1.0, **fields)


def predictor(
    *machines: Machine, mbit: float = 1000.0, sizes: ModelSizes = SIZES, links=(), run: Any = None, **link
) -> Predictor:
    cluster = Cluster(machines, (*links, ClusterLink(mbit=mbit, **link)))
    return Predictor(cluster, sizes, from_mapping({"data": {"sequence": 64, "batch": 8}, **(run or {})}))


def plan(of: Predictor, **changes):
    options = {"formats": ("fp32", "bf16", "int4"), "schedules": ("1F1B", "GPipe"), "stages_per_rank": (1,)}
    return search(of, **(options | {"microbatches": (2, 4, 8)} | changes))


@pytest.mark.parametrize("seed", range(20))
def test_the_split_has_the_fastest_slowest_rank_of_all(seed: int):
    draw = random.Random(seed)
    ranks, layers = draw.randint(1, 4), draw.randint(4, 9)
    speeds, extras = ([draw.choice((1, 2, 3, 5)) for _ in range(ranks)] for _ in range(2))
    most = [draw.randint(1, layers) for _ in range(ranks)]
    costs = [lambda count, s=s, e=e: s * count + e for s, e in zip(speeds, extras, strict=True)]
    splits = [counts for counts in product(*(range(1, m + 1) for m in most)) if sum(counts) == layers]
    seconds = [[cost(count) for cost, count in zip(costs, counts, strict=True)] for counts in splits]
    slowest_and_sum: dict[Any, Any] = {s: (max(each), sum(each)) for s, each in zip(splits, seconds, strict=True)}
    found = best_split(costs, layers, most=most)
    assert found in (splits or [None])
    assert slowest_and_sum.get(found) == min(slowest_and_sum.values(), default=None)


def test_what_every_micro_batch_costs_makes_them_larger():
    def of(overhead: float) -> Predictor:
        speed = {"tflops": 0.0, "layer_seconds": 1.0, "layer_tokens": 64, "layer_overhead": overhead}
        return predictor(*(machine(name, **speed) for name in "ab"), mbit=1e6)

    assert of(0.5).layer_seconds(of(0.5).machines[0], 4 * 64) == 0.5 + 4 * 0.5
    assert [plan(of(overhead))[0].choice.microbatches for overhead in (0.0, 0.9)] == [8, 2]


def test_the_first_choice_is_the_fastest_of_all_there_are():
    of = predictor(machine("a", 2.0), machine("b", 1.0), machine("c", 1.0), mbit=30, rtt_ms=5)
    every = [
        of.predict(one_stage(schedule=schedule, microbatches=cut, layers=layers, formats=("int4",))).seconds
        for schedule, cut, layers in product(("1F1B", "GPipe"), (2, 4, 8), product(range(1, 7), repeat=3))
        if sum(layers) == 8 and (schedule, cut) != ("1F1B", 2)  # 1F1B refuses fewer micro-batches than ranks
    ]
    assert plan(of, formats=("int4",))[0].seconds == pytest.approx(min(every), rel=0.01)


def test_slow_links_take_few_bits_and_fast_ones_as_many_as_there_are():
    slow, fast = (plan(predictor(*map(machine, "ab"), mbit=mbit))[0] for mbit in (5.0, 1e6))
    assert (slow.choice.formats, fast.choice.formats) == (("int4",), ("fp32",))
    assert slow.nbytes < fast.nbytes / 4


def test_each_boundary_has_the_format_of_its_link():
    of = predictor(*map(machine, "abc"), links=(ClusterLink(mbit=5.0, between=("a", "b")),), mbit=1e6)
    assert plan(of)[0].choice.formats == ("int4", "fp32")


def test_more_bits_cost_a_hundredth_of_the_speed_at_most(monkeypatch: pytest.MonkeyPatch):
    """Not one for the format of all boundaries, and another for those of single ones."""
    of = predictor(*map(machine, "abc"))
    predict, cost = of.predict, {"fp32": 1.018, "bf16": 1.009, "int4": 1.0}

    def predicted(choice: PipelineChoice) -> Any:
        names = choice.formats * (2 if len(choice.formats) == 1 else 1)
        return replace(predict(choice), step=SimpleNamespace(seconds=max(map(cost.__getitem__, names))))

    monkeypatch.setattr(of, "predict", predicted)
    best, *others = plan(of)
    assert set(best.choice.formats) == {"bf16"}
    assert best.seconds <= 1.01 * min(each.seconds for each in others)


def test_memory_bounds_the_layers_of_a_machine():
    need = predictor(*map(machine, "ab")).rank_bytes(one_stage(schedule="GPipe", microbatches=4), (2, 6), 0)
    small = predictor(machine("a", memory=str(int(need))), machine("b"))
    assert plan(small, schedules=("GPipe",), microbatches=(4,))[0].choice.layers == (2, 6)
    with pytest.raises(MemoryShort, match="machine 'a' has 0.0 MB and needs"):
        plan(predictor(machine("a", memory="1kb"), machine("b")))
    with pytest.raises(MemoryShort, match="machine 'a' has"):
        small.predict(one_stage(schedule="GPipe", microbatches=4, layers=(3, 5)))


def test_layers_that_are_computed_again_take_longer():
    choice = one_stage(schedule="1F1B", microbatches=8, formats=("fp32",))
    plain, again = SIZES, replace(SIZES, passes=4, checkpoints=True)
    steps = [predictor(machine("A"), sizes=sizes).predict(choice).step for sizes in (plain, again)]
    assert steps[1].compute[0] == pytest.approx(4 / 3 * steps[0].compute[0])
    both = [predictor(machine("A"), machine("B"), mbit=1e6, sizes=sizes) for sizes in (plain, again)]
    v_shaped = PipelineChoice(schedule="ZBVZeroBubble", stages_per_rank=2, microbatches=8)
    split, whole = (set("".join(of.predict(v_shaped).step.timeline.actions.names(0))) for of in both)
    assert split & set("IW")
    assert not whole & set("IW")
    frozen = replace(SIZES, passes=2, last_passes=2)
    measured = machine("A", layer_seconds=3.0, layer_tokens=64)
    assert predictor(measured, sizes=frozen).layer_seconds(measured, 64) == 3.0, "doctor has measured the adapted layer"


def test_rows_of_a_tied_embedding_cross_the_link():
    """In bf16, there and back; the first rank has no optimizer for its copy, and the last one knows the copy."""
    tied, own = (predictor(*map(machine, "ab"), mbit=1, sizes=with_tied(tied)) for tied in (64 * 60, 0))
    choice = one_stage(schedule="1F1B", microbatches=2)
    one_way = 60 * 64 * 2 + 8  # 512 tokens of 60
    extra = tied.predict(choice).seconds - own.predict(choice).seconds
    assert extra == pytest.approx(2 * one_way * 8 / 1e6, rel=0.01)
    assert tied.predict(choice).nbytes - own.predict(choice).nbytes == 2 * one_way
    memory = [of.predict(choice).memory for of in (tied, own)]
    assert [a - b for a, b in zip(*memory, strict=True)] == [-8 * 64 * 60, (16 + 4) * 64 * 60]


def test_settings_of_the_run_change_what_is_sent():
    """The type of the saved weights, the format of a tied embedding's rows, checksums."""
    choice = one_stage(schedule="1F1B", microbatches=2)

    def of(sizes: ModelSizes = SIZES, **run: Any) -> Predictor:
        return predictor(*map(machine, "ab"), mbit=1, sizes=sizes, run=run)

    def saved(**run: Any) -> float:
        outside = of(**run).bytes_outside_steps
        return outside(choice, 0, batches=0, saved=True)

    trained = 4 * 10_000 + 5_000  # of the second rank
    assert saved() == 4 * trained
    assert saved(run={"save_dtype": "bf16"}) == saved(run={"save_dtype": "fp16"}) == 2 * trained
    exact, rows = (of(with_tied(64 * 60), pipeline={"tied_rows": name}).predict(choice) for name in ("fp32", "bf16"))
    assert exact.nbytes - rows.nbytes == 2 * 60 * 64 * 2
    assert exact.seconds > rows.seconds
    with_checksums, without = (of(run={"checksums": on}) for on in (True, False))
    messages = 2 * 2  # of two micro-batches, both ways
    assert with_checksums.predict(choice).nbytes - without.predict(choice).nbytes == 8 * messages
    evaluated = [each.bytes_outside_steps(choice, 1, batches=3, saved=False) for each in (with_checksums, without)]
    assert evaluated[0] - evaluated[1] == 2 * 3 * 2 * 8  # of three batches, with codecs and without
    samples = of(data={"sequence": 64, "batch": 8, "format": "jsonl", "text": ["answers.jsonl"]})
    text, scored = (each.bytes_outside_steps(choice, 1, batches=3, saved=False) for each in (of(), samples))
    assert scored == 1.5 * text  # also before training, without codecs


def test_saved_weights_have_the_type_of_the_pretrained_ones(tmp_path: Path):
    from transformers import GPT2Config

    GPT2Config(n_embd=32, n_layer=2, n_head=2, dtype="float16").save_pretrained(tmp_path)
    pretrained = {"model": {"pretrained": str(tmp_path)}}
    assert saved_itemsize(from_mapping(pretrained)) == 2
    assert saved_itemsize(from_mapping(pretrained | {"run": {"save_dtype": "fp32"}})) == 4
    assert saved_itemsize(from_mapping(pretrained | {"lora": {"rank": 4}, "run": {"save_dtype": "bf16"}})) == 4


def test_what_is_impossible_is_said_in_one_line():
    rows: list[tuple[dict[str, Any], str]] = [
        ({"stages_per_rank": (9,), "schedules": ("LoopedBFS",)}, "the pipeline has 18 stages .* the model 8"),
        ({"microbatches": (3,)}, "data.batch is 8; allowed: a multiple of 3"),
        ({"schedules": ("ZBVZeroBubble",)}, "stages_per_rank is 1; allowed with ZBVZeroBubble: 2"),
    ]
    of = predictor(*map(machine, "ab"))
    texts = refused(*((partial(plan, of, **changes), ConfigError, message) for changes, message in rows))
    assert not any("\n" in text for text in texts)


FAST = f'[[machine]]\nname = "fast"\ntflops = 0.2\noptimizer_ns = 2\ncoding = {json.dumps(CODING)}\n'
CLUSTER = FAST + FAST.replace("fast", "slow").replace("0.2", "0.1") + "[[link]]\nmbit = 20\nrtt_ms = 10\n"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`lowbit plan pipeline` in a folder of its own: its rows, or, where it must end with another code, its error."""
    monkeypatch.chdir(tmp_path)

    def run(words: str, *, cluster: str = CLUSTER, code: int = 0) -> Any:
        Path("cluster.toml").write_text(cluster)
        Path("plan.json").unlink(missing_ok=True)
        result = invoke("plan", "pipeline", "cluster.toml", "--json", "plan.json", *shlex.split(words))
        assert result.exit_code == code, result.output
        return result.stderr if code else json.loads(Path("plan.json").read_text())["rows"]

    return run


def test_the_command_writes_what_train_takes(command: Callable[..., Any]):
    mixed = "int4 / GroupInt(bits=6, group=32)"
    words = f"--output run.toml --format '{mixed},fp32' --schedule 1F1B --data.batch 8 --tokens 100000"
    words += " --model.dim 32 --model.heads 2 --model.layers 6 --data.sequence 32"
    rows = command(words)
    first = rows[0]
    assert (first["formats"], first["steps"], first["warmup_steps"]) == ([mixed], 391, 97)
    assert sum(first["layers"]) == 6
    assert first["layers"][0] > first["layers"][1]
    assert first["rank_layers"] == [[layers] for layers in first["layers"]]
    assert [row["choice"] for row in rows] == [1, 2, None]
    assert sorted(row["formats"] for row in rows) == [["bf16"], ["fp32"], [mixed]]
    seconds = 97 * rows[1]["seconds_per_step"] + 294 * first["seconds_per_step"]
    assert first["hours"] == pytest.approx(seconds / 3600, rel=0.2)
    command(words)  # nobody has changed the file
    ending = invoke("plan", "pipeline", "cluster.toml", *shlex.split(words)).stdout
    assert [line.split() for line in ending.splitlines()[-2:]] == [
        ["settings", "run.toml"], ["next", "lowbit", "train", "run.toml"]
    ]  # fmt: skip
    mine = Path("run.toml").read_text() + "# mine\n"
    Path("run.toml").write_text(mine)
    changed = "not written by lowbit, or was changed since; allowed: another file, or --overwrite"
    assert changed in command(words, code=2)
    assert Path("run.toml").read_text() == mine
    dry = invoke("train", "run.toml", "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert f"rank 0, layers 0 to {first['layers'][0] - 1}" in dry.stdout
    assert "GroupInt(bits=4" in dry.stdout


def test_a_recipe_says_what_is_planned(command: Callable[..., Any], tmp_path: Path):
    changes = {"pipeline": {"warmup_steps": 3}, "optimizer": {"lr": 0.5}, "run": {"steps": 77}}
    recipe = tiny(tmp_path, model={"layers": 6}, **changes)
    Path("recipe.toml").write_text(to_toml(recipe))
    words = "--recipe recipe.toml --output run.toml --schedule 1F1B"
    first = command(f"{words} --format int4")[0]
    planned = load("run.toml")
    assert (first["steps"], sum(first["layers"]), first["warmup_steps"]) == (77, 6, 3)
    assert (planned.model, planned.data, planned.optimizer) == (recipe.model, recipe.data, recipe.optimizer)
    assert (planned.pipeline.warmup_steps, planned.pipeline.forward) == (3, ("int4",))
    for option in ("model.layers 4", "data.batch 32"):  # which is the plan's default, but not the recipe's
        both = command(f"{words} --{option}", code=2)
        assert both == f"error: {option.split()[0]} is given, and recipe is 'recipe.toml'; allowed: one of them\n"
    Path("recipe.toml").write_text(to_toml(tiny(tmp_path, model={"layers": 6}, pipeline={"data_parallel": 2})))
    two = command("--recipe recipe.toml", code=2)
    assert two.startswith("error: recipe is 'recipe.toml', with pipeline.data_parallel 2; allowed: 1, since")
    elastic = {"lighthouse": "http://host:29510", "name": "a"}
    Path("recipe.toml").write_text(to_toml(tiny(tmp_path, model={"layers": 6}, elastic=elastic)))
    assert "with elastic.lighthouse 'http://host:29510'; allowed: none" in command("--recipe recipe.toml", code=2)


def test_a_plan_and_its_output_have_one_precision(command: Callable[..., Any], tmp_path: Path):
    small = "--model.dim 32 --model.heads 2 --model.layers 4 --data.sequence 32 --data.batch 4"
    small += " --output run.toml --overwrite"
    sizes = {}
    for words in ("", "--precision bf16", "--run.precision bf16"):
        sizes[words] = command(f"{small} {words}")[0]["memory_bytes"]
        assert load("run.toml").run.precision == ("bf16" if words else "auto")
    assert sizes[""] > sizes["--precision bf16"] == sizes["--run.precision bf16"]
    on_gpus = command(small, cluster=CLUSTER.replace("optimizer_ns", "gpus = 1\noptimizer_ns"))[0]["memory_bytes"]
    assert on_gpus == sizes["--precision bf16"], "as `lowbit train` will take"
    Path("recipe.toml").write_text(to_toml(tiny(tmp_path, model={"layers": 6}, run={"precision": "fp32"})))
    assert "precision is bf16, and run.precision fp32" in command("--recipe recipe.toml --precision bf16", code=2)


def test_rows_of_a_tied_embedding_keep_their_link_busy():
    """Whether the pipeline's ends are neighbours or not."""
    for names in ("ab", "abc"):
        busy, waiting = [], []
        for sizes in (SIZES, with_tied(4096)):
            found = predictor(*map(machine, names), mbit=20, sizes=sizes).predict(
                one_stage(schedule="GPipe", microbatches=4, layers=(), formats=("int4",))
            )
            busy.append(found.step.busy.max())
            waiting.append(found.step.waiting.mean())
        rows = found.tied_bytes / 2 * 8e-6 / 20
        assert busy[1] >= rows > 0
        if names == "ab":
            assert busy[1] == pytest.approx(busy[0] + rows)
        assert waiting[1] > waiting[0] + rows


def test_a_hugging_face_folder_and_one_machine_are_enough(command: Callable[..., Any]):
    from transformers import GPT2Config

    GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=3, n_head=2).save_pretrained("my_model")
    words = "--model.pretrained my_model --data.sequence 32 --data.batch 4 --format fp32 --stages-per-rank 1"
    row, plain = command(words, cluster=FAST)
    assert (row["layers"], row["forward"], row["bytes_per_step"]) == ([3], [], 0)
    assert plain["formats"] == ["bf16"]


def test_what_cannot_be_planned_is_one_line_of_the_command(command: Callable[..., Any]):
    for words, message in {
        "--format fp32 --model.layers 2": "machine 'slow' has 0.0 MB and needs",
        "--format fp32 --model.layers 1": "the pipeline has 2 stages (2 ranks x 1), the model 1 layers",
        "--format int9": "codec is 'int9'; allowed",
        "--recipe nothing.toml": "nothing.toml: No such file",
    }.items():
        if "--recipe" not in words:
            words += " --model.dim 32 --model.heads 2 --data.sequence 32 --stages-per-rank 1"
        error = command(words, cluster=CLUSTER.replace("[[link]]", 'memory = "1kb"\n[[link]]'), code=2)
        assert message in error
        assert len([line for line in error.splitlines() if line.startswith("error")]) == 1, error


TWO = (
    '[[machine]]\nname = "desk"\ncores = 8\nmemory = "16gb"\ntflops = 0.5\ncoding = ["transform=0.9/1.6"]\n'
    '[[machine]]\nname = "server"\ngpus = 2\nlayer_seconds = 0.01\n'
)


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
    assert link == ClusterLink(between=("server", "desk"), mbit=50, back_mbit=20, rtt_ms=40)
    assert cluster.link("server", "server") is None


def test_a_link_between_nobody_is_of_all_other_pairs(tmp_path: Path):
    third = '[[machine]]\nname = "laptop"\ntflops = 0.1\n'
    links = '[[link]]\nmbit = 10\n[[link]]\nbetween = ["desk", "server"]\nmbit = 1000\n'
    cluster = read(tmp_path, TWO + third + links)
    found = [cluster.link(*pair) for pair in (("desk", "server"), ("laptop", "desk"))]
    assert [link.mbit for link in found if link] == [1000, 10]


MISTAKES = [
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
    ('[[link]]\nmbit=1\nshared="x"\n[[link]]\nbetween=["desk", "server"]\nmbit=2\nshared="x"', "share 'x'"),
    ("[machines]\na = 1", r"has machines; known: \[\[machine\]\], \[\[link\]\]"),
    ("[link]\nmbit = 1", r"has \[link\]; allowed: \[\[link\]\], once for each"),
    ("a = [", "is not TOML"),
]


def test_mistakes_are_named_in_one_line(tmp_path: Path):
    texts = refused(
        *((partial(read, tmp_path, TWO + more + "\n"), ConfigError, message) for more, message in MISTAKES),
        (lambda: Cluster.read(tmp_path / "nothing.toml"), ConfigError, "configuration file .*: No such file"),
        (partial(read(tmp_path, TWO).link, "desk", "server"), ConfigError, "the cluster has no link between desk and"),
        (lambda: read(tmp_path, ""), ConfigError, "at least one, each with its own name"),
    )
    assert not any("\n" in text for text in texts)

"""From a plan to a run that has its bits."""

from pathlib import Path

from lowbit.activations import LayerPlan
from lowbit.train import TrainConfig
from lowbit.train.prepare import prepare
from lowbit.train.trainer import Trainer
from tests.command_line import invoke
from tests.processes import Ranks
from tests.train.runs import again, losses, tiny

RUN = (  # that of `tiny`, for the plan
    "--pipeline.ranks 2 --pipeline.microbatches 4 --model.dim 32 --model.layers 4 --model.heads 2 --model.ffn 64 "
    "--data.sequence 16 --data.batch 8 --error-tokens 32 --error-steps 1"
)


def trained_with(config: TrainConfig) -> tuple[list[float], set[tuple[str, int]]]:
    """Losses of a rank, and the bits of its modules by layer type."""
    (module,) = Trainer(prepare(config, ranks=2)).modules.values()
    layers = [vars(m)["_lowbit_saved"] for m in module.modules() if "_lowbit_saved" in vars(m)]
    codecs = [(layer.kind, layer.shared.codec(layer.kind, layer.name)) for layer in layers if layer.kind]
    bits = {(kind, codec.bits if codec else 16) for kind, codec in codecs}
    return losses(config), bits


def test_a_run_has_the_bits_that_were_planned(ranks: Ranks, tmp_path: Path):
    file = tmp_path / "plan.json"
    config = tiny(tmp_path)
    result = invoke("plan", "memory", *RUN.split(), "--data.text", config.data.text[0], "--out", str(file))
    assert result.exit_code == 0, result.output
    plan = LayerPlan.read(file)
    assert plan.rest[0] != plan.rest[1]
    config = again(config, activations={"plan": str(file)})
    written_out = {kind: [choice.bits[kind] for choice in plan.rest] for kind in ("norm", "mlp", "linear")}
    by_hand = again(config, activations={"plan": "", "attention": 16, **written_out})
    for stage, ((planned, bits), (expected, _)) in enumerate(
        zip(ranks.run(trained_with, config), ranks.run(trained_with, by_hand), strict=True)
    ):
        assert planned == expected
        assert bits <= set(plan.rest[stage].bits.items())
        assert {kind for kind, _ in bits} >= {"norm", "mlp"}

"""`compress_saved_`: save quantized activations for backward, and recompute the rest from them."""

from __future__ import annotations

from typing import overload

from torch import nn

from lowbit.activations.changes import Compressed, compress
from lowbit.activations.layer_plan import Applied, LayerPlan
from lowbit.activations.policy import LayerAware


@overload
def compress_saved_(model: nn.Module, policy: LayerAware | None = None, *, report: bool = True) -> Compressed: ...
@overload
def compress_saved_(model: nn.Module, policy: LayerPlan, *, report: bool = True) -> Applied: ...
def compress_saved_(
    model: nn.Module, policy: LayerAware | LayerPlan | None = None, *, report: bool = True
) -> Compressed | Applied:
    """Save a model's activations for backward in few bits; changes the model in place.

    Forward uses unrounded activations. Its results are unchanged, but for the last bits where norms and activation
    functions are computed in float32 and rounded once. Backward gets rounded inputs of norms, activation functions,
    gates, linear layers and attention, and recomputes the rest: a norm's output for the projections that follow (once
    for all of them), act(gate) * up for the layer after it. So a decoder layer saves one payload for each norm, for
    gate and up, and for q, k and v. `scaled_dot_product_attention` runs again in
    backward, from rounded q, k and v, which also gives its output again. Dropout and ReLU save a bit for each
    element. Weights are saved by reference, even where autocast casts them.
    A linear layer with a frozen weight saves no input. In evaluation mode and without gradients nothing is saved or
    coded.

    It follows the functions that run, not the modules: while the outermost module runs, every torch function is seen,
    and a tensor remembers what it was computed from, through views, slices, casts and dropout. So fused gate and up
    projections, adapters and subclasses of `nn.Linear` need nothing of their own. Norms and activation functions made
    of several functions are recognized by what they compute. Attention
    written out as products and softmax is computed again from q, k and v, too. Saved as they are: tensors of any other
    function, such as the scans of state-space models, and of autograd functions written in Python, but for
    Megatron-Core's.

    The first training pass counts, by module, what it keeps and what it would keep without compression; for that, it
    computes functions twice. `print` of the result shows the table. The log warns of functions that save more than a
    tenth of what is kept as it is.

    Call it before `torch.compile`, DDP and `fully_shard`. Sharding must keep a norm together with the linear layers
    that follow it, as wrapping whole decoder layers does. In a graph of `torch.compile` each norm, activation function
    and linear layer saves its own input, and nothing is rebuilt from what another layer saved.
    Hooks, `retain_grad` and autograd functions of yours see the gradient at the rounded tensors, wherever they are.
    Refused: second derivatives (`create_graph=True`), and, by PyTorch, `torch.func` (`grad`, `vmap`, ...) and
    forward-mode AD around the model.

    The default differs from AGoQ (arXiv 2605.00539), which stores norms, gates and other inputs in 4 bits and does not
    code attention: see `LayerAware`. `LayerAware.published()` is the paper's setting.

    Args:
        model: any module; its parameters, hooks and state_dict stay as they are.
        policy: the bits; absent: `LayerAware()`. Or a `LayerPlan` for the whole model: what is kept of each layer, some
            of which may be checkpointed.
        report: count in the first training pass; not with a `LayerPlan`, whose costs were measured beforehand.

    Raises:
        TypeError, ValueError: a model that is compressed already or has nothing to compress, or a policy whose
            `layers` match no module.
    """
    return policy.apply_(model) if isinstance(policy, LayerPlan) else compress(model, policy, report=report)

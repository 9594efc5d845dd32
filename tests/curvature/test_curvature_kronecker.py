"""Kronecker factors against their definition, written out layer by layer from autograd's own gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from dubito.errors import UnsupportedError
from dubito.likelihoods import Categorical, Gaussian
from torch import Tensor, nn

from curvature.curvature_cases import (
    BATCH,
    CASES,
    Case,
    Net,
    accumulate,
    build,
    classes,
    close,
    copied,
    dense,
    gauss_newton,
    normal,
    selections,
)
from dubito import Laplace
from dubito.core import params
from dubito.curvature import Engine, FallbackWarning, output_columns
from dubito.curvature import matrices as linalg
from dubito.curvature.structures import make_accumulator
from dubito.networks.layers import ElementwiseRows, GroupedRows, IndexRows, rule_for
from dubito.networks.selection import Selection

# factors belong to layers: an overwritten output of one would make autograd's gradient another one
every_case = pytest.mark.parametrize("name", [name for name in CASES if name != "overwritten_data"])
every_mode = pytest.mark.parametrize("mode", ["expand", "reduce"])
Call = tuple[nn.Module, Tensor, Tensor]


def recorded(case: Case) -> tuple[nn.Module, list[Call], Tensor]:
    """A copy of the model, every call of a layer with a rule (its input and output), and the outputs."""
    model, calls = copy.deepcopy(case.model), []
    for value in model.parameters():
        value.requires_grad_()

    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        inputs = args[0] if args else kwargs["input"]
        calls.append((layer, inputs.detach().clone(), output))
        return output.clone()  # what is overwritten later is the copy

    for module in model.modules():
        if rule_for(module) is not None:
            module.register_forward_hook(keep, with_kwargs=True)
    return model, calls, params.call(model, copied(case.inputs))


def columns_of(case: Case, outputs: Tensor) -> list[Tensor]:
    """Columns of the root of the output Hessian, one position at a time."""
    root = case.likelihood.hessian_root(outputs.detach(), case.targets)
    if root.ndim == 3:
        return [case.likelihood.restore(one, outputs) for one in root]
    columns = []
    for one in root:
        for position in range(one.flatten(1, -2).shape[1]):
            alone = torch.zeros_like(one).flatten(1, -2)
            alone[:, position] = one.flatten(1, -2)[:, position]
            columns.append(case.likelihood.restore(alone.reshape(one.shape), outputs))
    return columns


def gram(rows: Tensor) -> Tensor:
    return torch.einsum("ni,nj->ij", rows, rows)


def weight_block(uses: list[tuple[nn.Module, Tensor, Tensor]], mode: str) -> Tensor:
    """``(Σ g gᵀ) ⊗ (Σ a aᵀ) / n`` in the order of the stored weight, from calls with gradients ``[V, *output]``."""
    lefts, rights, count = [], [], 0
    for layer, inputs, grads in uses:
        rule = rule_for(layer)
        rows, g = rule.inputs_as_rows(layer, inputs), rule.grads_as_rows(layer, grads)
        if isinstance(rows, IndexRows):
            real = rows.ids != (-1 if rows.padding_idx is None else rows.padding_idx)
            rights.append(torch.diag(torch.bincount(rows.ids[real], minlength=rows.num_embeddings)).double()[None])
            lefts.append(gram(g[:, real].flatten(0, 1))[None])
            count += int(real.sum())
            continue
        a = rows.a if isinstance(rows, GroupedRows) else rows.a.unsqueeze(2)
        g = g if isinstance(rows, GroupedRows) else g.unsqueeze(3)
        if mode == "reduce":
            a, g = a.mean(1, keepdim=True), g.sum(2, keepdim=True)
        count += a.shape[0] * a.shape[1]
        groups = range(a.shape[2])
        rights.append(torch.stack([gram(a[:, :, k].flatten(0, 1)) for k in groups]))
        lefts.append(torch.stack([gram(g[:, :, :, k].flatten(0, 2)) for k in groups]))
    left, right = sum(lefts), sum(rights)
    layer = uses[0][0]
    if isinstance(layer, nn.Embedding):
        return torch.kron(right[0].contiguous(), left[0].contiguous()) / count
    blocks = torch.block_diag(*[torch.kron(x.contiguous(), y.contiguous()) for x, y in zip(left, right, strict=True)])
    order = torch.arange(layer.weight.numel()).reshape(layer.weight.shape)
    back = rule_for(layer).to_matrix(layer, order).flatten().argsort()
    return (blocks / count)[back][:, back]


def bias_block(uses: list[tuple[nn.Module, Tensor, Tensor]], mode: str) -> Tensor:
    total = 0
    for layer, _, grads in uses:
        axis = 2 if isinstance(layer, nn.modules.conv._ConvNd) else -1
        rows = grads.movedim(axis, -1)
        rows = rows.flatten(2, -2) if rows.ndim > 3 else rows.unsqueeze(2)
        rows = rows.sum(2, keepdim=True) if mode == "reduce" else rows
        total = total + gram(rows.flatten(0, 2))
    return total


def definition(case: Case, mode: str) -> dict[str, Tensor]:
    """The block of every trainable parameter."""
    model, calls, outputs = recorded(case)
    columns = columns_of(case, outputs)
    gradients = []
    for *_, output in calls:
        grads = [torch.autograd.grad(outputs, output, c, retain_graph=True, allow_unused=True)[0] for c in columns]
        gradients.append(torch.stack([torch.zeros_like(output) if g is None else g for g in grads]))
    everything = Selection.all_of(case.model)
    diagonal = everything.fill(gauss_newton(case, everything).diagonal())
    blocks = {}
    for name, value in model.named_parameters():
        if name not in everything.names:
            continue
        uses = [
            (layer, inputs, grads)
            for (layer, inputs, _), grads in zip(calls, gradients, strict=True)
            if any(value is own for own in layer.parameters())
        ]
        kinds = {type(layer) for layer, *_ in uses}
        normal = kinds and isinstance(rule_for(uses[0][0]).inputs_as_rows(*uses[0][:2]), ElementwiseRows)
        if len(kinds) != 1 or normal:
            blocks[name] = torch.diag(diagonal[name].flatten())
        else:
            blocks[name] = (bias_block if name.endswith("bias") else weight_block)(uses, mode)
    return blocks


@every_case
@every_mode
def test_blocks_are_those_of_the_definition(name: str, mode: str) -> None:
    case = build(name)
    blocks = definition(case, mode)
    for chosen, selection in selections(case.model).items():
        whole = torch.block_diag(*[blocks[n] for n in selection.names])
        sizes = [torch.Size(selection.shapes[n]).numel() for n in selection.names]
        offsets = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        where = torch.cat([o + selection.positions(n) for o, n in zip(offsets, selection.names, strict=True)])
        found = accumulate(case, selection, "kron", mode=mode)
        close(dense(found), whole[where][:, where], 1e-9)  # a part of the weights: the principal submatrix
        close(found.diagonal(), whole.diagonal()[where], 1e-9)
        if chosen == "all":
            kinds = {type(block) for block in found.blocks}
            assert linalg.Block in kinds


@pytest.mark.parametrize("likelihood", [Gaussian(noise=0.5), Categorical()])
def test_one_linear_layer_with_one_datum_is_exact(likelihood: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    case = Case(model, normal(1, 3), likelihood, likelihood.sample(normal(1, 4)))
    for name in ("weight", "bias"):  # each is exact; between them there is nothing
        selection = Selection.all_of(model, [name])
        close(dense(accumulate(case, selection, "kron")), gauss_newton(case, selection))


def test_a_linear_model_with_constant_hessian_is_exact() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False).double()
    case = Case(model, normal(20, 3), Gaussian(noise=0.5), normal(20, 4))
    selection = Selection.all_of(model)
    close(dense(accumulate(case, selection, "kron")), gauss_newton(case, selection))


def test_weight_and_bias_share_one_decomposition() -> None:
    case = build("mlp")
    found = accumulate(case, selections(case.model)["all"], "kron")
    weight, bias, *_ = found.blocks
    assert bias.left is weight.left


class Folding(nn.Module):
    """Positions are rows of their own axis or, once told so, more examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.folds = nn.Linear(3, 2), False

    def forward(self, x: Tensor) -> Tensor:
        if self.folds:
            return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1)
        return self.layer(x).sum(1)


def test_a_layer_that_is_used_in_two_ways_has_no_factors() -> None:
    model, likelihood = Folding().double(), Categorical()
    selection = Selection.all_of(model)
    engine = Engine(model, selection.names)
    accumulator = make_accumulator("kron", engine, selection)
    sums = accumulator.zeros()

    def add() -> None:
        tape = engine.run(normal(4, 2, 3))
        columns = output_columns.columns("ggn", likelihood, tape.outputs, torch.zeros(4, dtype=torch.long))
        accumulator.add(sums, tape, columns)

    add()
    engine.model.folds = True
    with pytest.warns(FallbackWarning, match="one row per example"), pytest.raises(UnsupportedError, match="'diag'"):
        add()


@pytest.mark.filterwarnings("ignore::dubito.curvature.FallbackWarning")
def test_a_bias_keeps_its_curvature_where_its_weight_has_no_factors() -> None:
    """The weight is read beside its layer, so no rule covers it; the bias is used as the rule says."""

    def use(net: Any, x: Tensor) -> Tensor:
        return net.first(x) + x @ net.first.weight.mT.sin()

    case = classes(Net(use, first=nn.Linear(3, 4)), normal(BATCH, 3))
    selection = Selection.all_of(case.model)
    posterior = Laplace(structure="kron", prior_precision=1.0).fit(
        case.model, (case.inputs, case.targets), likelihood=case.likelihood, progress=False
    )
    truth = gauss_newton(case, selection)[selection.slices["first.bias"], selection.slices["first.bias"]]
    found = posterior.matrix.matmul(torch.eye(selection.num_weights).double())
    close(found[selection.slices["first.bias"], selection.slices["first.bias"]], truth)

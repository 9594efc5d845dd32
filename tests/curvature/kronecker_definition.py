"""The definition of Kronecker factors, written out layer by layer from autograd's own gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from curvature.curvature_cases import Case, copied, gauss_newton
from dubito.core import params
from dubito.networks.layers import ElementwiseRows, GroupedRows, IndexRows, rule_for
from dubito.networks.selection import Selection

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
            module.register_forward_hook(keep, prepend=True, with_kwargs=True)  # before those of the user
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

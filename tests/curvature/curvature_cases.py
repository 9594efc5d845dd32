"""Small networks of every kind that the curvature engine must be exact on, in float64, and their brute-force oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from dubito.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from dubito.models import transformer
from torch import Tensor, nn

from dubito.core import batches, params
from dubito.curvature import Engine, output_columns
from dubito.curvature import matrices as linalg
from dubito.curvature.structures import make_accumulator
from dubito.networks.selection import Selection
from oracles import normal

BATCH = 4


class Case(NamedTuple):
    model: nn.Module
    inputs: Any
    likelihood: Likelihood
    targets: Tensor


class Net(nn.Module):
    """Layers by name, and how they are used."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.use = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.use(self, *args, **kwargs)


def randomised(model: nn.Module) -> nn.Module:
    """No parameter or statistic at a value (0, 1) that could hide a mistake."""
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            if value.is_floating_point():
                value.copy_(0.4 * torch.randn_like(value) + 0.1 * torch.randn_like(value).sign())
        for module in model.modules():
            if getattr(module, "running_var", None) is not None:
                module.running_var.abs_().add_(0.3)
    return model.double().eval()


def classes(model: nn.Module, inputs: Any, likelihood: Likelihood | None = None) -> Case:
    """Any network as a classifier, with labels of the layout that its outputs ask for."""
    likelihood = likelihood or Categorical()
    model = randomised(model)
    with torch.no_grad():
        outputs = params.call(model, batches.map_leaves(torch.clone, inputs))
    return Case(model, inputs, likelihood, likelihood.sample(outputs))


def tokens(length: int = 5) -> Tensor:
    return torch.randint(4, (BATCH, length))  # few different ones: each example repeats some


# ------------------------------------------------------------------ one per layer type


def mlp() -> Case:
    return classes(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)), normal(BATCH, 3))


def mlp_without_bias() -> Case:
    return classes(nn.Sequential(nn.Linear(3, 4, bias=False), nn.GELU(), nn.Linear(4, 3, bias=False)), normal(BATCH, 3))


class Transposed(nn.Module):
    """What Hugging Face calls a Conv1D: no class that any rule is registered for."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.register_parameter("bias", nn.Parameter(torch.zeros(outputs)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        found = flat @ self.weight if self.bias is None else torch.addmm(self.bias, flat, self.weight)
        return found.view(*x.shape[:-1], self.nf)


def transposed_linear() -> Case:
    """At one position and at several."""
    layers = {"one": Transposed(3, 5), "two": Transposed(5, 4, bias=False), "head": Transposed(4, 3)}
    use = lambda net, x: net.head(torch.tanh(net.two(torch.tanh(net.one(x)))).mean(1))  # noqa: E731
    return classes(Net(use, **layers), normal(BATCH, 2, 3))


def linear_alone() -> Case:
    return classes(nn.Linear(3, 4), normal(BATCH, 3))


def conv1d() -> Case:
    first = nn.Conv1d(2, 3, 3, stride=2, dilation=2, padding=2, padding_mode="circular")
    return classes(nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(9, 3)), normal(BATCH, 2, 6))


def conv2d() -> Case:
    model = nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), padding=1, padding_mode="reflect"), nn.Tanh(),
        nn.Conv2d(4, 2, 2, stride=(2, 1), groups=2), nn.Tanh(),
        nn.Conv2d(2, 2, (3, 1), padding="same", bias=False), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip
    return classes(model, normal(BATCH, 2, 4, 3))


def conv3d() -> Case:
    first = nn.Conv3d(1, 2, 2, padding=1, padding_mode="replicate")
    model = nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(36, 2))
    return classes(model, normal(BATCH, 1, 1, 2, 2))


def conv_over_everything() -> Case:
    """The kernel is as large as the input: one position."""
    return classes(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3, 3)), normal(BATCH, 2, 3, 3))


def depthwise() -> Case:
    model = nn.Sequential(nn.Conv1d(3, 3, 2, groups=3), nn.Tanh(), nn.Conv1d(3, 2, 1), nn.Flatten(), nn.Linear(6, 2))
    return classes(model, normal(BATCH, 3, 4))


def conv_transpose() -> Case:
    model = nn.Sequential(
        nn.ConvTranspose1d(2, 3, 3), nn.Tanh(),
        nn.ConvTranspose1d(3, 3, 3, stride=2, padding=1, output_padding=1, groups=3, dilation=2),
        nn.Flatten(), nn.Linear(30, 2),
    )  # fmt: skip
    return classes(model, normal(BATCH, 2, 2))


def conv_transpose2d() -> Case:
    model = nn.Sequential(nn.ConvTranspose2d(2, 4, (2, 1), groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2))
    return classes(model, normal(BATCH, 2, 2, 2))


def embedding() -> Case:
    def use(net: Any, ids: Tensor) -> Tensor:
        return net.out(torch.tanh(net.table(ids)).mean(1))

    return classes(Net(use, table=nn.Embedding(5, 3, padding_idx=1), out=nn.Linear(3, 3)), tokens())


def embedding_sparse() -> Case:
    def use(net: Any, ids: Tensor) -> Tensor:
        return net.out(torch.tanh(net.table(ids)).sum(1))

    return classes(Net(use, table=nn.Embedding(4, 2, sparse=True), out=nn.Linear(2, 3)), tokens())


def embedding_called_twice() -> Case:
    def use(net: Any, first: Tensor, second: Tensor) -> Tensor:
        return net.out(torch.tanh(net.table(first)).sum(1) * net.table(second).mean(1))

    return classes(Net(use, table=nn.Embedding(4, 3), out=nn.Linear(3, 3)), (tokens(), tokens(2)))


def norms() -> Case:
    model = nn.Sequential(
        nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Tanh(), nn.GroupNorm(2, 4), nn.Conv1d(4, 2, 1),
        nn.LayerNorm([2, 3]), nn.Tanh(), nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 3), nn.LayerNorm(3),
    )  # fmt: skip
    return classes(model, normal(BATCH, 2, 4))


def norms2d() -> Case:
    model = nn.Sequential(
        nn.BatchNorm2d(2), nn.Conv2d(2, 2, 2, bias=False), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2)
    )  # fmt: skip
    return classes(model, normal(BATCH, 2, 2, 2))


def instance_and_rms_norms() -> Case:
    model = nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True), nn.Tanh(), nn.Conv1d(3, 2, 1),
        nn.InstanceNorm1d(2, affine=True, track_running_stats=True), nn.RMSNorm([2, 3]), nn.Tanh(), nn.Flatten(),
        nn.Linear(6, 3), nn.RMSNorm(3),
    )  # fmt: skip
    return classes(model, normal(BATCH, 2, 4))


# ------------------------------------------------------------------ how layers are used


def skip() -> Case:
    def use(net: Any, x: Tensor) -> Tensor:
        h = torch.tanh(net.first(x))
        return net.out(h + torch.tanh(net.second(h))) + net.direct(x)

    model = Net(use, first=nn.Linear(3, 4), second=nn.Linear(4, 4), out=nn.Linear(4, 3), direct=nn.Linear(3, 3))
    return classes(model, normal(BATCH, 3))


def in_place() -> Case:
    """Activations that overwrite a layer's output."""

    def use(net: Any, x: Tensor) -> Tensor:
        h = net.act(net.first(x))
        h = net.second(h)
        h += net.third(x)
        return net.out(h.mul_(2.0).tanh_())

    layers = {"first": nn.Linear(3, 4), "second": nn.Linear(4, 3), "third": nn.Linear(3, 3), "out": nn.Linear(3, 3)}
    return classes(Net(use, act=nn.ReLU(inplace=True), **layers), normal(BATCH, 3))


def overwritten_input() -> Case:
    """The input of a layer is overwritten after the call, where autograd does not mind: padding made a copy of it."""

    def use(net: Any, x: Tensor) -> Tensor:
        x = x * 1.5
        h = torch.tanh(net.first(x))
        x += 1.0
        return net.out(h.flatten(1)) + net.direct(x.flatten(1))

    first = nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular")
    return classes(Net(use, first=first, out=nn.Linear(6, 3), direct=nn.Linear(6, 3)), normal(BATCH, 2, 3))


def overwritten_data() -> Case:
    """The network overwrites what it is given, which must change neither the data nor a second run."""

    def use(net: Any, x: Tensor) -> Tensor:
        x.mul_(0.5).add_(0.3)
        return net.out(torch.tanh(net.first(x)))

    return classes(Net(use, first=nn.Linear(3, 4), out=nn.Linear(4, 3)), normal(BATCH, 3))


def called_often() -> Case:
    def use(net: Any, x: Tensor) -> Tensor:
        h = torch.tanh(net.inward(x))
        for _ in range(3):
            h = torch.tanh(net.again(h) + h)
        return net.out(h)

    return classes(Net(use, inward=nn.Linear(3, 3), again=nn.Linear(3, 3), out=nn.Linear(3, 3)), normal(BATCH, 3))


def conv_called_often() -> Case:
    def use(net: Any, x: Tensor) -> Tensor:
        h = torch.tanh(net.again(torch.tanh(net.again(x))))
        return net.out(h.flatten(1))

    return classes(Net(use, again=nn.Conv1d(2, 2, 3, padding=1), out=nn.Linear(8, 3)), normal(BATCH, 2, 4))


def tied_linear() -> Case:
    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(torch.tanh(net.second(torch.tanh(net.first(x)))))

    model = Net(use, first=nn.Linear(3, 3), second=nn.Linear(3, 3), out=nn.Linear(3, 2))
    model.second.weight = model.first.weight
    return classes(model, normal(BATCH, 3))


def tied_embedding() -> Case:
    """A language model whose decoder is its embedding."""

    def use(net: Any, ids: Tensor) -> Tensor:
        return net.decode(torch.tanh(net.mix(net.encode(ids).cumsum(1))))

    model = Net(use, encode=nn.Embedding(4, 3), mix=nn.Linear(3, 3), decode=nn.Linear(3, 4))
    model.decode.weight = model.encode.weight
    return classes(model, tokens(3))


def tied_autoencoder() -> Case:
    """A transposed convolution with the weight of the convolution that it undoes."""

    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(net.decode(torch.tanh(net.encode(x))).flatten(1))

    model = Net(use, encode=nn.Conv1d(2, 3, 2), decode=nn.ConvTranspose1d(3, 2, 2), out=nn.Linear(8, 2))
    model.decode.weight = model.encode.weight
    return classes(model, normal(BATCH, 2, 4))


def sequence() -> Case:
    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(torch.tanh(net.each(x)).sum(1))

    return classes(Net(use, each=nn.Linear(3, 4), out=nn.Linear(4, 3)), normal(BATCH, 3, 3))


def output_per_position() -> Case:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    case = classes(model, normal(BATCH, 2, 3))
    case.targets[1, 0] = -100  # a position that does not count
    return case


def output_map() -> Case:
    """Segmentation: class scores for every pixel."""
    return classes(nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Conv2d(2, 3, 1)), normal(BATCH, 1, 3, 3))


def attention() -> Case:
    """The bias of the keys has no influence at all: its gradient is rounding errors only."""
    ids = torch.randint(1, 6, (BATCH, 4))
    ids[0, 2:] = 0
    return classes(transformer(6, 3, length=4, width=4, depth=1, heads=2), ids)


def unused() -> Case:
    def use(net: Any, x: Tensor) -> Tensor:
        net.ignored(x)
        return net.out(x)

    return classes(Net(use, never=nn.Linear(2, 2), ignored=nn.Linear(3, 2), out=nn.Linear(3, 3)), normal(BATCH, 3))


def frozen() -> Case:
    case = mlp()
    case.model[0].weight.requires_grad_(False)
    return case


def several_inputs() -> Case:
    def use(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return net.out(torch.tanh(net.first(x) * net.second(y)))

    model = Net(use, first=nn.Linear(3, 4), second=nn.Linear(2, 4), out=nn.Linear(4, 3))
    return classes(model, (normal(BATCH, 3), normal(BATCH, 2)))


def named_inputs() -> Case:
    def use(net: Any, values: Tensor, ids: Tensor) -> Tensor:
        return net.out(torch.tanh(net.first(values) + net.table(input=ids).sum(1)))

    model = Net(use, first=nn.Linear(3, 4), table=nn.Embedding(4, 4), out=nn.Linear(4, 3))
    return classes(model, {"values": normal(BATCH, 3), "ids": tokens(3)})


# ------------------------------------------------------------------ other likelihoods


def regression() -> Case:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return classes(model, normal(BATCH, 3), Gaussian(noise=0.7))


def regression_of_one() -> Case:
    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(torch.tanh(net.first(x))).squeeze(-1)

    return classes(Net(use, first=nn.Linear(3, 4), out=nn.Linear(4, 1)), normal(BATCH, 3), Gaussian(noise=0.7))


def labels() -> Case:
    return classes(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), normal(BATCH, 3), Bernoulli())


def noise_too() -> Case:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return classes(model, normal(BATCH, 3), HeteroscedasticGaussian())


CASES: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (
        mlp, mlp_without_bias, linear_alone, conv1d, conv2d, conv3d, conv_over_everything, depthwise, conv_transpose,
        conv_transpose2d, embedding, embedding_sparse, embedding_called_twice, norms, norms2d,
        instance_and_rms_norms, skip, in_place, overwritten_input, overwritten_data, called_often, conv_called_often,
        tied_linear, tied_embedding, tied_autoencoder, sequence, output_per_position, output_map, attention, unused,
        frozen, several_inputs, named_inputs, regression, regression_of_one, labels, noise_too,
        transposed_linear,
    )
}  # fmt: skip


def fresh(name: str) -> Case:
    """A case of one's own, to do anything with."""
    torch.manual_seed(3)
    return CASES[name]()


build = functools.cache(fresh)  # the same case for all tests that only look at it


# ------------------------------------------------------------------ selections


def selections(model: nn.Module) -> dict[str, Selection]:
    """Everything, some whole parameters, a random half of the weights, and very few of them."""
    everything = Selection.all_of(model)
    draws = torch.Generator().manual_seed(5)
    shapes = everything.shapes

    def at_random(share: float) -> Selection:
        masks = {n: torch.rand(shapes[n], generator=draws) < share for n in everything.names}
        masks[everything.names[0]].view(-1)[0] = True
        return Selection.from_masks(shapes, masks)

    return {
        "all": everything,
        "some": Selection.all_of(model, everything.names[1::2] or everything.names),
        "half": at_random(0.5),
        "few": at_random(0.03),
    }


# ------------------------------------------------------------------ the oracle


def copied(inputs: Any) -> Any:
    return batches.map_leaves(torch.clone, inputs)


_KNOWN: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()


def jacobian_of(case: Case) -> dict[str, Tensor]:
    """``[C, B, *shape]`` per trainable parameter: every canonical output of every example on its own, by autograd."""
    if case.model not in _KNOWN:
        _KNOWN[case.model] = _jacobian_of(case)
    return _KNOWN[case.model]


def _jacobian_of(case: Case) -> dict[str, Tensor]:
    own = {name: value for name, value in case.model.named_parameters() if value.requires_grad}
    found: dict[str, list[Tensor]] = {name: [] for name in own}
    for n in range(batches.num_rows(case.inputs)):
        outputs = params.call(case.model, copied(batches.take(case.inputs, slice(n, n + 1))))
        rows: dict[str, list[Tensor]] = {name: [] for name in own}
        for output in case.likelihood.canonical(outputs).flatten():
            grads = torch.autograd.grad(output, list(own.values()), retain_graph=True, allow_unused=True)
            for (name, value), grad in zip(own.items(), grads, strict=True):
                rows[name].append(torch.zeros_like(value).detach() if grad is None else grad.to_dense())
        for name, each in rows.items():
            found[name].append(torch.stack(each))
    return {name: torch.stack(each, dim=1) for name, each in found.items()}


def jacobian_matrix(case: Case, selection: Selection) -> Tensor:
    """``[C, B, D]`` over the selected weights."""
    return selection.ravel(jacobian_of(case))


def outputs_of(case: Case) -> Tensor:
    with torch.no_grad():
        return params.call(case.model, copied(case.inputs))


def output_hessian(case: Case) -> Tensor:
    """``[B, C, C]`` over all canonical outputs of an example; positions do not meet."""
    blocks = case.likelihood.hessian(outputs_of(case), case.targets)
    if blocks.ndim == 3:
        return blocks
    return torch.stack([torch.block_diag(*example.flatten(0, -3)) for example in blocks])


def gauss_newton(case: Case, selection: Selection) -> Tensor:
    jacobian = jacobian_matrix(case, selection)
    return torch.einsum("cnd,nck,kne->de", jacobian, output_hessian(case), jacobian)


# ------------------------------------------------------------------ what the engine makes of a case

_ENGINES: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], Engine]] = WeakKeyDictionary()


def engine_of(case: Case, names: list[str]) -> Engine:
    """One engine for all tests of a case: trying it out takes longer than what it is asked for here."""
    known = _ENGINES.setdefault(case.model, {})
    if tuple(names) not in known:
        known[tuple(names)] = Engine(case.model, names)
    return known[tuple(names)]


def accumulate(
    case: Case, selection: Selection, structure: str, curvature: str = "ggn", most: int = 3, **options: Any
) -> linalg.Matrix:
    """The curvature of one structure, summed the way `Laplace` does it."""
    engine = engine_of(case, selection.names)
    accumulator = make_accumulator(structure, engine, selection, **options)
    sums, generator = accumulator.zeros(), torch.Generator().manual_seed(0)
    for turn in range(accumulator.passes):
        if turn:
            accumulator.next_pass(sums)
        for rows, tape in engine.chunks(case.inputs, most, accumulator.extra):
            targets = case.targets[rows]
            columns = output_columns.columns(
                curvature, case.likelihood, tape.outputs, targets, most=most, generator=generator
            )
            accumulator.add(sums, tape, columns, targets)
    return accumulator.matrix(sums)


def dense(matrix: linalg.Matrix) -> Tensor:
    return matrix.matmul(torch.eye(matrix.size, dtype=torch.float64))

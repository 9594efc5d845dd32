"""Watching calls: callbacks see and change them, and hooks are gone after the block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dubito.networks.watching import call_order, inputs_of, watch


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_callbacks_see_and_replace_arguments_and_outputs() -> None:
    model, x = network(), torch.randn(5, 3)
    doubled = model[2](2 * model[1](model[0](x)))
    with watch({"a": model[2]}, before=lambda name, module, args, kwargs: ((2 * args[0],), kwargs)):
        assert torch.equal(model(x), doubled)
    with watch({"a": model[2]}, after=lambda name, module, args, kwargs, output: -output):
        negative = model(x)
    assert torch.equal(negative, -model(x))


def test_hooks_are_removed_after_an_error() -> None:
    model = network()
    watched = watch(dict(model.named_modules()), before=lambda *_: None, after=lambda *_: None)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), watched:
        model(torch.randn(5, 7))
    assert hooks(model) == 0


def test_order_and_inputs() -> None:
    model, x = network(), torch.randn(5, 3)
    assert call_order(model, dict(model.named_modules()), x) == ["0", "1", "2", ""]
    seen = inputs_of(model, {"last": model[2]}, x)
    assert torch.equal(seen["last"], model[1](model[0](x)))
    assert hooks(model) == 0


def test_a_module_called_twice_with_keywords() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(input=self.layer(input=x))

    model, x = Twice(), torch.randn(2, 3)
    assert call_order(model, {"layer": model.layer}, x) == ["layer", "layer"]
    assert torch.equal(inputs_of(model, {"layer": model.layer}, x)["layer"], model.layer(x))


@pytest.mark.filterwarnings("ignore:.*script:DeprecationWarning", "ignore:.*script:FutureWarning")  # by torch's version
def test_script_modules_are_left_out() -> None:
    scripted = torch.jit.script(nn.Linear(3, 2))
    model = nn.Sequential(scripted, nn.ReLU())
    assert call_order(model, dict(model.named_modules()), torch.randn(1, 3)) == ["1", ""]

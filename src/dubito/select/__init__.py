"""Rules that choose the random weights: frozen settings that become a `Selection` once there is a model.

    select.all()                         every trainable weight
    select.last_layer()                  the layer that gives the outputs
    select.adapters()                    LoRA and its relatives, of peft
    select.layers("fc") , layers(nn.Conv2d)   by name or type
    select.subnetwork(1000)              the weights that add most to the uncertainty of the outputs
    select.largest_variance(1000)        the weights with the largest variance
    select.random(1000)                  a number of weights, or a fraction below 1
    select.largest_magnitude(0.1)        the weights with the largest absolute value
    select.mask({"fc.weight": mask})     given weights
    select.subspace(10)                  a few directions through the trained weights

All rules but the last can be combined with ``|``, ``&`` and ``~``. ``rule.report(model, data)`` measures how much of
the posterior over all weights the chosen ones keep.
"""

from dubito.select.choose import SelectionWarning
from dubito.select.names import adapters, all, last_layer, layers, mask
from dubito.select.subnetwork import largest_magnitude, largest_variance, random, subnetwork
from dubito.select.subspace import subspace

__all__ = [
    "SelectionWarning",
    "adapters",
    "all",
    "largest_magnitude",
    "largest_variance",
    "last_layer",
    "layers",
    "mask",
    "random",
    "subnetwork",
    "subspace",
]

"""Which weights are random. Each name is a rule: a frozen setting that becomes a `Selection` once there is a model.

    select.all()                         every trainable weight
    select.last_layer()                  the layer that gives the outputs
    select.layers("fc") , layers(nn.Conv2d)   by name or type
    select.subnetwork(1000)              the weights that matter most for the uncertainty of the outputs
    select.largest_variance(1000)        those whose own variance is largest
    select.random(1000)                  a number of weights, or a fraction below 1
    select.largest_magnitude(0.1)
    select.mask({"fc.weight": mask})
    select.subspace(10)                  a few directions through the trained weights

Rules combine with ``|``, ``&`` and ``~``, all but the last; ``rule.report(model, data)`` says how much of the posterior
over all weights the chosen ones keep.
"""

from dubito.select.choose import SelectionWarning
from dubito.select.names import all, last_layer, layers, mask
from dubito.select.subnetwork import largest_variance, subnetwork
from dubito.select.subspace import subspace
from dubito.select.weights import largest_magnitude, random

__all__ = [
    "SelectionWarning",
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

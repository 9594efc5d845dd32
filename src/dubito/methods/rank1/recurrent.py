r"""`nn.LSTM` with rank-1 factors on its recurrent and input weights, drawn once for a whole sequence.

$$g_t = ((x_t \circ s) W) \circ r + ((h_{t-1} \circ s') U) \circ r' + b, \qquad
  c_t = \sigma(g^f) c_{t-1} + \sigma(g^i) \tanh(g^c), \quad h_t = \sigma(g^o) \tanh(c_t)$$
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.core.errors import UnsupportedError
from dubito.methods.rank1.layers import Factored


class FactoredLSTM(Factored):
    """An LSTM of any depth, in one or both directions, with or without a projection of its state."""

    def forward(self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Take the arguments of `nn.LSTM.forward`; packed sequences are not supported."""
        lstm: Any = self
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise UnsupportedError(
                f"The LSTM '{self.label}' has rank-1 factors, which needs padded sequences with a batch axis."
            )
        x = x.transpose(0, 1) if lstm.batch_first else x
        self.check_rows(x.shape[1])
        directions = 2 if lstm.bidirectional else 1
        hidden, cell = self._start(x, hx, directions)
        last: list[tuple[Tensor, Tensor]] = []
        for layer in range(lstm.num_layers):
            if layer and lstm.dropout:
                x = F.dropout(x, lstm.dropout, self.training)
            outputs = []
            for direction in range(directions):
                place = layer * directions + direction
                states, end = self._sweep(x, place, hidden[place], cell[place], backward=direction == 1)
                outputs.append(states)
                last.append(end)
            x = torch.cat(outputs, dim=-1)
        ends = (torch.stack([h for h, _ in last]), torch.stack([c for _, c in last]))
        return (x.transpose(0, 1) if lstm.batch_first else x), ends

    def _start(self, x: Tensor, hx: tuple[Tensor, Tensor] | None, directions: int) -> tuple[Tensor, Tensor]:
        lstm: Any = self
        if hx is not None:
            return hx
        count = lstm.num_layers * directions
        shapes = (count, x.shape[1], lstm.proj_size or lstm.hidden_size), (count, x.shape[1], lstm.hidden_size)
        return x.new_zeros(shapes[0]), x.new_zeros(shapes[1])

    def _sweep(
        self, x: Tensor, place: int, h: Tensor, c: Tensor, backward: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run one layer in one direction over ``x [T, N, C]``."""
        lstm: Any = self
        per = 3 if lstm.proj_size else 2
        weights = [value for key, value in self.named_parameters() if key.startswith("weight")]
        weights = weights[place * per : (place + 1) * per]
        values = self.current()
        factors = [(self.by_example(s), self.by_example(r)) for s, r in values.factors[place * per : (place + 1) * per]]
        biases: Any = [self.by_example(bias) for bias in values.biases[2 * place : 2 * place + 2]]
        gates = self._mapped(x, weights[0], factors[0], biases[0] + biases[1] if biases else None)
        states: list[Tensor] = []
        for gate in reversed(gates.unbind(0)) if backward else gates.unbind(0):
            i, f, g, o = (gate + self._mapped(h, weights[1], factors[1])).chunk(4, dim=-1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            if lstm.proj_size:
                h = self._mapped(h, weights[2], factors[2])
            states.append(h)
        return torch.stack(states[::-1] if backward else states), (h, c)

    def _mapped(
        self, x: Tensor, weight: Tensor, factors: tuple[Tensor | None, Tensor | None], bias: Tensor | None = None
    ) -> Tensor:
        """Apply factors ``[N, C]`` to ``[T, N, C]`` or ``[N, C]``."""
        s, r = factors
        return self.scaled(F.linear(self.scaled(x, s), weight), r, bias)

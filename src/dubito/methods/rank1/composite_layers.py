r"""`nn.MultiheadAttention` with rank-1 factors on its four projections, and `nn.LSTM` on its two weights.

The factors of an LSTM are drawn once for a whole sequence:

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


class FactoredAttention(Factored):
    """Applies the projections with factors; torch's own attention then runs with identity projections."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Take the arguments of `nn.MultiheadAttention.forward`."""
        module: Any = self
        if query.ndim != 3:
            raise UnsupportedError(f"The attention '{self.label}' needs a batch axis to have rank-1 factors.")
        self.check_rows(query.shape[0 if module.batch_first else 1])
        projected = [self._project(x, place) for place, x in enumerate((query, key, value))]
        if module.batch_first:
            projected = [x.transpose(0, 1) for x in projected]
        mixed, weights = self._attend(projected, *args, **kwargs)
        if module.batch_first:
            mixed = mixed.transpose(0, 1)
        return self._project(mixed, 3), weights

    def _attend(
        self,
        projected: list[Tensor],
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = self
        identity = torch.eye(module.embed_dim, dtype=projected[0].dtype, device=projected[0].device)
        query, key, value = projected
        return F.multi_head_attention_forward(
            query, key, value, module.embed_dim, module.num_heads, None, None, module.bias_k, module.bias_v,
            module.add_zero_attn, module.dropout, identity, None,
            training=module.training, key_padding_mask=key_padding_mask, need_weights=need_weights,
            attn_mask=attn_mask, use_separate_proj_weight=True, q_proj_weight=identity, k_proj_weight=identity,
            v_proj_weight=identity, average_attn_weights=average_attn_weights, is_causal=is_causal,
        )  # fmt: skip

    def _project(self, x: Tensor, place: int) -> Tensor:
        """Apply projection 0 (query), 1 (key), 2 (value) or 3 (output)."""
        values = self.current()
        s, r = (self._spread(v) for v in values.factors[place])
        return self.scaled(F.linear(self.scaled(x, s), self._weight(place)), r, self._spread(self._bias(place)))

    def _spread(self, v: Tensor | None) -> Tensor | None:
        """Reshape vectors ``[C]`` or ``[N, C]`` to broadcast over activations with examples on the batch axis."""
        module: Any = self
        v = self.by_example(v)
        return v if v is None or v.ndim == 1 else v.unsqueeze(1 if module.batch_first else 0)

    def _weight(self, place: int) -> Tensor:
        module: Any = self
        if place == 3:
            return module.out_proj.weight
        if module.in_proj_weight is None:
            return (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)[place]
        return module.in_proj_weight.chunk(3)[place]

    def _bias(self, place: int) -> Tensor | None:
        biases = self.current().biases
        if not biases:
            return None
        return biases[1] if place == 3 else biases[0].chunk(3, dim=-1)[place]


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

"""`nn.MultiheadAttention` with rank-1 factors on its four projections."""

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

"""The trial before modules are fused: how the model calls them, and how far two ways to compute one are apart.

Attention itself is none of its business: something simple stands for it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paged_engine.models.hook import forward_flat
from paged_engine.models.load import LoadedModel

_NUM_TOKENS = 16
"""Tokens of the trial."""
_ROW_SIZES = (-2.0, 1.0)
"""Of the smallest and the largest random row, as powers of ten."""


@dataclass(frozen=True)
class Call:
    """How the model calls one of its modules."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def hidden_states(self) -> torch.Tensor:
        """What the module is to transform."""
        hidden: torch.Tensor = self.arguments[0] if self.arguments else self.keywords["hidden_states"]
        return hidden

    def run(self, forward: Callable[..., Any], hidden_states: torch.Tensor) -> torch.Tensor:
        """What `forward` makes of a copy of other hidden states: a module may work in place."""
        hidden = hidden_states.clone()
        if self.arguments:
            output = forward(hidden, *self.arguments[1:], **self.keywords)
        else:
            output = forward(**{**self.keywords, "hidden_states": hidden})
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result


def run_model(model: LoadedModel, calls: dict[nn.Module, Call] | None = None) -> torch.Tensor:
    """Run random tokens at positions up to the model's last, and note in `calls` how each module is called.

    Returns:
        Logits [num_tokens, vocab_size].
    """
    random = torch.Generator().manual_seed(1)
    token_ids = torch.randint(model.vocab_size, (_NUM_TOKENS,), generator=random).to(model.device)
    positions = torch.linspace(0, model.max_seq_len - 1, _NUM_TOKENS).long().to(model.device)
    rows = torch.arange(_NUM_TOKENS, device=model.device)
    kept: dict[nn.Module, Call] = {} if calls is None else calls

    def keep(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        kept[module] = Call(
            tuple(_copied(argument) for argument in arguments),
            {name: _copied(value) for name, value in keywords.items()},
        )

    with ExitStack() as hooks:
        if calls is not None:
            for module in model.module.modules():
                hooks.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
        return forward_flat(model.module, token_ids, positions, rows)


def largest_error(module: nn.Module, candidate: Callable[..., Any], call: Call) -> float:
    """The largest relative error of a row that `candidate` computes in the place of the module's `forward`: of what the
    model gave it, and of random rows of very different sizes."""
    given = call.hidden_states
    num_rows = given.numel() // given.shape[-1]
    random = torch.Generator().manual_seed(2)
    rows = (
        torch.randn(num_rows, given.shape[-1], generator=random)
        * torch.logspace(*_ROW_SIZES, num_rows)[:, None]
    )
    errors = [
        row_errors(call.run(candidate, hidden), call.run(module.forward, hidden)).max()
        for hidden in (given, rows.view(given.shape).to(given))
    ]
    return float(torch.stack(errors).max())


def row_errors(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The error of each row relative to it, float32; NaN where one is not a number, 0 where none was expected to be one:
    random rows may be too large for float16."""
    got, expected = got.float(), expected.float()
    errors = (got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    return errors.where(expected.isfinite().all(dim=-1), 0.0)


@contextmanager
def trial_attention(model: LoadedModel, attend: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let the model's attention modules call `attend` instead of attention."""
    before = [layer.module.__dict__.get("paged_attention") for layer in model.layers]
    for layer in model.layers:
        layer.module.paged_attention = attend  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, attention in zip(model.layers, before, strict=True):
            del layer.module.paged_attention
            if attention is not None:
                layer.module.paged_attention = attention


def own_value(
    _: nn.Module, query: torch.Tensor, __: torch.Tensor, value: torch.Tensor, *___: Any
) -> torch.Tensor:
    """Each token sees itself alone: attention as tame as it can be. Arguments and result as hook.PagedAttention."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous()


def mixture(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> torch.Tensor:
    """A sum of queries, keys and values, which shows whether all three are right."""
    mixed = 3 * own_value(module, query, key, value)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    shared = min(query.shape[-1], value.shape[-1])
    mixed[..., :shared] += (query - 2 * key)[..., :shared].transpose(1, 2)
    return mixed


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value

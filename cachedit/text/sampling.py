"""From logits to a proposal for every open token, with the confidence of the model in it."""

from __future__ import annotations

import torch

from cachedit.text.caching import Found
from cachedit.text.state import DecodeState


def propose(
    state: DecodeState,
    found: Found,
    mask_token_id: int,
    temperature: float,
    generators: list[torch.Generator | None],
    entropy: bool,
) -> torch.Tensor:
    """Tokens [B, S] for the candidates; their confidence, and entropy if it is wanted, go into the state.

    The mask token is never proposed. At a temperature above 0 a token is drawn (the Gumbel maximum), each row with its
    own generator; the confidence is the probability of what was drawn at temperature 1.
    """
    rows, slots = state.candidates.nonzero(as_tuple=True)
    logits = logits_for(state, found, state.candidates, mask_token_id)
    noisy = logits if temperature == 0 else logits / temperature + _gumbel(logits, rows, generators)
    tokens = noisy.argmax(-1)
    total = logits.logsumexp(-1)
    confidence = (logits.gather(-1, tokens[:, None])[:, 0] - total).exp()
    proposed = state.ids.clone()
    proposed[rows, slots] = tokens
    state.confidence = state.confidence.to(confidence.dtype).index_put((rows, slots), confidence)
    if entropy:
        chance = (logits - total[:, None]).exp()
        spread = total - (chance * logits.masked_fill(chance == 0, 0)).sum(-1)
        state.entropy = state.entropy.to(spread.dtype).index_put((rows, slots), spread)
    return proposed


def logits_for(state: DecodeState, found: Found, tokens: torch.Tensor, mask_token_id: int) -> torch.Tensor:
    """What the model gave for some of the candidates [B, S], in order [M, V]; the mask token has no chance."""
    rows, slots = tokens.nonzero(as_tuple=True)
    at = slots if state.before is None else state.before[rows, slots]
    place = torch.zeros_like(state.ids)
    place[found.rows, found.slots] = torch.arange(len(found.rows), device=place.device)
    logits = found.logits[place[rows, at]]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).clone()
    logits[:, mask_token_id] = -torch.inf
    return logits


def _gumbel(logits: torch.Tensor, rows: torch.Tensor, generators: list[torch.Generator | None]) -> torch.Tensor:
    drawn = torch.empty_like(logits)
    for row, generator in enumerate(generators):
        mine = rows == row
        if bool(mine.any()):
            device = logits.device if generator is None else generator.device
            shape = int(mine.sum()), logits.shape[1]
            uniform = torch.rand(shape, generator=generator, device=device, dtype=logits.dtype)
            drawn[mine] = uniform.to(logits.device)
    return -(-drawn.clamp_min(torch.finfo(drawn.dtype).tiny).log()).log()

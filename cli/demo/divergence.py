"""How far an answer's distributions are from full prefill's."""

import torch
import torch.nn.functional as F


def mean_divergence(full: torch.Tensor, other: torch.Tensor) -> float:
    """KLQ: mean over the question's tokens of KL(full || other), in nats.

    Both are logits [question tokens, vocabulary]. The sum runs in float64: small divergences are the point.
    """
    log_full = F.log_softmax(full.double(), dim=-1)
    log_other = F.log_softmax(other.double(), dim=-1)
    per_token = (log_full.exp() * (log_full - log_other)).sum(dim=-1)
    return float(per_token.mean().clamp_min(0.0))

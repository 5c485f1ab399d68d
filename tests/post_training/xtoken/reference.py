"""The definitions of docs/post_training.md in FP64, span by span and token by token, with dense matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_nemotron3.post_training.xtoken.align import Alignment
from megatron_nemotron3.train.teacher.projection import Projection


def losses(
    student: Tensor,
    teacher: Tensor,
    alignment: Alignment,
    projection: Projection,
    kind: str,
    temperature: float = 1.0,
    threshold: float = 0.6,
) -> Tensor:
    """Loss of each span from [n, v] and [m, u] logits, of which the padded columns are cut off."""
    v, u = projection.student_size, projection.teacher_size
    s = (student[:, :v].double() / temperature).softmax(-1)
    t = (teacher[:, :u].double() / temperature).log_softmax(-1)
    result = []
    for span in range(alignment.spans):
        ours = [s[i] for i in range(len(s)) if alignment.student.flatten()[i] == span]
        theirs = [t[i] for i in range(len(t)) if alignment.teacher.flatten()[i] == span]
        if kind == "p-kl":
            result.append(_p_kl(ours, theirs, projection))
        else:
            result.append(_h_kl(ours, theirs, projection, threshold))
    return torch.stack(result)


def _p_kl(ours, theirs, projection):
    dense = torch.zeros(projection.student_size, projection.teacher_size, dtype=torch.float64)
    for i, (tokens, weights) in enumerate(zip(projection.tokens, projection.weights)):
        for token, weight in zip(tokens.tolist(), weights.tolist()):
            if token >= 0:
                dense[i, token] += weight
    projected = sum(one @ dense for one in ours) / len(ours)
    target = sum(theirs) / len(theirs)
    projected = projected / projected.sum()
    total = 0.0
    for column, (p, log_q) in enumerate(zip(projected, target)):
        log_p = p.log() if dense[:, column].any() else torch.tensor(1e-10).double().log()
        total = total + log_q.exp() * (log_q - log_p)
    return total


def _h_kl(ours, theirs, projection, threshold):
    best: dict[int, tuple[float, int]] = {}
    for i in range(projection.student_size):
        token, weight = int(projection.tokens[i, 0]), float(projection.weights[i, 0])
        if token >= 0 and weight >= threshold and (token not in best or weight > best[token][0]):
            best[token] = weight, i
    pairs = {i: token for token, (_, i) in best.items()}
    ours = sum(one.log() for one in ours) / len(ours)
    theirs = sum(theirs) / len(theirs)
    total = 0.0
    for i, token in pairs.items():
        a, b = ours[i], theirs[token]
        total = total + b.exp() * (b - a)
    left = sorted((ours[i].exp() for i in range(len(ours)) if i not in pairs), reverse=True)
    right = sorted((theirs[j].exp() for j in range(len(theirs)) if j not in best), reverse=True)
    return total + sum((abs(a - b) for a, b in zip(left, right)), torch.zeros(()).double())

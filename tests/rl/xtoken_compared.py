"""NeMo-RL's losses and projection rules beside ours: its modules without those around them, on one rank."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import torch
from torch import Tensor

from megatron_nemotron3.post_training.xtoken.align import Aligner, Alignment
from megatron_nemotron3.post_training.xtoken.loss import SpanLoss, span_losses
from megatron_nemotron3.proof.certify.ranks import initialize
from megatron_nemotron3.train.teacher.projection import Projection
from megatron_nemotron3.train.teacher.vocabulary import ByteVocabulary
from tests.post_training.xtoken.tokenizers_of import TEXT, train
from tests.rl.frameworks import placeholder, skeleton, use

#: Name -> settings of both: kind, temperature.
LOSSES = {
    "P-KL": ("p-kl", 1.0),
    "P-KL, T = 2": ("p-kl", 2.0),
    "H-KL": ("h-kl", 1.0),
    "GOLD, T = 2": ("gold", 2.0),
}


class Compared(NamedTuple):
    """One loss of both, and the distance of the gradients relative to the length of theirs."""

    theirs: float
    ours: float
    gradient: float


class _Data(dict[str, Any]):
    """Stands for NeMo-RL's batches, which annotations subscribe."""

    def __class_getitem__(cls, _: Any) -> type:
        return cls


def _modules() -> Any:
    """The module of NeMo-RL's losses; helpers that divide tensors among ranks are those of one rank."""
    folder = use("NEMO_RL_DIR")
    for name in ("algorithms", "algorithms.loss", "algorithms.x_token", "distributed", "models"):
        skeleton(folder, "nemo_rl")
        skeleton(folder, f"nemo_rl.{name}")
    skeleton(folder, "nemo_rl.models.dtensor")
    skeleton(folder, "tools")

    def log_softmax(logits: Tensor, temperature: float, tp_group: Any = None) -> Tensor:
        return (logits.float() / temperature).log_softmax(-1)

    for name, real in {
        "algorithms.loss.interfaces": {"LossFunction": object},
        "algorithms.utils": {},
        "distributed.batched_data_dict": {"BatchedDataDict": _Data},
        "distributed.model_utils": {
            "group_all_reduce_sum": lambda values, group=None: values,
            "vocab_parallel_log_softmax": log_softmax,
            "vocab_parallel_full_log_softmax": log_softmax,
        },
        "models.dtensor.parallelize": {"to_local_if_dtensor": lambda values: values},
    }.items():
        placeholder(f"nemo_rl.{name}", __getattr__=lambda key: MagicMock(name=key), **real)
    from nemo_rl.algorithms.loss import loss_functions

    return loss_functions


def losses(folder: Path, same: bool) -> dict[str, Compared]:
    """All of `LOSSES`; `same`: with the student's tokenizer for the teacher."""
    initialize()
    module = _modules()
    student = ByteVocabulary(train(folder / "a", 380, digits=3))
    teacher = (
        student if same else ByteVocabulary(train(folder / "b", 340, digits=1, special=("<eos>", "<pad>")))
    )
    projection = Projection.build(student, teacher)
    ids = [student.encode([text.encode()])[0] for text in TEXT[:2]]
    _, alignment = Aligner(student, teacher).batch([one[: min(map(len, ids))] for one in ids])
    torch.manual_seed(0)
    logits = (3 * torch.randn(*alignment.student.shape, len(student))).requires_grad_()
    target = 3 * torch.randn(*alignment.teacher.shape, len(teacher))
    # They tell a pair from a longer row by its second column.
    tokens, weights = torch.tensor(projection.tokens).long(), torch.tensor(projection.weights)
    more = (0, max(0, 2 - tokens.shape[1]))
    path = folder / "theirs.pt"
    padded = torch.nn.functional.pad(tokens, more, value=-1), torch.nn.functional.pad(weights, more)
    torch.save(dict(zip(("indices", "likelihoods"), padded)), path)
    found = {}
    for name, (kind, temperature) in LOSSES.items():
        loss = object.__new__(module.CrossTokenizerDistillationLossFn)
        vars(loss).update(temperature=temperature, vocab_topk=len(teacher), reverse_kl=False)
        vars(loss).update(uncommon_topk=8192, exact_token_match_only=False, student_vocab_size=len(student))
        where = {"projection_matrix_path": str(path), "teacher_vocab_size": len(teacher)}
        align = _alignment(module, alignment)
        if kind == "p-kl":
            theirs = loss._compute_p_kl(logits, target, align, **where)[0]
        else:
            theirs = loss._compute_gold(logits, target, align, xtoken_loss=kind == "h-kl", **where)[0]
        form = SpanLoss(
            "p-kl" if kind == "p-kl" else "h-kl",
            temperature=temperature,
            threshold=1.0 if kind == "gold" else 0.6,
        )
        ours = span_losses(logits, target, alignment, projection, form)
        ours = ours.mean() * temperature**2
        a, b = (torch.autograd.grad(one, logits)[0] for one in (theirs, ours))
        found[name] = Compared(theirs.item(), ours.item(), ((a - b).norm() / a.norm()).item())
    return found


def _alignment(module: Any, alignment: Alignment) -> Any:
    """Ours in their form: spans are numbered from 0 in each row."""
    first = [int(row[row >= 0].min()) for row in alignment.student]

    def in_rows(ids: Tensor) -> Tensor:
        return torch.stack([torch.where(row >= 0, row - at, -1) for row, at in zip(ids, first)])

    student, teacher = in_rows(alignment.student), in_rows(alignment.teacher)
    valid = torch.arange(int(student.max()) + 1) <= student.amax(1, keepdim=True)
    result = object.__new__(module.LocalizedAlignment)
    vars(result).update(sample_mask=torch.ones(len(student)), pair_valid=valid, pair_is_correct=valid)
    vars(result).update(student_chunk_id=student, teacher_chunk_id=teacher)
    return result


def different_rows(folder: Path) -> tuple[int, list[str]]:
    """Number of the student's tokens, and those whose weights by NeMo-RL's tools are others."""
    _modules()
    from tools.x_token.minimal_projection_via_multitoken import add_multitoken_mappings
    from transformers import PreTrainedTokenizerFast

    places = train(folder / "a", 380, digits=3), train(folder / "b", 340, digits=1, special=("<eos>",))
    student, teacher = map(ByteVocabulary, places)
    theirs = [PreTrainedTokenizerFast(tokenizer_file=str(place / "tokenizer.json")) for place in places]
    counts: dict[tuple[int, int], float] = defaultdict(float)
    for source, target, role in ((*theirs, "student"), (*theirs[::-1], "teacher")):
        add_multitoken_mappings(
            source_tokenizer=source,
            target_tokenizer=target,
            source_total_vocab_size=len(source),
            source_ignore_ids=set(),
            target_ignore_ids=set(),
            source_role=role,
            transformation_counts=counts,
            tokens_to_cut=4,
            use_raw_tokens=False,
            use_canonicalization=False,
        )
    rows: dict[int, dict[int, float]] = defaultdict(dict)
    for (i, j), weight in counts.items():
        rows[i][j] = weight
    names = theirs[1].get_vocab()
    projection, different = Projection.build(student, teacher), []
    for i, name in enumerate(theirs[0].convert_ids_to_tokens(range(len(student)))):
        if name in names:  # reapply_exact_map
            row = {names[name]: 1.0}
        else:  # sort_and_cut_projection_matrix
            kept = sorted(rows[i].items(), key=lambda pair: -pair[1])[:4]
            row = {j: weight / sum(w for _, w in kept) for j, weight in kept}
        mine = zip(projection.tokens[i].tolist(), projection.weights[i].tolist())
        ours = {j: weight for j, weight in mine if j >= 0}
        if set(ours) != set(row) or any(abs(ours[j] - row[j]) > 1e-6 for j in row):
            different.append(name)
    return len(student), different

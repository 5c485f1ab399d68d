"""Faults of the training loop that every layout has, and what is only logged.

Every function is called once on each rank before anything is built, and patches what a rank then calls.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from tests.proof.certify.patching import result, then, wrap

LOOP = "megatron.training.training"


def _reported(change: Any, forward_only: bool) -> None:
    """Change what the loss function reports of micro-batches, in training or in evaluation."""

    def other(run: Any) -> Any:
        def running(*args: Any, **kwargs: Any) -> Any:
            found = run(*args, **kwargs)
            return change(found) if kwargs["forward_only"] is forward_only else found

        return running

    result(LOOP, "get_forward_backward_func", other)


def last_loss_logged() -> None:
    """The logged loss is that of the last micro-batch."""
    _reported(lambda found: found[-1:], False)


def validation_per_microbatch() -> None:
    """The validation loss is the mean of the micro-batches' means, however many tokens each has."""

    def mean(loss: Tensor) -> Tensor:
        return torch.stack([loss[0] / loss[1], torch.ones(())])

    _reported(lambda found: [{name: mean(loss) for name, loss in one.items()} for one in found], True)


def biases_ignored_in_evaluation() -> None:
    """Routers ignore the expert biases when the model evaluates."""

    def make(route: Any) -> Any:
        def routing(self: Any, *args: Any, **kwargs: Any) -> Any:
            bias = self.expert_bias
            self.expert_bias = bias if self.training else torch.zeros_like(bias)
            try:
                return route(self, *args, **kwargs)
            finally:
                self.expert_bias = bias

        return routing

    wrap(TopKRouter, "routing", make)


def balance_logged_per_step() -> None:
    """The logged balancing loss is the sum over micro-batches, not their mean."""

    def make(report: Any) -> Any:
        return lambda self, loss_scale, *args, **kwargs: report(self, 1.0, *args, **kwargs)

    wrap(MoEMetricsTracker, "report", make)


def labels_not_shifted() -> None:
    """The label of a token is the token itself."""
    result(GPTDataset, "__getitem__", lambda sample: sample | {"labels": sample["tokens"].clone()})


def vectors_keep_their_rate() -> None:
    """Parameters without weight decay keep the learning rate of the first step."""

    def keep(schedule: Any) -> None:
        for group in schedule.optimizer.param_groups:
            if group["wd_mult"] == 0.0:
                group["lr"] = group.setdefault("first_lr", group["lr"])

    then(OptimizerParamScheduler, "step", keep)


def rate_decays_as_cosine() -> None:
    """The learning rate decays along a cosine instead of a line."""

    def make(rate: Any) -> Any:
        def of(self: Any, group: Any) -> Any:
            style = self.lr_decay_style
            self.lr_decay_style = "cosine" if style == "linear" else style
            try:
                return rate(self, group)
            finally:
                self.lr_decay_style = style

        return of

    wrap(OptimizerParamScheduler, "get_lr", make)


def samples_counted_twice() -> None:
    """The log counts every sample twice."""

    def make(log: Any) -> Any:
        def twice(*args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args

            count = get_args().consumed_train_samples
            get_args().consumed_train_samples = 2 * count
            try:
                return log(*args, **kwargs)
            finally:
                get_args().consumed_train_samples = count

        return twice

    wrap(LOOP, "training_log", make)


def parameter_norm_of_copies() -> None:
    """The logged norm of the parameters counts those that TP ranks share once per rank."""
    result("megatron.training.utils.common_utils", "param_is_not_tensor_parallel_duplicate", lambda _: True)

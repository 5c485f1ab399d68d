"""The second part of `outside_faults_3`: optimizer, schedule, data, checkpoints, logs, validation, export."""

from __future__ import annotations

from typing import Any

import torch

from tests.proof.certify.outside_faults import OutsideFault
from tests.proof.certify.patching import attribute, then, wrap

OPTIMIZER = "megatron.core.optimizer"
TRAINING = "megatron.training.training"


def experts_missing_in_norm() -> None:
    """Tensor-parallel ranks other than the first leave their experts out of the norm of the gradients."""
    rank = attribute("megatron.core.parallel_state.get_tensor_model_parallel_rank")

    def make(counts: Any) -> Any:
        def counts_dense(param: Any, *args: Any, **kwargs: Any) -> bool:
            own = getattr(param, "allreduce", True) or rank() == 0
            return bool(own and counts(param, *args, **kwargs))

        return counts_dense

    wrap("megatron.core.tensor_parallel", "param_is_not_tensor_parallel_duplicate", make)


def vectors_decay() -> None:
    """Weight decay also applies to norms, biases, and the vectors A, D and dt of Mamba."""

    def make(groups: Any) -> Any:
        return lambda chunks, config, _overrides: groups(chunks, config, {})

    wrap(OPTIMIZER, "_get_param_groups", make)


def first_step_as_second() -> None:
    """Adam's counter starts at 1, so its first update has the bias correction of the second."""

    def make(init: Any) -> Any:
        def counted(self: Any, group: Any, *args: Any) -> Any:
            fresh = [p for p in group["params"] if p.grad is not None and not self.state[p]]
            found = init(self, group, *args)
            for parameter in fresh:
                self.state[parameter]["step"] += 1
            return found

        return counted

    wrap(torch.optim.Adam, "_init_group", make)


def masters_from_bf16() -> None:
    """On a resume the FP32 master weights are made from the BF16 weights, not read from the checkpoint."""
    name = f"{OPTIMIZER}.optimizer.Float16OptimizerWithFloat16Params"
    then(attribute(name), "load_state_dict", lambda optimizer: optimizer.reload_model_params())


def moments_of_experts_lost() -> None:
    """On a resume the moments of Adam are restored for the dense optimizer, not for that of the experts."""

    def forget(chained: Any) -> None:
        for optimizer in chained.chained_optimizers[1:]:
            for state in optimizer.optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()

    then(attribute(f"{OPTIMIZER}.optimizer.ChainedOptimizer"), "load_state_dict", forget)


def schedule_twice_as_far() -> None:
    """On a resume the schedule of the learning rate advances by the stored steps twice."""
    name = "megatron.core.optimizer_param_scheduler.OptimizerParamScheduler"
    then(attribute(name), "load_state_dict", lambda schedule: schedule.step(schedule.num_steps))


def data_from_the_start() -> None:
    """A resumed run reads the data from the first sample on, not from where the checkpoint was written."""

    def make(build: Any) -> Any:
        return lambda dataset, _consumed: build(dataset, 0)

    wrap(TRAINING, "build_pretraining_data_loader", make)


def experts_interleaved_in_files() -> None:
    """A checkpoint numbers experts as if ranks held every n-th one, so other layouts load them permuted."""

    def make(sharded: Any) -> Any:
        def renumbered(self: Any, prefix: str = "", offsets: tuple = (), metadata: Any = None) -> Any:
            entries = sharded(self, prefix, offsets, metadata)
            first, ranks, axis = self.ep_group.rank() * self.num_gemms, self.ep_group.size(), len(offsets)
            for entry in entries.values():
                place = list(entry.global_offset)
                place[axis] = (place[axis] - first) * ranks + self.ep_group.rank()
                entry.global_offset = tuple(place)
            return entries

        return renumbered

    wrap(attribute("megatron_nemotron3.layers.experts.GroupedLinear"), "own_sharded_state_dict", make)


def recomputed_losses_twice() -> None:
    """The balance losses of layers that are recomputed are added to the log in both forward passes."""

    def make(record: Any) -> Any:
        def twice(self: Any, *given: Any, **named: Any) -> None:
            record(self, *given, **named)
            record(self, *given, **named)

        return twice

    wrap(attribute("megatron.core.transformer.moe.moe_logging.MoEMetricsTracker"), "record", make)


def validation_loss_times_ranks() -> None:
    """In validation the loss is summed over context-parallel ranks, but the tokens are their mean."""
    ranks = attribute("megatron.core.parallel_state.get_context_parallel_world_size")

    def make(report: Any) -> Any:
        def divided(model: Any, *args: Any) -> Any:
            share = torch.tensor([1.0, 1.0 if model.training else 1.0 / ranks()])
            return {name: values * share for name, values in report(model, *args).items()}

        return divided

    wrap("megatron_nemotron3.train.fine_tuning", "reported", make)


def depths_as_blocks_in_export() -> None:
    """The exported config.json states the number of MTP depths where readers expect the number of blocks."""

    def make(write: Any) -> Any:
        def stated(config: Any, **options: Any) -> Any:
            return write(config, **options) | {"num_nextn_predict_layers": config.mtp_num_layers}

        return stated

    wrap("megatron_nemotron3.checkpoints.convert.config_json", "write", make)


def exported_bias_rounded() -> None:
    """The export rounds the expert bias, which chooses experts, to BF16."""

    def make(read: Any) -> Any:
        def rounded(self: Any, name: str, slices: Any = None) -> Any:
            found = read(self, name, slices)
            return found.bfloat16().to(found.dtype) if name.endswith("e_score_correction_bias") else found

        return rounded

    wrap(attribute("megatron_nemotron3.checkpoints.convert.views.Converted"), "read", make)


OUTSIDE_B: dict[str, OutsideFault] = {
    "experts_missing_in_norm": OutsideFault(experts_missing_in_norm, "TP2 EP2", "radixark/Megatron-LM#80"),
    "vectors_decay": OutsideFault(vectors_decay, "DP2 per batch", "ServiceNow/Fast-LLM#545", True),
    "first_step_as_second": OutsideFault(first_step_as_second, "DP2", "pytorch/torchtitan#4382", True),
    "masters_from_bf16": OutsideFault(masters_from_bf16, "TP2, BF16", "TensorAuto/OpenTau#185", True),
    "moments_of_experts_lost": OutsideFault(moments_of_experts_lost, "TP2 EP2", "NVIDIA/Megatron-LM#761"),
    "schedule_twice_as_far": OutsideFault(schedule_twice_as_far, "TP2", "THUDM/slime#1546", True),
    "data_from_the_start": OutsideFault(data_from_the_start, "PP2", "NVIDIA-NeMo/Megatron-Bridge#3503", True),
    "experts_interleaved_in_files": OutsideFault(
        experts_interleaved_in_files, "EP2", "NVIDIA-NeMo/Megatron-Bridge#1716"
    ),
    "recomputed_losses_twice": OutsideFault(
        recomputed_losses_twice, "DP2, recomputed", "NVIDIA/Megatron-LM#1585", True
    ),
    "validation_loss_times_ranks": OutsideFault(
        validation_loss_times_ranks, "CP2", "huggingface/transformers#48167"
    ),
    "depths_as_blocks_in_export": OutsideFault(
        depths_as_blocks_in_export, "Super", "NVIDIA-NeMo/Megatron-Bridge#5948", True
    ),
    "exported_bias_rounded": OutsideFault(
        exported_bias_rounded, "TP2 EP2, BF16", "NVIDIA-NeMo/Automodel#2553", True
    ),
}

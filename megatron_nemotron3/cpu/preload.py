"""Imports Megatron's training loop without the compiler: for the server that ranks are forked from."""

from megatron_nemotron3.cpu.mode import import_megatron

import_megatron("megatron.training")

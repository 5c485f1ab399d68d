"""Imports Megatron's training loop without the compiler: for the server that ranks are forked from."""

import argparse
import importlib

from megatron_nemotron3.cpu.mode import cpu_mode, import_megatron

import_megatron("megatron.training")
with cpu_mode():  # it keeps what Megatron's parser is made of
    importlib.import_module("megatron.training.arguments").add_megatron_arguments(argparse.ArgumentParser())

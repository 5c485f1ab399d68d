"""NVFP4 training: the published recipe, number formats, emulation on any device, and measured errors."""

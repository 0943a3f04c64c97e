"""A released model's config and state dict <-> BlockConfig and full state dict of our modules, bit for bit.

One module per family: `llama` and `qwen3` in the naming of transformers, `wan` in that of diffusers, `wan_original` in
that of the Wan 2.1 release. Each has `block_config`, `key_map` and `rope_tables`. Configs are an object or the dict in
a config.json; the libraries themselves are not imported.
"""

from examples.checkpoints import llama, qwen3, wan, wan_original
from examples.checkpoints.keymap import KeyMap

__all__ = ["KeyMap", "llama", "qwen3", "wan", "wan_original"]

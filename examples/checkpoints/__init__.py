"""A released model's config and state dict <-> BlockArgs and full state dict of our modules, bit for bit.

One module per family: `llama` and `qwen3` in the naming of transformers, `wan` in that of diffusers, `wan_original` in
that of the Wan 2.1 release. Each has `block_args`, `key_map` and `rope_tables`; `num_layers` reads any of them.
Configs are an object or the dict in a config.json; the libraries themselves are not imported.

    with torch.device("meta"):
        args, sizes = llama.block_args(config), {"num_layers": num_layers(config), "vocab_size": config["vocab_size"]}
        model = CausalLM(args, Collectives(tp_group), **sizes)
    load_full_state_dict(model.to_empty(device=device), llama.key_map(config).to_full(state_dict))
"""

from examples.checkpoints import llama, qwen3, wan, wan_original
from examples.checkpoints.fields import num_layers
from examples.checkpoints.keymap import KeyMap

__all__ = ["KeyMap", "llama", "num_layers", "qwen3", "wan", "wan_original"]

"""One file per layer of a digest, named as in `Layer`, with its `SPEC`."""

from importlib import import_module

from tpcompile.evidence.layers.spec import LayerSpec
from tpcompile.evidence.records import Layer

SPECS: dict[Layer, LayerSpec] = {layer: import_module(f"{__name__}.{layer}").SPEC for layer in Layer}
"""Layer -> how its items are made, compared and explained, from cause to effect."""

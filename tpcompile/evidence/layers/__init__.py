"""One file per layer of a digest, from cause to effect; a new layer is a file and a line here."""

from tpcompile.evidence.layers import collectives, environment, graph, guards, inputs, kernels, lowered
from tpcompile.evidence.layers.spec import LayerSpec
from tpcompile.evidence.records import Layer

SPECS: dict[Layer, LayerSpec] = {
    spec.layer: spec
    for spec in (
        environment.SPEC,
        inputs.SPEC,
        graph.SPEC,
        guards.SPEC,
        collectives.SPEC,
        lowered.SPEC,
        kernels.SPEC,
    )
}
"""Layer -> how its items are made, compared and explained, from cause to effect."""

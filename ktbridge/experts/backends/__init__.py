"""Other implementations of a layer of routed experts: KTransformers' wheel ``kt-kernel``."""

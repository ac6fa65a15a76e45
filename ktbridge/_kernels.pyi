"""Types of the C++ module; kernels/bindings.cpp says what each argument is."""

import enum
from collections.abc import Sequence

ISAS: list[str]

def isa_available() -> list[str]: ...
def why_no_tiles() -> str: ...
def explain_faults(before: str, behind: str) -> None: ...
def measure_peak(isa: str, places: Sequence[tuple[int, int]], seconds: float) -> float: ...
def measure_bandwidth(places: Sequence[tuple[int, int]], bytes: int, seconds: float) -> float: ...
def release_memory() -> None: ...

class Storage(enum.Enum):
    bf16 = ...
    fp8 = ...
    int8 = ...
    int4 = ...
    mxfp4 = ...

class Keep(enum.Enum):
    nothing = ...
    recompute = ...
    retain = ...

STRIP: int
DOUBLE: int

class Load:
    def __init__(self, slots: int, strips: int, doubles: int) -> None: ...

def saved_memory(hidden: int, intermediate: int, rank: int, load: Load, keep: Keep) -> int: ...
def backward_memory(hidden: int, intermediate: int, rank: int, load: Load, keep: Keep) -> int: ...

class Job:
    @property
    def done(self) -> bool: ...
    @property
    def seconds(self) -> float: ...
    @property
    def bytes(self) -> int: ...
    def check(self) -> None: ...

class Weights:
    def __init__(
        self,
        data: Sequence[int],
        scale: Sequence[int],
        stride: int,
        scale_stride: int,
        bias: int = 0,
    ) -> None: ...

class Layer:
    def __init__(
        self,
        hidden: int,
        intermediate: int,
        storage: Storage,
        weights: Sequence[Weights],
        scale_is_bf16: bool,
        row_shift: int,
        column_shift: int,
        gating: tuple[float, float, float] | None,
        isa: str,
        places: Sequence[tuple[int, int]],
    ) -> None: ...
    def forward(
        self,
        launch: int,
        stream: int,
        lora: Sequence[int],
        rank: int,
        scale: float,
        tokens: int,
        top_k: int,
        hidden: int,
        ids: int,
        weights: int,
        out: int,
        keep: Keep,
        dropout: tuple[int, int, int],
    ) -> Job: ...
    def backward(
        self,
        launch: int,
        stream: int,
        before: Job,
        last: bool,
        lora: Sequence[int],
        rank: int,
        scale: float,
        hidden: int,
        d_out: int,
        d_hidden: int,
        d_weights: int,
        d_lora: Sequence[int],
    ) -> Job: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...

"""Types of the C++ module; kernels/bindings.cpp says what each argument is."""

import enum
from collections.abc import Sequence

def isa_available() -> list[str]: ...
def why_no_tiles() -> str: ...
def explain_faults(before: str, behind: str) -> None: ...
def measure_peak(isa: str, places: Sequence[Place]) -> float: ...
def add_delta(
    isa: str,
    values: int,
    halves: bool,
    rows: int,
    columns: int,
    stride: int,
    left: int,
    rank: int,
    right: int,
) -> int: ...
def quantize(
    isa: str, values: int, halves: bool, rows: int, columns: int, to_int8: bool, codes: int, scales: int
) -> bool: ...

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

class Memory:
    @property
    def saved(self) -> int: ...
    @property
    def backward(self) -> int: ...

def pass_memory(hidden: int, intermediate: int, rank: int, load: Load, keep: Keep) -> Memory: ...

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
        self, data: Sequence[int], scale: Sequence[int], stride: int, scale_stride: int, bias: int = 0
    ) -> None: ...

class Place:
    def __init__(self, cpu: int, node: int) -> None: ...

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
        places: Sequence[Place],
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
        lora_of_token: int,
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

"""Types of the C++ module; kernels/bindings.cpp says what each argument is."""

import enum
from collections.abc import Sequence

def isa_available() -> list[str]: ...
def isa_default() -> str: ...
def why_no_tiles() -> str: ...
def explain_faults(before: str, behind: str) -> None: ...
def threads_default() -> int: ...
def measure_peak(isa: str, threads: int, seconds: float) -> float: ...
def measure_bandwidth(threads: int, bytes: int, seconds: float) -> float: ...
def add_delta(
    values: int,
    halves: bool,
    rows: int,
    columns: int,
    stride: int,
    left: int,
    rank: int,
    right: int,
) -> int: ...
def release_memory() -> None: ...

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

class Saved:
    @property
    def bytes(self) -> int: ...

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
        storage: str,
        weights: Sequence[Weights],
        scale_is_bf16: bool,
        row_group: int,
        column_group: int,
        gating: tuple[float, float, float] | None,
        isa: str,
        threads: int,
    ) -> None: ...
    def forward(
        self,
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
    ) -> Saved | None: ...
    def backward(
        self,
        saved: Saved,
        lora: Sequence[int],
        rank: int,
        scale: float,
        hidden: int,
        d_out: int,
        d_hidden: int,
        d_weights: int,
        d_lora: Sequence[int],
    ) -> None: ...
    def queue_forward(
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
    def queue_backward(
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

"""Types of the C++ module; kernels/bindings.cpp says what each argument is."""

from collections.abc import Sequence

def isa_available() -> list[str]: ...
def isa_default() -> str: ...
def threads_default() -> int: ...

class Saved:
    @property
    def bytes(self) -> int: ...

class Layer:
    def __init__(
        self,
        hidden: int,
        intermediate: int,
        gate: Sequence[int],
        up: Sequence[int],
        down: Sequence[int],
        strides: tuple[int, int, int],
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
        keep: bool,
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
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...

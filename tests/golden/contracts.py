"""All contracts: importing this registers them."""

from golden import adapters, clients, evaluation, faces, mistakes, training  # noqa: F401
from golden.store import CONTRACTS

__all__ = ["CONTRACTS"]

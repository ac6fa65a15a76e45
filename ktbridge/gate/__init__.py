"""One verdict for a deploy: is this adapter whole, does it take effect, and what did it cost?

``plan`` makes commands of a request (validate, verify, eval) and digests of all that they read, ``run`` runs
them by the recipes' runner and keeps what is finished, ``verdict`` is what comes out: gate.json.
"""

from ktbridge.gate.plan import GateRequest, plan_gate, read_inputs
from ktbridge.gate.run import gate_runner, run_gate
from ktbridge.gate.verdict import GateVerdict

__all__ = ["GateRequest", "GateVerdict", "gate_runner", "plan_gate", "read_inputs", "run_gate"]

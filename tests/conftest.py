"""Before any test imports torch: its idle threads would spin on the CPUs that the kernels want."""

import ktbridge.sft  # noqa: F401

"""Expert layers given to a GPU executor, on the GPU or, computing the same, on the CPU."""

import mmap
import warnings
from dataclasses import replace

import torch
from expertmoe import describe, make_weights, randomize

from ktbridge.experts.gpu import placement
from ktbridge.experts.gpu.copying import HostCopier
from ktbridge.experts.gpu.executor import GpuBinding, GpuExperts
from ktbridge.experts.gpu.layout import group_experts
from ktbridge.sft import MoELoRAExperts

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Breaking(HostCopier):
    """Copies, or fails where it is told to and leaves garbage."""

    broken = False

    def start(self, group, slot, after):
        if self.broken:
            slot[:] = 0xEE
            raise OSError("no link")
        return super().start(group, slot, after)


def allow_on_cpu(put=setattr, free=60_000_000):
    """Let runs have their experts computed by the GPU's executor on the CPU, in groups of a few experts.

    ``free`` bytes of the GPU memory that there isn't; ``put`` is ``setattr``, or a MonkeyPatch's.
    """
    from ktbridge.sft import expert_device

    put(placement, "GROUPS", (3,))
    put(expert_device, "_obstacle", lambda device: "")
    put(expert_device, "_limits", lambda *_: placement.MemoryBudget(free, 1000, 100, 64, 128))
    put(expert_device, "_measure", lambda *_: (some_costs(), 0))


def some_costs(cpu=None):
    """Costs of a machine whose link is slow; ``cpu`` seconds a token and layer there."""
    each = placement.Line(1e-4, 1e-7)
    on_cpu = None if cpu is None else placement.Line(0.0, cpu)
    return placement.Costs(1e7, (each, each), outside=(each, each), loss=each, cpu=on_cpu)


def there(inputs):
    """Tensors on the GPU."""
    return tuple(tensor.to(CUDA) for tensor in inputs)


def take_back(layer):
    """Have a layer computed on the CPU again."""
    torch.cuda.synchronize()
    layer.move_lora(CPU)
    layer.gpu = None


def slot_for(layer, groups):
    """Bytes of a slot that make some ``groups`` groups of a layer."""
    whole = sum(group.bytes for group in group_experts(layer.weights, 1 << 40))
    one = max(group.bytes for group in group_experts(layer.weights, least_slot(layer)))
    return max(-(-whole // groups), one)


def resize(experts, slots, resident, outputs_on_host=False):
    """Have other slots and other layers resident."""
    experts.resize(
        replace(experts.placement, slots=slots, resident=resident, outputs_on_host=outputs_on_host)
    )


def least_slot(layer):
    """Bytes that hold any one expert."""
    tensors = [t for w in layer.weights for t in (w.weight, w.scale) if t is not None]
    return sum(t[0].numel() * t[0].element_size() + 256 for t in tensors) + 256


def chain(layers, inputs, d_out):
    """Output and all gradients of layers one after another."""
    hidden, ids, routing = (tensor.clone() for tensor in inputs)
    first, weights = hidden.requires_grad_(), routing.requires_grad_()
    for layer in layers:
        layer.zero_grad()
        hidden = layer(hidden, ids, weights)
    hidden.backward(d_out)
    found = {"out": hidden.detach(), "hidden": first.grad, "weights": weights.grad}
    for index, layer in enumerate(layers):
        found |= {f"{index}.{name}": p.grad for name, p in layer.named_parameters()}
    return found


def give(layers, device=CPU, *, groups=1, slots=2, resident=(), copier=None, loader=None, **options):
    """Have ``layers`` (a list) computed on ``device``, numbered in order; ``options`` of the placement."""
    size = max(slot_for(layer, groups) for layer in layers)
    placed = placement.Placement(0, slot_bytes=size, slots=slots, resident=tuple(resident), **options)
    experts = GpuExperts(
        {index: layer.weights for index, layer in enumerate(layers)},
        device,
        layers[0].lora_rank,
        placed,
        copier or HostCopier(),
        loader=loader,
    )
    for index, layer in enumerate(layers):
        layer.gpu = GpuBinding(experts, index)
        layer.move_lora(device)
    return experts


def mapped_layer(path, shape, storage="bf16", seed=0, **options):
    """A layer whose weights are in a file that is mapped read-only, and its weights in float32."""
    stored, plain = make_weights(shape, storage, seed)
    with open(path, "w+b") as file:
        file.write(b"x" * 1000)  # a header
        for tensor in (tensor for tensors in stored for tensor in tensors):
            file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        file.flush()
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    at = 1000
    weights = []
    for tensors in stored:
        views = []
        for tensor in tensors:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=at)
            views.append(flat.view(tensor.shape))
            at += tensor.numel() * tensor.element_size()
        weights.append(describe(storage, views))
    return randomize(MoELoRAExperts.from_tensors(*weights, threads=2, **options)), plain

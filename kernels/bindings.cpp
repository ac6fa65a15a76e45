// The pybind11 module ktbridge._kernels. Tensors come as addresses: the module must not link torch (one
// build serves every torch), and bfloat16 has no buffer protocol. ktbridge/sft/experts.py is the only
// caller; it checks dtypes, shapes and contiguity, and keeps the tensors alive.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <limits>

#include "common/cpu.h"
#include "moe/layer.h"

namespace py = pybind11;

namespace ktbridge {
namespace {

using Address = std::uintptr_t;
using LoraAddresses = std::array<Address, 6>;  // gate a, b; up a, b; down a, b

template <class T>
Lora<T> lora_at(const LoraAddresses& at, int rank, float scale) {
  const auto pair = [&](int i) {
    return Pair<T>{reinterpret_cast<T*>(at[i]), reinterpret_cast<T*>(at[i + 1])};
  };
  return {pair(0), pair(2), pair(4), rank, scale};
}

// One layer's frozen experts and the machine that runs them.
class Layer {
 public:
  // Per expert, the address of row 0 of gate, up [I, H] and down [H, I]; strides in elements.
  Layer(int hidden, int intermediate, const std::vector<Address>& gate, const std::vector<Address>& up,
        const std::vector<Address>& down, std::array<std::ptrdiff_t, 3> strides, const std::string& isa,
        int threads)
      : isa_(choose_isa(isa)), machine_{gemm_for(isa_), &Pool::shared(choose_threads(threads))} {
    if (hidden < 1 || intermediate < 1 || gate.empty() || gate.size() != up.size() ||
        gate.size() != down.size())
      throw std::invalid_argument("every expert needs a gate, an up and a down matrix of at least 1 x 1");
    experts_.hidden = hidden;
    experts_.intermediate = intermediate;
    for (std::size_t e = 0; e < gate.size(); ++e) {
      const auto matrix = [&](Address at, int which, int rows, int columns) {
        return Matrix{reinterpret_cast<const void*>(at), strides[which], rows, columns, Storage::bf16};
      };
      experts_.gate.push_back(matrix(gate[e], 0, intermediate, hidden));
      experts_.up.push_back(matrix(up[e], 1, intermediate, hidden));
      experts_.down.push_back(matrix(down[e], 2, hidden, intermediate));
    }
  }

  std::unique_ptr<Saved> run_forward(const LoraAddresses& lora, int rank, float scale, int tokens,
                                     int top_k, Address hidden, Address ids, Address weights, Address out,
                                     bool keep) const {
    if (static_cast<std::int64_t>(tokens) * top_k > std::numeric_limits<int>::max() / 2)
      throw std::invalid_argument("too many tokens in one call: " + std::to_string(tokens));
    py::gil_scoped_release release;
    return forward(machine_, experts_, lora_at<const float>(lora, rank, scale), tokens, top_k,
                   reinterpret_cast<const bf16*>(hidden), reinterpret_cast<const std::int64_t*>(ids),
                   reinterpret_cast<const float*>(weights), reinterpret_cast<bf16*>(out), keep);
  }

  void run_backward(const Saved& saved, const LoraAddresses& lora, int rank, float scale, Address hidden,
                    Address d_out, Address d_hidden, Address d_weights, const LoraAddresses& d_lora) const {
    py::gil_scoped_release release;
    backward(machine_, experts_, lora_at<const float>(lora, rank, scale), saved,
             reinterpret_cast<const bf16*>(hidden), reinterpret_cast<const bf16*>(d_out),
             reinterpret_cast<bf16*>(d_hidden), reinterpret_cast<float*>(d_weights),
             lora_at<float>(d_lora, rank, scale));
  }

  const char* isa() const { return isa_name(isa_); }
  int threads() const { return machine_.pool->threads(); }

 private:
  Isa isa_;
  Machine machine_;
  Experts experts_;
};

}  // namespace
}  // namespace ktbridge

PYBIND11_MODULE(_kernels, m) {
  using namespace ktbridge;
  m.doc() = "MoE-LoRA layer on CPU (private: use ktbridge.sft.MoELoRAExperts)";
  m.def(
      "isa_available",
      [] {
        std::vector<std::string> names;
        for (Isa isa : available_isas()) names.push_back(isa_name(isa));
        return names;
      },
      "Kernel paths this CPU can run, worst first.");
  m.def(
      "isa_default", [] { return std::string(isa_name(choose_isa("auto"))); },
      "The path that isa='auto' takes (KTBRIDGE_ISA decides, if set).");
  m.def(
      "threads_default", [] { return choose_threads(0); },
      "Threads that threads=0 means (KTBRIDGE_THREADS decides, if set).");
  py::class_<Saved>(m, "Saved", "What forward keeps for backward.")
      .def_property_readonly("bytes", &Saved::bytes);
  py::class_<Layer>(m, "Layer")
      .def(py::init<int, int, const std::vector<Address>&, const std::vector<Address>&,
                    const std::vector<Address>&, std::array<std::ptrdiff_t, 3>, const std::string&, int>())
      .def("forward", &Layer::run_forward)
      .def("backward", &Layer::run_backward)
      .def_property_readonly("isa", &Layer::isa)
      .def_property_readonly("threads", &Layer::threads);
}

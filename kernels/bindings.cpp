// The pybind11 module ktbridge._kernels. Tensors come as addresses: the module must not link torch (one
// build serves every torch), and bfloat16 has no buffer protocol. ktbridge/experts calls this: weights.py
// and expert_call.py check dtypes, shapes and contiguity, and keep the tensors alive. So does
// ktbridge/adapter/merge_values.py for add_delta, and quantize.py for quantize.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <tuple>

#include "common/ceilings.h"
#include "common/cpu.h"
#include "common/faults.h"
#include "common/pool.h"
#include "job.h"
#include "moe/layer.h"

namespace py = pybind11;

namespace ktbridge {
namespace {

using Address = std::uintptr_t;
template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

using LoraAddresses = std::array<Address, 6>;  // gate a, b; up a, b; down a, b; 0: none

template <class T>
Lora<T> lora_at(const LoraAddresses& addresses, int rank, float scale) {
  Lora<T> lora;
  for (int projection = 0; projection < kProjections; ++projection) {
    lora.a[projection] = at<T>(addresses[2 * projection]);
    lora.b[projection] = at<T>(addresses[2 * projection + 1]);
  }
  lora.rank = rank;
  lora.scale = scale;
  return lora;
}

using DropoutAt = std::tuple<std::uint64_t, std::uint16_t, Address>;  // key, threshold, numbers or 0

Dropout dropout_at(const DropoutAt& dropout) {
  const auto& [key, threshold, numbers] = dropout;
  return {key, threshold, at<const std::int64_t>(numbers)};
}

// One projection of all experts, alike but for the addresses.
struct Weights {
  std::vector<Address> data, scale;  // of row 0; `scale` is empty for bf16
  std::ptrdiff_t stride = 0;         // bytes
  std::ptrdiff_t scale_stride = 0;   // scales
  Address bias = 0;                  // [E, rows padded by 0 to whole tiles] float32, which is copied; or 0
};

using GatingAt = std::tuple<float, float, float>;  // limit, alpha, offset (isa/kernels.h)

// One layer's frozen experts and the machine that runs them.
class Layer {
 public:
  Layer(int hidden, int intermediate, Storage storage, const std::array<Weights, 3>& weights,
        bool scale_is_bf16, int row_shift, int column_shift, const std::optional<GatingAt>& gating,
        const std::string& isa, const std::vector<Place>& places)
      : isa_(isa), machine_{&kernels_for(isa), &Pool::shared(places)} {
    const std::size_t count = weights[kGate].data.size();
    experts_->hidden = hidden;
    experts_->intermediate = intermediate;
    experts_->plain = !gating;
    if (gating) std::tie(experts_->gating.limit, experts_->gating.alpha, experts_->gating.offset) = *gating;
    for (int projection = 0; projection < kProjections; ++projection) {
      const Weights& from = weights[projection];
      Matrix matrix{.stride = from.stride,
                    .rows = projection == kDown ? hidden : intermediate,
                    .columns = projection == kDown ? intermediate : hidden,
                    .storage = storage,
                    .scale_stride = from.scale_stride,
                    .scale_is_bf16 = scale_is_bf16,
                    .row_shift = row_shift,
                    .column_shift = column_shift};
      const float* bias = at<const float>(from.bias);
      if (bias != nullptr)
        experts_->bias[projection].assign(bias, bias + count * tiles_of(matrix.rows) * kSteps);
      for (std::size_t e = 0; e < count; ++e) {
        matrix.data = at<const void>(from.data.at(e));
        if (storage != Storage::bf16) matrix.scale = at<const void>(from.scale.at(e));
        experts_->weight[projection].push_back(matrix);
      }
    }
    if (machine_.pool->nodes() > 1)
      for (const Matrix& gate : experts_->weight[kGate])
        experts_->node.push_back(machine_.pool->node_index(node_of_page(gate.data)));
  }

  // Both run at once (`launch` 0), and throw what the pass throws; or when a CUDA stream comes to them. Then
  // the caller keeps what is addressed alive, and hears of a failure by the job.
  std::shared_ptr<Job> forward(Address launch, Address stream, const LoraAddresses& lora, int rank,
                               float scale, int tokens, int top_k, Address hidden, Address ids,
                               Address weights, Address out, Keep keep, const DropoutAt& dropout,
                               Address lora_of_token) const {
    if (static_cast<std::int64_t>(tokens) * top_k > std::numeric_limits<int>::max() / 2)
      throw std::invalid_argument("too many tokens in one call: " + std::to_string(tokens));
    if (lora_of_token != 0 && keep != Keep::nothing)
      throw std::invalid_argument("LoRA by token has no backward");
    return started(launch, stream, [=, machine = machine_, experts = experts_](Job& job) {
      job.tokens = tokens;
      job.top_k = top_k;
      try {
        Lora<const float> used = lora_at<const float>(lora, rank, scale);
        used.of_token = at<const bool>(lora_of_token);
        job.saved = ktbridge::forward(machine, *experts, used, tokens, top_k, at<const bf16>(hidden),
                                      at<const std::int64_t>(ids), at<const float>(weights), at<bf16>(out),
                                      keep, dropout_at(dropout));
      } catch (...) {  // the stream goes on until somebody hears of it: with zeros, not with garbage
        std::fill_n(at<bf16>(out), job.tokens * experts->hidden, bf16{0});
        throw;
      }
    });
  }

  // `last`: no other backward of that forward follows.
  std::shared_ptr<Job> backward(Address launch, Address stream, std::shared_ptr<Job> before, bool last,
                                const LoraAddresses& lora, int rank, float scale, Address hidden,
                                Address d_out, Address d_hidden, Address d_weights,
                                const LoraAddresses& d_lora) const {
    return started(launch, stream, [=, machine = machine_, experts = experts_](Job&) {
      const auto nothing = [&] {
        std::fill_n(at<bf16>(d_hidden), before->tokens * experts->hidden, bf16{0});
        std::fill_n(at<float>(d_weights), before->tokens * before->top_k, 0.f);
      };
      if (!before->saved) return nothing();  // its forward failed, as whoever checks that job will hear
      try {
        ktbridge::backward(machine, *experts, lora_at<const float>(lora, rank, scale), *before->saved,
                           at<const bf16>(hidden), at<const bf16>(d_out), at<bf16>(d_hidden),
                           at<float>(d_weights), lora_at<float>(d_lora, rank, scale));
      } catch (...) {
        nothing();
        throw;
      }
      if (last) before->saved.reset();
    });
  }

  const std::string& isa() const { return isa_; }
  int threads() const { return machine_.pool->threads(); }

 private:
  static std::shared_ptr<Job> started(Address launch, Address stream, std::function<void(Job&)> pass) {
    auto job = std::make_shared<Job>(std::move(pass));
    launch == 0 ? job->run() : job->launch(launch, stream);
    return job;
  }

  std::string isa_;
  Machine machine_;
  std::shared_ptr<Experts> experts_ = std::make_shared<Experts>();  // shared with passes
};

}  // namespace
}  // namespace ktbridge

PYBIND11_MODULE(_kernels, m) {
  using namespace ktbridge;
  m.doc() = "MoE-LoRA layer on CPU (private: use ktbridge.sft.MoELoRAExperts)";
  m.def("isa_available", &available_isas, "Kernel paths this CPU can run, worst first.");
  m.def("why_no_tiles", &why_no_tiles, "Why this CPU's AMX isn't used; empty where it is, or has none.");
  m.def("explain_faults", &explain_faults, py::arg("before"), py::arg("behind"),
        "What stands around a file's path where it is mapped and can't be read (kernels/common/faults.h).");
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def(
      "measure_peak",
      [](const std::string& isa, const std::vector<Place>& places) {
        return measure_peak(kernels_for(isa), Pool::shared(places));
      },
      py::arg("isa"), py::arg("places"), no_gil, "FLOP/s of products out of registers, in one round.");
  m.def(
      "add_delta",
      [](const std::string& isa, Address values, bool halves, int rows, int columns, std::ptrdiff_t stride,
         Address left, int rank, Address right) {
        const Delta delta{at<const float>(left), at<const float>(right), rank, rows, columns, stride};
        return kernels_for(isa).add_delta(delta, at<void>(values), halves);
      },
      no_gil,
      "values += left times right (Delta in kernels/isa/kernels.h); halves: of bfloat16, else float32.");
  m.def(
      "quantize",
      [](const std::string& isa, Address values, bool halves, int rows, int columns, bool to_int8,
         Address codes, Address scales) {
        const Unquantized from{at<const void>(values), halves, rows, columns};
        return kernels_for(isa).quantize(from, to_int8 ? Storage::int8 : Storage::int4, at<void>(codes),
                                         at<void>(scales));
      },
      no_gil, "Rows as INT8 or INT4 (Kernels in kernels/isa/kernels.h); false where a value isn't finite.");
  py::enum_<Storage>(m, "Storage", "How a checkpoint stores weights (kernels/weights/matrix.h).")
      .value("bf16", Storage::bf16)
      .value("fp8", Storage::fp8)
      .value("int8", Storage::int8)
      .value("int4", Storage::int4)
      .value("mxfp4", Storage::mxfp4);
  py::enum_<Keep>(m, "Keep", "What forward keeps for backward.")
      .value("nothing", Keep::nothing)
      .value("recompute", Keep::recompute)
      .value("retain", Keep::retain);
  m.attr("STRIP") = kStrip;
  m.attr("DOUBLE") = kSteps;
  py::class_<Load>(m, "Load", "What a pass has to do (kernels/moe/layer.h).")
      .def(py::init<std::int64_t, std::int64_t, std::int64_t>(), py::arg("slots"), py::arg("strips"),
           py::arg("doubles"));
  py::class_<Memory>(m, "Memory", "Bytes that forward keeps, and that backward takes beside them.")
      .def_readonly("saved", &Memory::saved)
      .def_readonly("backward", &Memory::backward);
  m.def("pass_memory", &pass_memory, py::arg("hidden"), py::arg("intermediate"), py::arg("rank"),
        py::arg("load"), py::arg("keep"), "What a layer's pass takes, workspaces of threads left out.");
  py::class_<Job, std::shared_ptr<Job>>(m, "Job", "A pass, and what it keeps for backward.")
      .def_property_readonly("done", &Job::done)
      .def_property_readonly("seconds", &Job::seconds)
      .def_property_readonly("bytes", &Job::bytes)
      .def("check", &Job::check);
  py::class_<Weights>(m, "Weights", "One projection of all experts.")
      .def(py::init<std::vector<Address>, std::vector<Address>, std::ptrdiff_t, std::ptrdiff_t, Address>(),
           py::arg("data"), py::arg("scale"), py::arg("stride"), py::arg("scale_stride"),
           py::arg("bias") = 0);
  py::class_<Place>(m, "Place", "Where a thread belongs.")
      .def(py::init<int, int>(), py::arg("cpu"), py::arg("node"));
  py::class_<Layer>(m, "Layer")
      .def(py::init<int, int, Storage, const std::array<Weights, 3>&, bool, int, int,
                    const std::optional<GatingAt>&, const std::string&, const std::vector<Place>&>(),
           py::arg("hidden"), py::arg("intermediate"), py::arg("storage"), py::arg("weights"),
           py::arg("scale_is_bf16"), py::arg("row_shift"), py::arg("column_shift"), py::arg("gating"),
           py::arg("isa"), py::arg("places"))
      .def("forward", &Layer::forward, no_gil)
      .def("backward", &Layer::backward, no_gil)
      .def_property_readonly("isa", &Layer::isa)
      .def_property_readonly("threads", &Layer::threads);
}

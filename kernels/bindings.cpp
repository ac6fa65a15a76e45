// The pybind11 module ktbridge._kernels. Tensors come as addresses: the module must not link torch (one
// build serves every torch), and bfloat16 has no buffer protocol. ktbridge/experts calls this: weights.py
// and expert_call.py check dtypes, shapes and contiguity, and keep the tensors alive. So does
// ktbridge/adapter/merge_values.py for add_delta.
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
#include "common/recycler.h"
#include "job.h"
#include "moe/layer.h"

namespace py = pybind11;

namespace ktbridge {
namespace {

using Address = std::uintptr_t;
using LoraAddresses = std::array<Address, 6>;  // gate a, b; up a, b; down a, b; 0: none

template <class T>
Lora<T> lora_at(const LoraAddresses& at, int rank, float scale) {
  Lora<T> lora;
  for (int projection = 0; projection < kProjections; ++projection) {
    lora.a[projection] = reinterpret_cast<T*>(at[2 * projection]);
    lora.b[projection] = reinterpret_cast<T*>(at[2 * projection + 1]);
  }
  lora.rank = rank;
  lora.scale = scale;
  return lora;
}

using DropoutAt = std::tuple<std::uint64_t, std::uint16_t, Address>;  // key, threshold, numbers or 0

Dropout dropout_at(const DropoutAt& at) {
  const auto& [key, threshold, numbers] = at;
  return {key, threshold, reinterpret_cast<const std::int64_t*>(numbers)};
}

Storage storage_named(const std::string& name) {
  const std::pair<const char*, Storage> all[] = {{"bf16", Storage::bf16},
                                                 {"fp8", Storage::fp8},
                                                 {"int8", Storage::int8},
                                                 {"int4", Storage::int4},
                                                 {"mxfp4", Storage::mxfp4}};
  for (const auto& [known, storage] : all)
    if (name == known) return storage;
  throw std::invalid_argument("there is no storage format '" + name + "'");
}

int log2_of(int group) {
  if (group < 1 || (group & (group - 1)) != 0)
    throw std::invalid_argument("a scale group of " + std::to_string(group) + " is no power of two");
  return __builtin_ctz(group);
}

// One projection of all experts, alike but for the addresses.
struct Weights {
  std::vector<Address> data, scale;  // of row 0; `scale` is empty for bf16
  std::ptrdiff_t stride = 0;         // bytes
  std::ptrdiff_t scale_stride = 0;   // scales
  Address bias = 0;                  // [E, rows] float32, contiguous, which is copied; 0: none
};

using GatingAt = std::tuple<float, float, float>;  // limit, alpha, offset (isa/kernels.h)

// [E][rows padded to whole tiles].
std::vector<float> padded_biases(Address at, std::size_t count, int rows) {
  std::vector<float> padded(count * tiles_of(rows) * kSteps);
  for (std::size_t e = 0; e < count; ++e)
    std::copy_n(reinterpret_cast<const float*>(at) + e * rows, rows,
                padded.begin() + e * tiles_of(rows) * kSteps);
  return padded;
}

// One layer's frozen experts and the machine that runs them.
class Layer {
 public:
  Layer(int hidden, int intermediate, const std::string& storage, const std::array<Weights, 3>& weights,
        bool scale_is_bf16, int row_group, int column_group, const std::optional<GatingAt>& gating,
        const std::string& isa, int threads)
      : isa_(choose_isa(isa)), machine_{&kernels_for(isa_), &Pool::shared(choose_threads(threads))} {
    const std::size_t count = weights[kGate].data.size();
    if (hidden < 1 || intermediate < 1 || count == 0 || weights[kUp].data.size() != count ||
        weights[kDown].data.size() != count)
      throw std::invalid_argument("every expert needs a gate, an up and a down matrix of at least 1 x 1");
    experts_->hidden = hidden;
    experts_->intermediate = intermediate;
    experts_->plain = !gating;
    if (gating) std::tie(experts_->gating.limit, experts_->gating.alpha, experts_->gating.offset) = *gating;
    Matrix matrix;
    matrix.storage = storage_named(storage);
    matrix.scale_is_bf16 = scale_is_bf16;
    matrix.row_shift = log2_of(row_group);
    matrix.column_shift = log2_of(column_group);
    const bool scaled = matrix.storage != Storage::bf16;
    if (scaled && column_group < kSteps)
      throw std::invalid_argument("scales for groups of fewer than 32 columns are not supported");
    for (int projection = 0; projection < kProjections; ++projection) {
      const Weights& from = weights[projection];
      if (scaled && from.scale.size() != count)
        throw std::invalid_argument("every quantised matrix needs its scales");
      matrix.rows = projection == kDown ? hidden : intermediate;
      matrix.columns = projection == kDown ? intermediate : hidden;
      matrix.stride = from.stride;
      matrix.scale_stride = from.scale_stride;
      if (from.bias != 0) experts_->bias[projection] = padded_biases(from.bias, count, matrix.rows);
      for (std::size_t e = 0; e < count; ++e) {
        matrix.data = reinterpret_cast<const void*>(from.data[e]);
        matrix.scale = scaled ? reinterpret_cast<const void*>(from.scale[e]) : nullptr;
        experts_->weight[projection].push_back(matrix);
      }
    }
    if (machine_.pool->nodes() > 1)
      for (const Matrix& gate : experts_->weight[kGate])
        experts_->node.push_back(machine_.pool->node_index(node_of_page(gate.data)));
  }

  std::unique_ptr<Saved> run_forward(const LoraAddresses& lora, int rank, float scale, int tokens, int top_k,
                                     Address hidden, Address ids, Address weights, Address out, Keep keep,
                                     const DropoutAt& dropout) const {
    check_size(tokens, top_k);
    return forward(machine_, *experts_, lora_at<const float>(lora, rank, scale), tokens, top_k,
                   reinterpret_cast<const bf16*>(hidden), reinterpret_cast<const std::int64_t*>(ids),
                   reinterpret_cast<const float*>(weights), reinterpret_cast<bf16*>(out), keep,
                   dropout_at(dropout));
  }

  void run_backward(const Saved& saved, const LoraAddresses& lora, int rank, float scale, Address hidden,
                    Address d_out, Address d_hidden, Address d_weights, const LoraAddresses& d_lora) const {
    backward(machine_, *experts_, lora_at<const float>(lora, rank, scale), saved,
             reinterpret_cast<const bf16*>(hidden), reinterpret_cast<const bf16*>(d_out),
             reinterpret_cast<bf16*>(d_hidden), reinterpret_cast<float*>(d_weights),
             lora_at<float>(d_lora, rank, scale));
  }

  // The same two, when a CUDA stream comes to them. The caller keeps what is addressed alive until then.
  std::shared_ptr<Job> queue_forward(Address launch, Address stream, const LoraAddresses& lora, int rank,
                                     float scale, int tokens, int top_k, Address hidden, Address ids,
                                     Address weights, Address out, Keep keep,
                                     const DropoutAt& dropout) const {
    check_size(tokens, top_k);
    return queued(launch, stream, [=, layer = *this](Job& job) {
      job.tokens = tokens;
      job.top_k = top_k;
      try {
        job.saved =
            layer.run_forward(lora, rank, scale, tokens, top_k, hidden, ids, weights, out, keep, dropout);
      } catch (...) {  // the stream goes on until somebody hears of it: with zeros, not with garbage
        std::fill_n(reinterpret_cast<bf16*>(out), job.tokens * layer.experts_->hidden, bf16{0});
        throw;
      }
    });
  }

  std::shared_ptr<Job> queue_backward(Address launch, Address stream, std::shared_ptr<Job> before, bool last,
                                      const LoraAddresses& lora, int rank, float scale, Address hidden,
                                      Address d_out, Address d_hidden, Address d_weights,
                                      const LoraAddresses& d_lora) const {
    return queued(launch, stream, [=, layer = *this](Job&) {
      const auto nothing = [&] {
        std::fill_n(reinterpret_cast<bf16*>(d_hidden), before->tokens * layer.experts_->hidden, bf16{0});
        std::fill_n(reinterpret_cast<float*>(d_weights), before->tokens * before->top_k, 0.f);
      };
      if (!before->saved) return nothing();  // its forward failed, as whoever checks that job will hear
      try {
        layer.run_backward(*before->saved, lora, rank, scale, hidden, d_out, d_hidden, d_weights, d_lora);
      } catch (...) {
        nothing();
        throw;
      }
      if (last) before->saved.reset();
    });
  }

  const char* isa() const { return isa_name(isa_); }
  int threads() const { return machine_.pool->threads(); }

 private:
  static void check_size(int tokens, int top_k) {
    if (static_cast<std::int64_t>(tokens) * top_k > std::numeric_limits<int>::max() / 2)
      throw std::invalid_argument("too many tokens in one call: " + std::to_string(tokens));
  }

  static std::shared_ptr<Job> queued(Address launch, Address stream, std::function<void(Job&)> pass) {
    auto job = std::make_shared<Job>(std::move(pass));
    job->launch(launch, stream);
    return job;
  }

  Isa isa_;
  Machine machine_;
  std::shared_ptr<Experts> experts_ = std::make_shared<Experts>();  // shared with queued passes
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
  m.def("why_no_tiles", &why_no_tiles, "Why this CPU's AMX isn't used; empty where it is, or has none.");
  m.def("explain_faults", &explain_faults, py::arg("before"), py::arg("behind"),
        "What stands around a file's path where it is mapped and can't be read (kernels/common/faults.h).");
  m.def(
      "isa_default", [] { return std::string(isa_name(choose_isa("auto"))); },
      "The path that isa='auto' takes (KTBRIDGE_ISA decides, if set).");
  m.def(
      "threads_default", [] { return choose_threads(0); },
      "Threads that threads=0 means (KTBRIDGE_THREADS decides, if set).");
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def(
      "measure_peak",
      [](const std::string& isa, int threads, double seconds) {
        return measure_peak(kernels_for(choose_isa(isa)), Pool::shared(choose_threads(threads)), seconds);
      },
      py::arg("isa"), py::arg("threads"), py::arg("seconds"), no_gil, "FLOP/s of products out of registers.");
  m.def(
      "measure_bandwidth",
      [](int threads, std::size_t bytes, double seconds) {
        return measure_bandwidth(Pool::shared(choose_threads(threads)), bytes, seconds);
      },
      py::arg("threads"), py::arg("bytes"), py::arg("seconds"), no_gil,
      "bytes/s of reading a buffer of that size.");
  m.def(
      "add_delta",
      [](Address values, bool halves, int rows, int columns, std::ptrdiff_t stride, Address left, int rank,
         Address right) {
        const Delta delta{reinterpret_cast<const float*>(left),
                          reinterpret_cast<const float*>(right),
                          rank,
                          rows,
                          columns,
                          stride};
        const Kernels& kernels = kernels_for(choose_isa("auto"));
        return halves ? kernels.add_delta_halves(delta, reinterpret_cast<bf16*>(values))
                      : kernels.add_delta_floats(delta, reinterpret_cast<float*>(values));
      },
      py::arg("values"), py::arg("halves"), py::arg("rows"), py::arg("columns"), py::arg("stride"),
      py::arg("left"), py::arg("rank"), py::arg("right"), no_gil,
      "values += left times right (Delta in kernels/isa/kernels.h); halves: of bfloat16, else float32.");
  m.def("release_memory", &release_memory,
        "Gives activation memory kept for the next pass back to the system.");
  py::enum_<Keep>(m, "Keep", "What forward keeps for backward.")
      .value("nothing", Keep::nothing)
      .value("recompute", Keep::recompute)
      .value("retain", Keep::retain);
  m.attr("STRIP") = kStrip;
  m.attr("DOUBLE") = kSteps;
  py::class_<Load>(m, "Load", "What a pass has to do (kernels/moe/layer.h).")
      .def(py::init<std::int64_t, std::int64_t, std::int64_t>(), py::arg("slots"), py::arg("strips"),
           py::arg("doubles"));
  m.def("saved_memory", &saved_memory, py::arg("hidden"), py::arg("intermediate"), py::arg("rank"),
        py::arg("load"), py::arg("keep"), "Bytes that a layer's forward keeps.");
  m.def("backward_memory", &backward_memory, py::arg("hidden"), py::arg("intermediate"), py::arg("rank"),
        py::arg("load"), py::arg("keep"), "Bytes that a layer's backward takes beside what forward kept.");
  py::class_<Saved>(m, "Saved", "What forward kept for backward.")
      .def_property_readonly("bytes", &Saved::bytes);
  py::class_<Job, std::shared_ptr<Job>>(m, "Job", "A pass that a CUDA stream runs.")
      .def_property_readonly("done", &Job::done)
      .def_property_readonly("seconds", &Job::seconds)
      .def_property_readonly("bytes", &Job::bytes)
      .def("check", &Job::check);
  py::class_<Weights>(m, "Weights", "One projection of all experts.")
      .def(py::init<std::vector<Address>, std::vector<Address>, std::ptrdiff_t, std::ptrdiff_t, Address>(),
           py::arg("data"), py::arg("scale"), py::arg("stride"), py::arg("scale_stride"),
           py::arg("bias") = 0);
  py::class_<Layer>(m, "Layer")
      .def(py::init<int, int, const std::string&, const std::array<Weights, 3>&, bool, int, int,
                    const std::optional<GatingAt>&, const std::string&, int>(),
           py::arg("hidden"), py::arg("intermediate"), py::arg("storage"), py::arg("weights"),
           py::arg("scale_is_bf16"), py::arg("row_group"), py::arg("column_group"), py::arg("gating"),
           py::arg("isa"), py::arg("threads"))
      .def("forward", &Layer::run_forward, no_gil)
      .def("backward", &Layer::run_backward, no_gil)
      .def("queue_forward", &Layer::queue_forward, no_gil)
      .def("queue_backward", &Layer::queue_backward, no_gil)
      .def_property_readonly("isa", &Layer::isa)
      .def_property_readonly("threads", &Layer::threads);
}

#include <cmath>

#include "moe/steps.h"

namespace ktbridge {
namespace {

// g, u -> h for one panel of I, and the pre-activations kept as they were used: rounded to bf16.
void gate_up_panel(const Machine& machine, const Experts& experts, const Lora<const float>& lora,
                   Saved& saved, const bf16* x, bf16* h, Task task) {
  const auto [expert, panel] = task;
  const int hidden = experts.hidden, row = panel * kPanel, rank = lora.rank;
  bf16* gate = thread_panel(kMain, hidden);
  bf16* up = thread_panel(kSecond, hidden);
  load_rows(experts.gate[expert], row, gate);
  load_rows(experts.up[expert], row, up);
  bf16 *gate_b = nullptr, *up_b = nullptr;
  if (rank > 0) {
    gate_b = thread_panel(kLora, rank);
    up_b = thread_panel(kLoraSecond, rank);
    load_rows(lora_matrix(lora.gate.b, expert, experts.intermediate, rank), row, gate_b);
    load_rows(lora_matrix(lora.up.b, expert, experts.intermediate, rank), row, up_b);
  }
  for_blocks(saved.routing, expert, [&](int slot, int rows) {
    float g[kBlockSize] = {}, u[kBlockSize] = {};
    const bf16* input = x + slot * saved.outer;
    machine.gemm(rows, pairs_of(hidden), input, saved.outer, gate, g, kPanel);
    machine.gemm(rows, pairs_of(hidden), input, saved.outer, up, u, kPanel);
    if (rank > 0) {
      const std::size_t at = slot * saved.lora_width;
      machine.gemm(rows, pairs_of(rank), saved.t_gate.data() + at, saved.lora_width, gate_b, g, kPanel);
      machine.gemm(rows, pairs_of(rank), saved.t_up.data() + at, saved.lora_width, up_b, u, kPanel);
    }
    for (int m = 0; m < rows; ++m) {
      const std::size_t at = (slot + m) * saved.inner + row;
      for (int n = 0; n < kPanel; ++n) {
        const bf16 g16 = to_bf16(g[m * kPanel + n]), u16 = to_bf16(u[m * kPanel + n]);
        const float gate_value = to_float(g16);
        h[at + n] = to_bf16(gate_value / (1.f + std::exp(-gate_value)) * to_float(u16));
        if (saved.gate.data() != nullptr) {
          saved.gate.data()[at + n] = g16;
          saved.up.data()[at + n] = u16;
        }
      }
    }
  });
}

// One panel of H of the output, over all experts in rising order: one task owns these columns, so the
// order of summation never depends on threads.
void down_panel(const Machine& machine, const Experts& experts, const Lora<const float>& lora,
                const Saved& saved, const bf16* h, bf16* out, int panel) {
  thread_local Buffer<float> sums;
  const Routing& routing = saved.routing;
  const int hidden = experts.hidden, inner = experts.intermediate, rank = lora.rank;
  const int row = panel * kPanel;
  const std::size_t size = static_cast<std::size_t>(routing.tokens) * kPanel;
  float* total = sums.reserve(size);
  std::fill_n(total, size, 0.f);
  bf16* down = thread_panel(kMain, inner);
  bf16* down_b = rank > 0 ? thread_panel(kLora, rank) : nullptr;
  for (int expert = 0; expert < experts.count(); ++expert) {
    if (routing.rows(expert) == 0) continue;
    load_rows(experts.down[expert], row, down);
    if (rank > 0) load_rows(lora_matrix(lora.down.b, expert, hidden, rank), row, down_b);
    for_blocks(routing, expert, [&](int slot, int rows) {
      float y[kBlockSize] = {};
      machine.gemm(rows, pairs_of(inner), h + slot * saved.inner, saved.inner, down, y, kPanel);
      if (rank > 0)
        machine.gemm(rows, pairs_of(rank), saved.t_down.data() + slot * saved.lora_width, saved.lora_width,
                     down_b, y, kPanel);
      for (int m = 0; m < rows; ++m) {
        float* target = total + static_cast<std::size_t>(routing.token[slot + m]) * kPanel;
        const float weight = routing.weight[slot + m];
        for (int n = 0; n < kPanel; ++n) target[n] += weight * y[m * kPanel + n];
      }
    });
  }
  const int live = std::min(kPanel, hidden - row);
  for (int t = 0; t < routing.tokens; ++t)
    for (int n = 0; n < live; ++n)
      out[static_cast<std::size_t>(t) * hidden + row + n] = to_bf16(total[t * kPanel + n]);
}

}  // namespace

std::unique_ptr<Saved> forward(const Machine& machine, const Experts& experts,
                               const Lora<const float>& lora, int tokens, int top_k, const bf16* hidden,
                               const std::int64_t* ids, const float* weights, bf16* out, bool keep) {
  auto saved = std::make_unique<Saved>();
  saved->routing = route(experts.count(), tokens, top_k, ids, weights);
  const Routing& routing = saved->routing;
  const std::size_t slots = routing.slots();
  saved->outer = round_up(experts.hidden, kPanel);
  saved->inner = round_up(experts.intermediate, kPanel);
  saved->lora_width = round_up(lora.rank, kPanel);
  if (keep) {
    saved->gate.reset(slots * saved->inner);
    saved->up.reset(slots * saved->inner);
  }
  if (lora.rank > 0)
    for (Buffer<bf16>* t : {&saved->t_gate, &saved->t_up, &saved->t_down})
      t->reset(slots * saved->lora_width);

  std::lock_guard lock(machine.pool->guard());
  const Buffer<bf16> x = gather(*machine.pool, routing, hidden, experts.hidden, saved->outer);
  Buffer<bf16> h(slots * saved->inner);
  if (lora.rank > 0)
    run_thin(machine, routing,
             {{x.data(), saved->outer, experts.hidden, lora.gate.a, true, saved->t_gate.data()},
              {x.data(), saved->outer, experts.hidden, lora.up.a, true, saved->t_up.data()}},
             lora.rank, lora.scale, saved->lora_width);
  const std::vector<Task> tasks = tasks_of(routing, panels_of(experts.intermediate));
  machine.pool->run(static_cast<int>(tasks.size()), [&](int index, int) {
    gate_up_panel(machine, experts, lora, *saved, x.data(), h.data(), tasks[index]);
  });
  if (lora.rank > 0)
    run_thin(machine, routing,
             {{h.data(), saved->inner, experts.intermediate, lora.down.a, true, saved->t_down.data()}},
             lora.rank, lora.scale, saved->lora_width);
  machine.pool->run(panels_of(experts.hidden), [&](int panel, int) {
    down_panel(machine, experts, lora, *saved, h.data(), out, panel);
  });
  return keep ? std::move(saved) : nullptr;
}

}  // namespace ktbridge

// Gradients of moe/layer.h's forward. With dy = d_out[token] (not yet weighted) and w the slot's weight:
//
//   dh~ = dy Wd + s (dy Bd) Ad             d w = <dh~, h>          dh = w dh~
//   dg  = dh * u * silu'(g)                du  = dh * silu(g)
//   dX  = dg Wg + s (dg Bg) Ag + du Wu + s (du Bu) Au,  summed over the token's slots
//   dB  = d^T t                            dA  = (s d B)^T input,   t = s (input A^T)
//
// The weighted quantities enter dB and dA of down through the thin factors: (w t) and (w s dy Bd).
#include <cmath>

#include "moe/steps.h"

namespace ktbridge {
namespace {

// Everything between the phases of one backward pass; rows are slots.
struct Gradients {
  Buffer<bf16> x, dy;                    // gathered inputs and output gradients [S, outer]
  Buffer<bf16> h, dg, du;                // [S, inner]
  Buffer<bf16> t_dgate, t_dup, t_ddown;  // s * (d B) [S, lora_width]; t_ddown not weighted
  Buffer<float> dweight;                 // partial <dh~, h> of each panel of I: [panels, S]
};

void inner_panel(const Machine& machine, const Experts& experts, const Lora<const float>& lora,
                 const Saved& saved, Gradients& grads, Task task) {
  const auto [expert, panel] = task;
  const Routing& routing = saved.routing;
  const int hidden = experts.hidden, rank = lora.rank, column = panel * kPanel;
  bf16* down = thread_panel(kMain, hidden);
  load_columns(experts.down[expert], column, down);
  bf16* down_a = nullptr;
  if (rank > 0) {
    down_a = thread_panel(kLora, rank);
    load_columns(lora_matrix(lora.down.a, expert, rank, experts.intermediate), column, down_a);
  }
  float* dweight = grads.dweight.data() + static_cast<std::size_t>(panel) * routing.slots();
  for_blocks(routing, expert, [&](int slot, int rows) {
    float dh[kBlockSize] = {};
    machine.gemm(rows, pairs_of(hidden), grads.dy.data() + slot * saved.outer, saved.outer, down, dh,
                 kPanel);
    if (rank > 0)
      machine.gemm(rows, pairs_of(rank), grads.t_ddown.data() + slot * saved.lora_width, saved.lora_width,
                   down_a, dh, kPanel);
    for (int m = 0; m < rows; ++m) {
      const std::size_t at = (slot + m) * saved.inner + column;
      const float weight = routing.weight[slot + m];
      float dot = 0.f;
      for (int n = 0; n < kPanel; ++n) {
        const float g = to_float(saved.gate.data()[at + n]), u = to_float(saved.up.data()[at + n]);
        const float sigmoid = 1.f / (1.f + std::exp(-g)), silu = g * sigmoid;
        const float d = dh[m * kPanel + n];
        dot += d * silu * u;
        grads.h.data()[at + n] = to_bf16(silu * u);
        grads.dg.data()[at + n] = to_bf16(weight * d * u * (sigmoid + silu * (1.f - sigmoid)));
        grads.du.data()[at + n] = to_bf16(weight * d * silu);
      }
      dweight[slot + m] = dot;
    }
  });
}

// One panel of H of d_hidden, over all experts in rising order (as in forward's down_panel).
void hidden_panel(const Machine& machine, const Experts& experts, const Lora<const float>& lora,
                  const Saved& saved, const Gradients& grads, bf16* d_hidden, int panel) {
  thread_local Buffer<float> sums;
  const Routing& routing = saved.routing;
  const int hidden = experts.hidden, inner = experts.intermediate, rank = lora.rank;
  const int column = panel * kPanel;
  const std::size_t size = static_cast<std::size_t>(routing.tokens) * kPanel;
  float* total = sums.reserve(size);
  std::fill_n(total, size, 0.f);
  bf16* gate = thread_panel(kMain, inner);
  bf16* up = thread_panel(kSecond, inner);
  bf16* gate_a = rank > 0 ? thread_panel(kLora, rank) : nullptr;
  bf16* up_a = rank > 0 ? thread_panel(kLoraSecond, rank) : nullptr;
  for (int expert = 0; expert < experts.count(); ++expert) {
    if (routing.rows(expert) == 0) continue;
    load_columns(experts.gate[expert], column, gate);
    load_columns(experts.up[expert], column, up);
    if (rank > 0) {
      load_columns(lora_matrix(lora.gate.a, expert, rank, hidden), column, gate_a);
      load_columns(lora_matrix(lora.up.a, expert, rank, hidden), column, up_a);
    }
    for_blocks(routing, expert, [&](int slot, int rows) {
      float dx[kBlockSize] = {};
      const std::size_t at = slot * saved.inner;
      machine.gemm(rows, pairs_of(inner), grads.dg.data() + at, saved.inner, gate, dx, kPanel);
      machine.gemm(rows, pairs_of(inner), grads.du.data() + at, saved.inner, up, dx, kPanel);
      if (rank > 0) {
        const std::size_t thin = slot * saved.lora_width;
        machine.gemm(rows, pairs_of(rank), grads.t_dgate.data() + thin, saved.lora_width, gate_a, dx,
                     kPanel);
        machine.gemm(rows, pairs_of(rank), grads.t_dup.data() + thin, saved.lora_width, up_a, dx, kPanel);
      }
      for (int m = 0; m < rows; ++m) {
        float* target = total + static_cast<std::size_t>(routing.token[slot + m]) * kPanel;
        for (int n = 0; n < kPanel; ++n) target[n] += dx[m * kPanel + n];
      }
    });
  }
  const int live = std::min(kPanel, hidden - column);
  for (int t = 0; t < routing.tokens; ++t)
    for (int n = 0; n < live; ++n)
      d_hidden[static_cast<std::size_t>(t) * hidden + column + n] = to_bf16(total[t * kPanel + n]);
}

// target += left^T right for one expert, `left` thin: [rows, r] and `right` wide: [rows, columns].
// The target is dA [r, columns], or dB stored as its transpose [columns, r].
struct Outer {
  const bf16* left;
  const bf16* right;
  std::size_t right_stride;
  int columns;
  bool weighted;  // multiply left's rows by the routing weight
  float* target;  // [E, r, columns], or [E, columns, r] if transposed
  bool transposed;
};

void outer_product(const Machine& machine, const Saved& saved, const Outer& outer, int rank, int expert) {
  thread_local Buffer<bf16> transposed_left;
  const Routing& routing = saved.routing;
  const int first = routing.first[expert], rows = routing.rows(expert);
  const std::size_t stride = round_up(rows, 2);
  bf16* left = transposed_left.reserve(rank * stride);
  for (int k = 0; k < rank; ++k) {
    for (int m = 0; m < rows; ++m) {
      const bf16 value = outer.left[(first + m) * saved.lora_width + k];
      left[k * stride + m] = outer.weighted ? to_bf16(routing.weight[first + m] * to_float(value)) : value;
    }
    if (rows % 2 != 0) left[k * stride + rows] = 0;
  }
  const Matrix right{outer.right + first * outer.right_stride,
                     static_cast<std::ptrdiff_t>(outer.right_stride), rows, outer.columns};
  bf16* panel = thread_panel(kMain, rows);
  float* target = outer.target + static_cast<std::size_t>(expert) * rank * outer.columns;
  for (int column = 0; column < outer.columns; column += kPanel) {
    load_columns(right, column, panel);
    const int live = std::min(kPanel, outer.columns - column);
    for (int k = 0; k < rank; k += kRowBlock) {
      const int count = std::min(kRowBlock, rank - k);
      float sums[kBlockSize] = {};
      machine.gemm(count, pairs_of(rows), left + k * stride, stride, panel, sums, kPanel);
      for (int m = 0; m < count; ++m)
        for (int n = 0; n < live; ++n)
          target[outer.transposed ? static_cast<std::size_t>(column + n) * rank + k + m
                                  : static_cast<std::size_t>(k + m) * outer.columns + column + n] +=
              sums[m * kPanel + n];
    }
  }
}

void lora_gradients(const Machine& machine, const Experts& experts, const Saved& saved,
                    const Gradients& grads, const Lora<float>& d_lora, int rank) {
  const int hidden = experts.hidden, inner = experts.intermediate;
  const Outer outers[] = {
      {grads.t_dgate.data(), grads.x.data(), saved.outer, hidden, false, d_lora.gate.a, false},
      {saved.t_gate.data(), grads.dg.data(), saved.inner, inner, false, d_lora.gate.b, true},
      {grads.t_dup.data(), grads.x.data(), saved.outer, hidden, false, d_lora.up.a, false},
      {saved.t_up.data(), grads.du.data(), saved.inner, inner, false, d_lora.up.b, true},
      {grads.t_ddown.data(), grads.h.data(), saved.inner, inner, true, d_lora.down.a, false},
      {saved.t_down.data(), grads.dy.data(), saved.outer, hidden, true, d_lora.down.b, true},
  };
  const std::vector<Task> tasks = tasks_of(saved.routing, static_cast<int>(std::size(outers)));
  machine.pool->run(static_cast<int>(tasks.size()), [&](int index, int) {
    outer_product(machine, saved, outers[tasks[index].panel], rank, tasks[index].expert);
  });
}

}  // namespace

void backward(const Machine& machine, const Experts& experts, const Lora<const float>& lora,
              const Saved& saved, const bf16* hidden, const bf16* d_out, bf16* d_hidden, float* d_weights,
              const Lora<float>& d_lora) {
  const Routing& routing = saved.routing;
  const std::size_t slots = routing.slots();
  const int rank = lora.rank, inner_panels = panels_of(experts.intermediate);
  std::lock_guard lock(machine.pool->guard());

  Gradients grads;
  grads.dy = gather(*machine.pool, routing, d_out, experts.hidden, saved.outer);
  for (Buffer<bf16>* wide : {&grads.h, &grads.dg, &grads.du}) wide->reset(slots * saved.inner);
  grads.dweight.reset(slots * inner_panels);
  if (rank > 0) {
    grads.x = gather(*machine.pool, routing, hidden, experts.hidden, saved.outer);
    for (Buffer<bf16>* thin : {&grads.t_dgate, &grads.t_dup, &grads.t_ddown})
      thin->reset(slots * saved.lora_width);
    run_thin(machine, routing,
             {{grads.dy.data(), saved.outer, experts.hidden, lora.down.b, false, grads.t_ddown.data()}},
             rank, lora.scale, saved.lora_width);
  }

  const std::vector<Task> tasks = tasks_of(routing, inner_panels);
  machine.pool->run(static_cast<int>(tasks.size()), [&](int index, int) {
    inner_panel(machine, experts, lora, saved, grads, tasks[index]);
  });
  for (std::size_t slot = 0; slot < slots; ++slot) {
    float sum = 0.f;
    for (int panel = 0; panel < inner_panels; ++panel) sum += grads.dweight.data()[panel * slots + slot];
    d_weights[routing.source[slot]] = sum;
  }

  if (rank > 0)
    run_thin(
        machine, routing,
        {{grads.dg.data(), saved.inner, experts.intermediate, lora.gate.b, false, grads.t_dgate.data()},
         {grads.du.data(), saved.inner, experts.intermediate, lora.up.b, false, grads.t_dup.data()}},
        rank, lora.scale, saved.lora_width);
  machine.pool->run(panels_of(experts.hidden), [&](int panel, int) {
    hidden_panel(machine, experts, lora, saved, grads, d_hidden, panel);
  });
  if (rank > 0) lora_gradients(machine, experts, saved, grads, d_lora, rank);
}

}  // namespace ktbridge

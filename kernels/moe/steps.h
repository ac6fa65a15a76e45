// The steps that forward and backward share: gather rows, multiply by a panel, the thin LoRA products.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "moe/layer.h"

namespace ktbridge {

// Rows of one register-friendly block; its fp32 results stay in L1.
constexpr int kRowBlock = 64;
constexpr int kBlockSize = kRowBlock * kPanel;

constexpr int panels_of(int columns) { return (columns + kPanel - 1) / kPanel; }
constexpr int pairs_of(int reduction) { return (reduction + 1) / 2; }

// Panels of one thread, kept between passes.
enum PanelSlot { kMain, kSecond, kLora, kLoraSecond, kPanelSlots };

inline bf16* thread_panel(PanelSlot slot, int reduction) {
  thread_local Buffer<bf16> panels[kPanelSlots];
  return panels[slot].reserve(panel_size(reduction));
}

// One (expert, panel) task each, big experts first so that the tail is short.
struct Task {
  int expert, panel;
};

inline std::vector<Task> tasks_of(const Routing& routing, int panels) {
  std::vector<Task> tasks;
  tasks.reserve(routing.active.size() * panels);
  for (int expert : routing.active)
    for (int panel = 0; panel < panels; ++panel) tasks.push_back({expert, panel});
  return tasks;
}

// Calls body(slot, rows) for each block of an expert's slots.
template <class Body>
void for_blocks(const Routing& routing, int expert, Body body) {
  for (int slot = routing.first[expert]; slot < routing.first[expert + 1]; slot += kRowBlock)
    body(slot, std::min(kRowBlock, routing.first[expert + 1] - slot));
}

// rows[slot] = source[token of slot], zero-padded to `stride`.
inline Buffer<bf16> gather(Pool& pool, const Routing& routing, const bf16* source, int columns,
                           std::size_t stride) {
  Buffer<bf16> rows(routing.slots() * stride);
  constexpr int kSlots = 64;
  pool.run((routing.slots() + kSlots - 1) / kSlots, [&](int index, int) {
    const int end = std::min(routing.slots(), (index + 1) * kSlots);
    for (int slot = index * kSlots; slot < end; ++slot) {
      bf16* target = rows.data() + slot * stride;
      std::memcpy(target, source + static_cast<std::size_t>(routing.token[slot]) * columns,
                  columns * sizeof(bf16));
      std::memset(target + columns, 0, (stride - columns) * sizeof(bf16));
    }
  });
  return rows;
}

// One expert's matrix out of a contiguous [E, rows, columns] fp32 tensor.
inline Matrix lora_matrix(const float* base, int expert, int rows, int columns) {
  return {base + static_cast<std::size_t>(expert) * rows * columns, columns, rows, columns, Storage::fp32};
}

// One thin product: target[slot, n] = bf16(scale * sum_k source[slot, k] * P[k, n]) with n over the rank.
struct Thin {
  const bf16* source;
  std::size_t stride;
  int reduction;
  const float* factor;  // [E, r, reduction] if by_rows, else [E, reduction, r]
  bool by_rows;
  bf16* target;
};

inline void run_thin(const Machine& machine, const Routing& routing, const std::vector<Thin>& products,
                     int rank, float scale, std::size_t lora_width) {
  const std::vector<Task> tasks = tasks_of(routing, panels_of(rank));
  const int count = static_cast<int>(tasks.size()), total = count * static_cast<int>(products.size());
  machine.pool->run(total, [&](int index, int) {
    const Thin& thin = products[index / count];
    const auto [expert, panel] = tasks[index % count];
    bf16* right = thread_panel(kMain, thin.reduction);
    if (thin.by_rows)
      load_rows(lora_matrix(thin.factor, expert, rank, thin.reduction), panel * kPanel, right);
    else
      load_columns(lora_matrix(thin.factor, expert, thin.reduction, rank), panel * kPanel, right);
    for_blocks(routing, expert, [&](int slot, int rows) {
      float sums[kBlockSize] = {};
      machine.gemm(rows, pairs_of(thin.reduction), thin.source + slot * thin.stride, thin.stride, right,
                   sums, kPanel);
      for (int m = 0; m < rows; ++m) {
        bf16* target = thin.target + (slot + m) * lora_width + panel * kPanel;
        for (int n = 0; n < kPanel; ++n) target[n] = to_bf16(scale * sums[m * kPanel + n]);
      }
    });
  });
}

}  // namespace ktbridge

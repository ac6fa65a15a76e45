// The MoE-LoRA layer, forward and backward.
//
//   g = X Wg^T + s (X Ag^T) Bg^T      u likewise with Wu, Au, Bu           [rows, I]
//   h = silu(g) * u                                                        [rows, I]
//   y = h Wd^T + s (h Ad^T) Bd^T                                           [rows, H]
//   out[t] = sum over the token's slots of weight * y                      [tokens, H]
//
// with s = alpha / r. Weights are bf16 and frozen; LoRA masters are fp32 and rounded to bf16 before
// use, so that the adapter saved in bf16 is the one that was trained. Sums are fp32.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/buffer.h"
#include "common/pool.h"
#include "gemm/gemm.h"
#include "moe/routing.h"
#include "weights/panel.h"

namespace ktbridge {

// Frozen weights of one layer, where they lie: gate, up [I, H] and down [H, I] of each expert.
struct Experts {
  int hidden = 0, intermediate = 0;
  std::vector<Matrix> gate, up, down;
  int count() const { return static_cast<int>(gate.size()); }
};

// One projection's LoRA, contiguous over experts: a [E, r, in], b [E, out, r].
template <class T>
struct Pair {
  T* a = nullptr;
  T* b = nullptr;
};

template <class T>
struct Lora {
  Pair<T> gate, up, down;
  int rank = 0;  // 0: no LoRA, and the pointers are not looked at
  float scale = 0.f;
};

// How a pass is run; results depend on `gemm` only, not on the pool's size.
struct Machine {
  Gemm gemm = nullptr;
  Pool* pool = nullptr;
};

// What forward keeps for backward. Rows are slots; row strides are `inner` and `lora_width`.
struct Saved {
  Routing routing;
  std::size_t outer = 0, inner = 0, lora_width = 0;  // H, I and r rounded up to whole panels
  Buffer<bf16> gate, up;                             // pre-activations g, u
  Buffer<bf16> t_gate, t_up, t_down;                 // s * (input A^T), bf16
  std::size_t bytes() const {
    return gate.bytes() + up.bytes() + t_gate.bytes() + t_up.bytes() + t_down.bytes();
  }
};

// hidden [tokens, H] bf16, ids and weights [tokens, top_k], out [tokens, H] bf16. Returns what
// `backward` needs, or nullptr when `keep` is false.
std::unique_ptr<Saved> forward(const Machine& machine, const Experts& experts,
                               const Lora<const float>& lora, int tokens, int top_k, const bf16* hidden,
                               const std::int64_t* ids, const float* weights, bf16* out, bool keep);

// d_out, d_hidden [tokens, H] bf16; d_weights [tokens, top_k] fp32 (overwritten); d_lora, same shapes as
// the LoRA, fp32, is added to.
void backward(const Machine& machine, const Experts& experts, const Lora<const float>& lora,
              const Saved& saved, const bf16* hidden, const bf16* d_out, bf16* d_hidden, float* d_weights,
              const Lora<float>& d_lora);

}  // namespace ktbridge

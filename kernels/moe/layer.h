// The frozen experts of one MoE layer with their LoRA, forward and backward.
//
// For a token with input x and routed experts e with weights w, out = sum_e w y_e(x) where
//     g = x Wg^T + s (x Ag^T) Bg^T        u = x Wu^T + s (x Au^T) Bu^T
//     h = silu(g) u                       y = h Wd^T + s (h Ad^T) Bd^T
// with s = alpha / r (LoRA, arXiv:2106.09685; gated experts, arXiv:2002.05202); some experts add biases to
// g, u and y, and make h otherwise (isa/kernels.h, Gating). W are bf16, FP8, INT8, INT4 or MXFP4 where they
// lie, A and B fp32 masters rounded to bf16 before use, sums are fp32. g, u, h and the
// thin s (x A^T) are rounded to bf16, and backward uses the rounded values. With dropout each A sees x or h
// without the elements that moe/dropout.h drops, and the caller's s is larger by 1 / (1 - p).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/buffer.h"
#include "common/pool.h"
#include "isa/kernels.h"
#include "moe/dropout.h"
#include "moe/routing.h"

namespace ktbridge {

// gate and up are [I, H] and down [H, I], for each expert.
struct Experts {
  int hidden = 0, intermediate = 0;
  std::array<std::vector<Matrix>, kProjections> weight;
  bool plain = true;  // h is silu(g) u; else by `gating`
  Gating gating;
  std::array<std::vector<float>, kProjections> bias;  // [E][rows, padded by 0 to whole tiles]; or none
  std::vector<int> node;  // the pool's node index whose threads should read an expert; -1: any
  int count() const { return static_cast<int>(weight[kGate].size()); }

  // A projection's bias from `row` of an expert's; null where there is none.
  const float* bias_at(Projection projection, int expert, int row) const {
    const std::vector<float>& all = bias[projection];
    const std::ptrdiff_t rows = tiles_of(projection == kDown ? hidden : intermediate) * kSteps;
    return all.empty() ? nullptr : all.data() + expert * rows + row;
  }
  // How an expert's rows of I from `row` are activated: `room`, or null for silu(g) u without biases.
  const Gating* gating_at(int expert, int row, Gating& room) const {
    if (plain && bias[kGate].empty() && bias[kUp].empty()) return nullptr;
    room = gating;
    room.gate_bias = bias_at(kGate, expert, row);
    room.up_bias = bias_at(kUp, expert, row);
    return &room;
  }
};

// LoRA or its gradients, contiguous over experts: a [E, r, in], b [E, out, r], float32. A projection
// whose pointers are null has none.
template <class T>
struct Lora {
  std::array<T*, kProjections> a{}, b{};
  int rank = 0;  // 0: no LoRA at all
  float scale = 0.f;
  const bool* of_token = nullptr;  // which tokens have it, without dropout or a backward; null: all
};
using LoraWeights = Lora<const float>;
using LoraGradients = Lora<float>;

// How a pass is run. Results depend on the kernels, not on the pool's size.
struct Machine {
  const Kernels* kernels = nullptr;
  Pool* pool = nullptr;
};

enum class Keep {
  nothing,    // inference
  recompute,  // routing and the thin products; backward computes g and u again
  retain,     // g, u and the thin products
};

// What forward keeps for backward.
struct Saved {
  Routing routing;
  DropSeeds seeds;
  Keep keep = Keep::nothing;
  Buffer<bf16> gate, up;  // g, u: left tiles [token strips][tiles of I][16][32]
  Buffer<bf16> thin;      // (s x A^T)^T of gate, up, and w (s h A^T)^T of down: left strips over tokens
  std::size_t bytes() const { return gate.bytes() + up.bytes() + thin.bytes(); }
};

// Slots of tokens in a pass, and the strips of 16 and doubles of 32 that they fill over all experts.
struct Load {
  std::int64_t slots = 0, strips = 0, doubles = 0;
};

// Bytes that a layer's `forward` keeps, and that `backward` takes beside them, workspaces of threads left
// out. `keep` is not Keep::nothing.
struct Memory {
  std::size_t saved, backward;
};
Memory pass_memory(int hidden, int intermediate, int rank, const Load& load, Keep keep);

// hidden [tokens, H] bf16, ids and weights [tokens, top_k], out [tokens, H] bf16. Returns what `backward`
// needs; null for Keep::nothing. `dropout` is backward's, too. Throws std::out_of_range for an id that is
// no expert's.
std::unique_ptr<Saved> forward(const Machine& machine, const Experts& experts, const LoraWeights& lora,
                               int tokens, int top_k, const bf16* hidden, const std::int64_t* ids,
                               const float* weights, bf16* out, Keep keep, const Dropout& dropout = {});

// d_out, d_hidden [tokens, H] bf16; d_weights [tokens, top_k] float32 (overwritten). d_lora's gradients
// are added to what is there; null pointers are skipped.
void backward(const Machine& machine, const Experts& experts, const LoraWeights& lora, const Saved& saved,
              const bf16* hidden, const bf16* d_out, bf16* d_hidden, float* d_weights,
              const LoraGradients& d_lora);

}  // namespace ktbridge

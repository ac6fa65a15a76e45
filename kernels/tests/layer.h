// Small layers of any shape, storage and routing, one forward and backward of them, and the same in
// float64.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>

#include "moe/layer.h"
#include "stored.h"

namespace ktbridge {

struct Shape {
  int hidden = 72, inner = 41, experts = 4, rank = 0;
  Format format = {"bf16", Storage::bf16};
  bool biased = false;  // with gpt-oss's gating, at limits that many values meet
};

// Which LoRA tensors there are, in the order of kLoraNames.
using Present = std::array<bool, 6>;
constexpr Present kAllPresent = {true, true, true, true, true, true};
constexpr const char* kLoraNames[] = {"A of gate", "B of gate", "A of up",
                                      "B of up",   "A of down", "B of down"};

struct Model {
  Model(Random& random, const Shape& shape, Present present = kAllPresent) : shape(shape), present(present) {
    experts.hidden = shape.hidden;
    experts.intermediate = shape.inner;
    for (int p = 0; p < kProjections; ++p) {
      for (int e = 0; e < shape.experts; ++e) {
        weights[p].push_back(weight(random, rows(p), columns(p)));
        experts.weight[p].push_back(weights[p].back().matrix);
      }
      const auto factor = [&](int size) {
        factors.emplace_back(random.values(static_cast<std::size_t>(shape.experts) * shape.rank * size));
        return factors.back().data();
      };
      if (present[2 * p]) lora.a[p] = factor(columns(p));
      if (present[2 * p + 1]) lora.b[p] = factor(rows(p));
    }
    if (shape.biased) {
      experts.plain = false;
      experts.gating = {0.8f, 1.702f, 1.f};
      for (int p = 0; p < kProjections; ++p) {
        const int padded = tiles_of(rows(p)) * kSteps;
        experts.bias[p].resize(static_cast<std::size_t>(shape.experts) * padded);
        for (int e = 0; e < shape.experts; ++e)
          for (int r = 0; r < rows(p); ++r) experts.bias[p][e * padded + r] = random.value();
      }
    }
    lora.rank = shape.rank;
    lora.scale = 1.5f / (static_cast<float>(std::max(shape.rank, 1)) + 20);  // as heavy as the weights
  }

  int rows(int projection) const { return projection == kDown ? shape.hidden : shape.inner; }
  int columns(int projection) const { return projection == kDown ? shape.inner : shape.hidden; }
  // A factor's element as the layer must see it: rounded to bf16.
  double a_at(int p, int e, int r, int in) const {
    if (lora.a[p] == nullptr) return 0;
    return to_float(to_bf16(lora.a[p][(static_cast<std::ptrdiff_t>(e) * shape.rank + r) * columns(p) + in]));
  }
  double b_at(int p, int e, int out, int r) const {
    if (lora.b[p] == nullptr) return 0;
    return to_float(to_bf16(lora.b[p][(static_cast<std::ptrdiff_t>(e) * rows(p) + out) * shape.rank + r]));
  }

  const Shape shape;
  const Present present;
  std::array<std::vector<Stored>, kProjections> weights;
  std::vector<AtPageEnd<float>> factors;
  Experts experts;
  LoraWeights lora;

 private:
  Stored weight(Random& random, int rows, int columns) const {
    if (shape.format.storage != Storage::bf16) return Stored::random(random, shape.format, rows, columns);
    std::vector<std::uint8_t> bytes(2 * rows * columns);
    const float size = 2.5f / std::sqrt(static_cast<float>(columns));
    for (int i = 0; i < rows * columns; ++i) {
      const bf16 value = to_bf16(random.value() * size);
      std::memcpy(&bytes[2 * i], &value, 2);
    }
    return Stored(random, shape.format, rows, columns, bytes);
  }
};

struct Batch {
  // Expert `favourite` gets every token's first choice if there is one; the last expert gets none then.
  Batch(Random& random, const Shape& shape, int tokens, int top_k, int favourite = -1)
      : tokens(tokens),
        top_k(top_k),
        hidden(random.halves(static_cast<std::size_t>(tokens) * shape.hidden)),
        d_out(random.halves(static_cast<std::size_t>(tokens) * shape.hidden)) {
    const auto expert = [&] {
      return random.below(favourite < 0 ? shape.experts : std::max(shape.experts - 1, 1));
    };
    ids = random.many(tokens * top_k, [&] { return static_cast<std::int64_t>(expert()); });
    for (int t = 0; t < tokens && favourite >= 0; ++t) ids[t * top_k] = favourite;
    weights = random.values(tokens * top_k);
  }
  int tokens, top_k;
  std::vector<std::int64_t> ids;
  std::vector<float> weights;
  AtPageEnd<bf16> hidden, d_out;
  std::vector<std::int64_t> numbers;
  Dropout dropout;

  // Drops a share of LoRA's inputs; slots are numbered in another order, as a part of a larger pass's are.
  void drop(Random& random, double share) {
    numbers = random.many(static_cast<int>(ids.size()),
                          [&] { return static_cast<std::int64_t>(random.below(1 << 30)); });
    dropout = {0x123456789abcdef0u + static_cast<std::uint64_t>(random.below(1 << 30)),
               static_cast<std::uint16_t>(share * 65536), numbers.data()};
  }
};

// moe/dropout.h's definition, an element at a time.
inline bool kept(const Dropout& dropout, std::size_t slot, int projection, int column) {
  const std::uint64_t number = dropout.numbers == nullptr ? slot : dropout.numbers[slot];
  std::uint64_t z = dropout.key + (3 * number + projection + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  std::uint32_t v = static_cast<std::uint32_t>(z) + static_cast<std::uint32_t>(column / 2) * 0x9e3779b9u;
  v = (v ^ v >> 16) * 0x7feb352du ^ static_cast<std::uint32_t>(z >> 32);
  v = (v ^ v >> 15) * 0x846ca68bu;
  v ^= v >> 16;
  return (column % 2 == 0 ? v & 0xffff : v >> 16) >= dropout.threshold;
}

// Everything a pass computes. T is what the layer writes, or double.
template <class Half, class Float>
struct Results {
  std::vector<Half> out, d_hidden;
  std::vector<Float> d_weights;
  std::array<std::vector<Float>, 6> d_lora;  // in the order of Present

  Results(const Model& model, const Batch& batch)
      : out(batch.tokens * model.shape.hidden), d_hidden(out.size()), d_weights(batch.ids.size()) {
    // Gradients are added to what is there.
    Random random(77);
    for (int i = 0; i < 6; ++i)
      for (float value : random.values(static_cast<std::size_t>(model.shape.experts) * model.shape.rank *
                                       (i % 2 == 0 ? model.columns(i / 2) : model.rows(i / 2))))
        d_lora[i].push_back(value);
  }
};
using Computed = Results<bf16, float>;
using Exact = Results<double, double>;

// The name of the first result whose bits differ; empty if none does.
inline std::string difference(const Computed& a, const Computed& b) {
  if (first_difference(a.out, b.out) != -1) return "out";
  if (first_difference(a.d_hidden, b.d_hidden) != -1) return "d_hidden";
  if (first_difference(a.d_weights, b.d_weights) != -1) return "d_weights";
  for (int i = 0; i < 6; ++i)
    if (first_difference(a.d_lora[i], b.d_lora[i]) != -1) return kLoraNames[i];
  return "";
}

inline LoraGradients gradients(const Model& model, Computed& results) {
  LoraGradients d_lora;
  for (int i = 0; i < 6; ++i)
    if (model.present[i]) (i % 2 == 0 ? d_lora.a : d_lora.b)[i / 2] = results.d_lora[i].data();
  d_lora.rank = model.shape.rank;
  d_lora.scale = model.lora.scale;
  return d_lora;
}

inline std::unique_ptr<Saved> run_forward(const Machine& machine, const Model& model, const Batch& batch,
                                          Keep keep, Computed& results) {
  return forward(machine, model.experts, model.lora, batch.tokens, batch.top_k, batch.hidden.data(),
                 batch.ids.data(), batch.weights.data(), results.out.data(), keep, batch.dropout);
}

inline Computed run(const Machine& machine, const Model& model, const Batch& batch, Keep keep) {
  Computed results(model, batch);
  const std::unique_ptr<Saved> saved = run_forward(machine, model, batch, keep, results);
  CHECK((saved == nullptr) == (keep == Keep::nothing));
  if (saved)
    backward(machine, model.experts, model.lora, *saved, batch.hidden.data(), batch.d_out.data(),
             results.d_hidden.data(), results.d_weights.data(), gradients(model, results));
  return results;
}

inline double rounded(double value) { return to_float(to_bf16(static_cast<float>(value))); }

// moe/layer.h's formulas and moe/backward.cpp's, slot by slot, with the roundings that layer.h names.
inline Exact reference(const Model& model, const Batch& batch) {
  using Row = std::vector<double>;
  const int rank = model.shape.rank;
  const double s = model.lora.scale;
  Exact result(model, batch);
  for (std::size_t slot = 0; slot < batch.ids.size(); ++slot) {
    const int e = static_cast<int>(batch.ids[slot]), token = static_cast<int>(slot) / batch.top_k;
    const double w = batch.weights[slot];
    const auto row_of = [&](const AtPageEnd<bf16>& rows) {
      Row row;
      for (int c = 0; c < model.shape.hidden; ++c)
        row.push_back(to_float(rows.data()[token * model.shape.hidden + c]));
      return row;
    };
    // t = s (in A^T), and in W^T + t B^T.
    const auto project = [&](int p, const Row& in, Row& t) {
      Row out(model.rows(p));
      t.assign(rank, 0);
      for (int r = 0; r < rank; ++r) {
        for (std::size_t k = 0; k < in.size(); ++k)
          if (kept(batch.dropout, slot, p, static_cast<int>(k)))
            t[r] += in[k] * model.a_at(p, e, r, static_cast<int>(k));
        t[r] = rounded(s * t[r]);
      }
      for (int n = 0; n < model.rows(p); ++n) {
        for (std::size_t k = 0; k < in.size(); ++k)
          out[n] += in[k] * to_float(model.weights[p][e].at(n, static_cast<int>(k)));
        for (int r = 0; r < rank; ++r) out[n] += t[r] * model.b_at(p, e, n, r);
        if (const float* bias = model.experts.bias_at(static_cast<Projection>(p), e, n)) out[n] += *bias;
      }
      return out;
    };
    // d W + s (d B) A, and the gradients of A and B times `weight`.
    const auto back = [&](int p, const Row& d, const Row& in, const Row& t, double weight) {
      Row d_in(model.columns(p)), thin(rank);
      for (int r = 0; r < rank; ++r) {
        for (int n = 0; n < model.rows(p); ++n) {
          thin[r] += s * d[n] * model.b_at(p, e, n, r);
          result.d_lora[2 * p + 1][(static_cast<std::ptrdiff_t>(e) * model.rows(p) + n) * rank + r] +=
              weight * d[n] * t[r];
        }
        for (int k = 0; k < model.columns(p); ++k)
          if (kept(batch.dropout, slot, p, k))
            result.d_lora[2 * p][(static_cast<std::ptrdiff_t>(e) * rank + r) * model.columns(p) + k] +=
                weight * thin[r] * in[k];
      }
      for (int k = 0; k < model.columns(p); ++k) {
        for (int n = 0; n < model.rows(p); ++n) d_in[k] += d[n] * to_float(model.weights[p][e].at(n, k));
        for (int r = 0; r < rank && kept(batch.dropout, slot, p, k); ++r)
          d_in[k] += thin[r] * model.a_at(p, e, r, k);
      }
      return d_in;
    };

    const Row x = row_of(batch.hidden), dy = row_of(batch.d_out);
    Row t[kProjections], h, dg, du;
    const Gating& gating = model.experts.gating;
    const double limit = gating.limit, alpha = gating.alpha, offset = gating.offset;
    Row g = project(kGate, x, t[kGate]), u = project(kUp, x, t[kUp]);
    for (std::size_t i = 0; i < g.size(); ++i) {
      g[i] = rounded(g[i]);
      u[i] = rounded(u[i]);
      const double x = std::min(g[i], limit), y = std::clamp(u[i], -limit, limit) + offset;
      h.push_back(rounded(x / (1 + std::exp(-alpha * x)) * y));
    }
    const Row y = project(kDown, h, t[kDown]), dh = back(kDown, dy, h, t[kDown], w);
    for (std::size_t i = 0; i < g.size(); ++i) {
      const double x = std::min(g[i], limit), y = std::clamp(u[i], -limit, limit) + offset;
      const double sigma = 1 / (1 + std::exp(-alpha * x));
      result.d_weights[slot] += dh[i] * h[i];
      dg.push_back(g[i] > limit ? 0 : w * dh[i] * y * (sigma + alpha * x * sigma * (1 - sigma)));
      du.push_back(std::abs(u[i]) > limit ? 0 : w * dh[i] * x * sigma);
    }
    if (const float* bias = model.experts.bias_at(kDown, e, 0))
      for (int c = 0; c < model.shape.hidden; ++c) result.d_weights[slot] += dy[c] * bias[c];
    const Row by_gate = back(kGate, dg, x, t[kGate], 1), by_up = back(kUp, du, x, t[kUp], 1);
    for (int c = 0; c < model.shape.hidden; ++c) {
      result.out[token * model.shape.hidden + c] += w * y[c];
      result.d_hidden[token * model.shape.hidden + c] += by_gate[c] + by_up[c];
    }
  }
  return result;
}

// The largest error, in units of 1 % of the element and the tensor's root mean square together; 1e9 for a
// NaN.
template <class T>
double error(const std::vector<T>& got, const std::vector<double>& want) {
  double squares = 0, worst = 0;
  for (double value : want) squares += value * value;
  const double mean = std::sqrt(squares / static_cast<double>(std::max<std::size_t>(want.size(), 1)));
  for (std::size_t i = 0; i < want.size(); ++i) {
    double value;
    if constexpr (std::is_same_v<T, bf16>)
      value = to_float(got[i]);
    else
      value = got[i];
    const double off = std::abs(value - want[i]) / (0.01 * (std::abs(want[i]) + mean) + 1e-30);
    worst = std::isnan(off) ? 1e9 : std::max(worst, off);
  }
  return worst;
}

}  // namespace ktbridge

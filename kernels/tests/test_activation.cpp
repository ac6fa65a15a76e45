// silu(g) u and what isn't that, with their gradients, against the same formulas in double.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "support.h"

using namespace ktbridge;

namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Off by no more than one rounding to bf16 and a few of float32; silu's far tail may come out as zero.
bool near(double got, double want, double scale) {
  return std::abs(got - want) <= std::ldexp(std::abs(want), -8) + 2e-6 * scale + 1e-28;
}

// Pre-activations of all sizes that a model has, and some that it hasn't.
float pre_activation(Random& random) {
  const float far[] = {0.f, -0.f, 30.f, -30.f, 87.f, -87.f, 89.f, -89.f, 500.f, -500.f, 3e4f, -3e4f};
  return random.below(20) == 0 ? far[random.below(12)] : 6 * random.value();
}

// silu(g) u, the same with limits, and gpt-oss's.
constexpr float kNone = std::numeric_limits<float>::infinity();
const Gating kGatings[] = {{}, {5.f}, {7.f, 1.702f, 1.f}, {kNone, 1.702f, 1.f}};

struct Gated {
  double h, by_g, by_u;
};
Gated gated(const Gating& gating, double g, double u) {
  const double limit = gating.limit, x = std::min(g, limit), y = std::clamp(u, -limit, limit) + gating.offset;
  const double s = sigmoid(gating.alpha * x);
  return {x * s * y, g <= limit ? y * (s + gating.alpha * x * s * (1 - s)) : 0,
          std::abs(u) <= limit ? x * s : 0};
}

void activates(const Kernels& kernels) {
  Random random(1);
  for (int i = 0; i < 200; ++i) {
    const std::ptrdiff_t apart = random.between(1, 4) * kBlock;
    std::vector<float> blocks = random.values(3 * apart + kBlock);
    for (int g = 0; g < 2; ++g)
      for (int e = 0; e < kBlock; ++e) blocks[g * apart + e] = pre_activation(random);
    Gating gating = kGatings[i / 3 % 4];
    const bool plain = i % 8 == 0 && std::isinf(gating.limit) && gating.offset == 0;
    const AtPageEnd<float> gate_bias(random.values(kSteps)), up_bias(random.values(kSteps));
    if (!plain && i % 5 != 0) gating.gate_bias = gate_bias.data();
    if (!plain && i % 7 != 0) gating.up_bias = up_bias.data();
    if (!plain)
      for (int u = 2; u < 4; ++u)
        for (int e = 0; e < kBlock; ++e) blocks[u * apart + e] = pre_activation(random);
    const AtPageEnd<float> input(blocks);
    const bool with_h = i % 3 != 1, with_kept = i % 3 != 2;
    Output<bf16> h(kTile), gate(kTile), up(kTile);
    kernels.activate(input.data(), apart, with_h ? h.data() : nullptr, with_kept ? gate.data() : nullptr,
                     with_kept ? up.data() : nullptr, plain ? nullptr : &gating);
    std::vector<bf16> want_gate = gate.all_untouched(), want_up = want_gate;
    int far_off = 0;
    for (int k = 0; k < kSteps; ++k)
      for (int token = 0; token < kStrip; ++token) {
        const float* from = blocks.data() + k / kStrip * apart + k % kStrip * kStrip + token;
        const bf16 g = to_bf16(gating.gate_bias ? from[0] + gating.gate_bias[k] : from[0]),
                   u = to_bf16(gating.up_bias ? from[2 * apart] + gating.up_bias[k] : from[2 * apart]);
        if (with_kept) want_gate[left_at(token, k)] = g;
        if (with_kept) want_up[left_at(token, k)] = u;
        const double want = gated(gating, to_float(g), to_float(u)).h;
        if (with_h && !near(to_float(h.data()[right_at(k, token)]), want, std::abs(want))) ++far_off;
      }
    CHECK(far_off == 0);
    if (!with_h) CHECK(first_difference(h.data(), h.all_untouched()) == -1);
    CHECK(first_difference(gate.data(), want_gate) == -1);
    CHECK(first_difference(up.data(), want_up) == -1);
    CHECK(h.guards_intact() && gate.guards_intact() && up.guards_intact());
  }
}

void differentiates(const Kernels& kernels) {
  Random random(2);
  for (int i = 0; i < 200; ++i) {
    const std::vector<float> result = random.values(2 * kBlock);
    std::vector<float> weight = random.values(kStrip);
    weight[random.below(kStrip)] = 0.f;  // no token
    const std::vector<bf16> gate = random.many(kTile, [&] { return to_bf16(pre_activation(random)); });
    const Gating& gating = kGatings[i % 4];
    const bool plain = i % 8 == 0;
    const std::vector<bf16> up =
        random.many(kTile, [&] { return to_bf16(i % 4 == 0 ? random.value() : pre_activation(random)); });
    const AtPageEnd<float> results(result), weights(weight);
    const AtPageEnd<bf16> gates(gate), ups(up);
    Output<bf16> d_gate(kTile), d_up(kTile), h(kTile);
    Output<float> d_weight(kStrip);
    kernels.inner_gradients({results.data(), gates.data(), ups.data(), weights.data(), d_gate.data(),
                             d_up.data(), h.data(), d_weight.data(), nullptr, plain ? nullptr : &gating});
    int far_off = 0;
    for (int token = 0; token < kStrip; ++token) {
      double product = 0, size = 0;
      for (int k = 0; k < kSteps; ++k) {
        const double d = result[k / kStrip * kBlock + token * kStrip + k % kStrip], w = weight[token];
        const std::ptrdiff_t at = left_at(token, k);
        const double u = to_float(up[at]);
        const Gated want = gated(gating, to_float(gate[at]), u);
        far_off += !near(to_float(h.data()[at]), want.h, std::abs(want.h));
        far_off += !near(to_float(d_up.data()[at]), w * d * want.by_u, std::abs(w * d * want.by_u));
        far_off += !near(to_float(d_gate.data()[at]), w * d * want.by_g, std::abs(w * d) * (std::abs(u) + 1));
        product += d * want.h;
        size += std::abs(d * want.h);
      }
      far_off += std::abs(d_weight.data()[token] - product) > 1e-5 * size;
      if (weight[token] == 0.f)
        for (int k = 0; k < kSteps; ++k)
          far_off += to_float(d_gate.data()[left_at(token, k)]) != 0 ||
                     to_float(d_up.data()[left_at(token, k)]) != 0;
    }
    CHECK(far_off == 0);
    CHECK(d_gate.guards_intact() && d_up.guards_intact() && h.guards_intact() && d_weight.guards_intact());
  }
}

// A NaN or an infinity in training must show in the loss, not vanish in an epilogue.
void keeps_what_is_broken(const Kernels& kernels) {
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  for (int which = 0; which < 5; ++which) {  // an infinity is within limits again
    std::vector<float> blocks(4 * kBlock, 1.f);
    const bool of_up = which == 1 || which == 4;
    blocks[of_up ? 2 * kBlock : 0] = which == 2 ? infinity : nan;
    Output<bf16> h(kTile), gate(kTile), up(kTile);
    const Gating clamped{7.f, 1.702f, 1.f};
    const bool plain = which < 3;
    kernels.activate(blocks.data(), kBlock, h.data(), gate.data(), up.data(), plain ? nullptr : &clamped);
    CHECK(!std::isfinite(to_float(h.data()[0])));
    CHECK(!std::isfinite(to_float((of_up ? up : gate).data()[0])));
    CHECK(std::isfinite(to_float(h.data()[2])));
  }
}

}  // namespace

int main() {
  for_each_isa([](const Kernels& kernels) {
    activates(kernels);
    differentiates(kernels);
    keeps_what_is_broken(kernels);
  });
  return check::report();
}

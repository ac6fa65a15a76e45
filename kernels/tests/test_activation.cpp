// silu(g) u and its gradient, against the same formulas in double.
#include <cmath>
#include <limits>
#include <string>

#include "support.h"

using namespace ktbridge;

namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Off by no more than one rounding to bf16 and a few of float32; silu's far tail may come out as zero.
bool near(double got, double want, double scale) {
  return std::abs(got - want) <= std::ldexp(std::abs(want), -8) + 2e-6 * scale + 1e-33;
}

// Pre-activations of all sizes that a model has, and some that it hasn't.
float pre_activation(Random& random) {
  const float far[] = {0.f, -0.f, 30.f, -30.f, 87.f, -87.f, 89.f, -89.f, 500.f, -500.f, 3e4f, -3e4f};
  return random.below(20) == 0 ? far[random.below(12)] : 6 * random.value();
}

void activates(const Kernels& kernels) {
  Random random(1);
  for (int i = 0; i < 200; ++i) {
    const std::ptrdiff_t apart = random.between(1, 4) * kBlock;
    std::vector<float> blocks = random.values(3 * apart + kBlock);
    for (int g = 0; g < 2; ++g)
      for (int e = 0; e < kBlock; ++e) blocks[g * apart + e] = pre_activation(random);
    const AtPageEnd<float> input(blocks);
    const bool with_h = i % 3 != 1, with_kept = i % 3 != 2;
    Output<bf16> h(kTile), gate(kTile), up(kTile);
    kernels.activate(input.data(), apart, with_h ? h.data() : nullptr, with_kept ? gate.data() : nullptr,
                     with_kept ? up.data() : nullptr);
    std::vector<bf16> want_gate = gate.all_untouched(), want_up = want_gate;
    int far_off = 0;
    for (int k = 0; k < kSteps; ++k)
      for (int token = 0; token < kStrip; ++token) {
        const float* from = blocks.data() + k / kStrip * apart + k % kStrip * kStrip + token;
        const bf16 g = to_bf16(from[0]), u = to_bf16(from[2 * apart]);
        if (with_kept) want_gate[left_at(token, k)] = g;
        if (with_kept) want_up[left_at(token, k)] = u;
        const double x = to_float(g), want = x * sigmoid(x) * to_float(u);
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
    const std::vector<bf16> up = random.halves(kTile);
    const AtPageEnd<float> results(result), weights(weight);
    const AtPageEnd<bf16> gates(gate), ups(up);
    Output<bf16> d_gate(kTile), d_up(kTile), h(kTile);
    Output<float> d_weight(kStrip);
    kernels.inner_gradients({results.data(), gates.data(), ups.data(), weights.data(), d_gate.data(),
                             d_up.data(), h.data(), d_weight.data()});
    int far_off = 0;
    for (int token = 0; token < kStrip; ++token) {
      double product = 0, size = 0;
      for (int k = 0; k < kSteps; ++k) {
        const double d = result[k / kStrip * kBlock + token * kStrip + k % kStrip], w = weight[token];
        const std::ptrdiff_t at = left_at(token, k);
        const double g = to_float(gate[at]), u = to_float(up[at]), s = sigmoid(g);
        far_off += !near(to_float(h.data()[at]), g * s * u, std::abs(g * s * u));
        far_off += !near(to_float(d_up.data()[at]), w * d * g * s, std::abs(w * d * g * s));
        far_off +=
            !near(to_float(d_gate.data()[at]), w * d * u * (s + g * s * (1 - s)), std::abs(w * d * u));
        product += d * g * s * u;
        size += std::abs(d * g * s * u);
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
  for (int which = 0; which < 3; ++which) {
    std::vector<float> blocks(4 * kBlock, 1.f);
    blocks[which == 1 ? 2 * kBlock : 0] = which == 2 ? infinity : nan;
    Output<bf16> h(kTile), gate(kTile), up(kTile);
    kernels.activate(blocks.data(), kBlock, h.data(), gate.data(), up.data());
    CHECK(!std::isfinite(to_float(h.data()[0])));
    CHECK(!std::isfinite(to_float((which == 1 ? up : gate).data()[0])));
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

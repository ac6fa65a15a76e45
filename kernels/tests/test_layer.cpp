// The layer against its formulas in float64: every ISA, all it can keep, LoRA ranks and subsets, storages
// and routings. Sizes are small, so that one wrong element is far from its neighbours' rounding errors.
#include <malloc.h>

#include "layer.h"

using namespace ktbridge;

namespace {

// The worst errors that bf16 activations bring here: out 0.8, d_hidden 1.9, d_weights 0.3, LoRA 0.5.
constexpr double kClose = 3;

std::string isa;  // under test

Machine machine() {
  static Pool pool(crowd(3));
  return {&kernels_for(isa), &pool};
}

void check_against(const Exact& want, const Model& model, const Batch& batch) {
  const Computed retained = run(machine(), model, batch, Keep::retain);
  CHECK(error(retained.out, want.out) < kClose);
  CHECK(error(retained.d_hidden, want.d_hidden) < kClose);
  CHECK(error(retained.d_weights, want.d_weights) < kClose);
  for (int i = 0; i < 6; ++i) {
    const check::Case name(kLoraNames[i]);
    if (model.present[i]) CHECK(error(retained.d_lora[i], want.d_lora[i]) < kClose);
  }
  CHECK(difference(run(machine(), model, batch, Keep::recompute), retained) == "");
  CHECK(first_difference(run(machine(), model, batch, Keep::nothing).out, retained.out) == -1);
}

void check_layer(const Model& model, const Batch& batch) {
  const Exact want = reference(model, batch);
  for (const std::string& each : tested_isas()) {
    const check::Case name(isa = each);
    check_against(want, model, batch);
  }
}

void all_ranks_and_routings() {
  Random random(1);
  for (int rank : {0, 1, 8, 40, 128}) {
    const check::Case name("rank " + std::to_string(rank));
    Shape shape;
    shape.rank = rank;
    const Model model(random, shape);
    check_layer(model, Batch(random, shape, 50, 2));
    check_layer(model, Batch(random, shape, 37, 3, 0));
    check_layer(model, Batch(random, shape, 33, 1, 2));  // the other experts have none
    for (int tokens : {1, 15, 16, 17}) {
      const check::Case name(std::to_string(tokens) + " tokens");
      check_layer(model, Batch(random, shape, tokens, 1));
    }
  }
}

void sizes_of_all_kinds() {
  Random random(2);
  // The last two have reductions that backward cuts.
  const int sizes[][2] = {{1, 1},    {16, 16},  {32, 64},   {33, 31},   {64, 32},
                          {96, 100}, {129, 17}, {130, 160}, {1600, 40}, {40, 832}};
  for (const auto& [hidden, inner] : sizes) {
    const check::Case name(std::to_string(hidden) + " x " + std::to_string(inner));
    Shape shape{hidden, inner, 3, random.between(1, 20)};
    check_layer(Model(random, shape), Batch(random, shape, 40, 2));
  }
}

void subsets_of_lora() {
  Random random(3);
  Shape shape;
  for (int i = 0; i < 14; ++i) {
    Present present;
    std::string name;
    // Every single one missing, every single one there, then pairs.
    for (int j = 0; j < 6; ++j) {
      present[j] = i < 6 ? j != i : i < 12 ? j == i - 6 : i == 12 ? j < 4 : j >= 4;
      name += present[j] ? "x" : "-";
    }
    const check::Case subset("present " + name);
    shape.rank = random.between(1, 40);
    check_layer(Model(random, shape, present), Batch(random, shape, 40, 2));
  }
}

void biases_and_limits() {
  Random random(9);
  for (const auto& [hidden, inner] : {std::pair{72, 41}, {64, 96}, {33, 31}})
    for (int rank : {0, 8}) {
      const check::Case name(std::to_string(hidden) + " x " + std::to_string(inner));
      const Format format =
          inner == 96 ? Format{"mxfp4", Storage::mxfp4, 0, 5} : Format{"bf16", Storage::bf16};
      const Shape shape{hidden, inner, 3, rank, format, true};
      check_layer(Model(random, shape), Batch(random, shape, 40, 2));
      check_layer(Model(random, shape), Batch(random, shape, 3, 1));
    }
}

void every_storage() {
  Random random(4);
  for (const Format& format : kFormats) {
    if (format.storage == Storage::fp32) continue;  // a LoRA's
    const check::Case name(format.name);
    for (int hidden : {70, 160, 1664}) {
      Shape shape{hidden, 64, 3, 8, format};
      // Raw FP8 codes reach 448; LoRA is small beside them, but the other cases see to it.
      check_layer(Model(random, shape), Batch(random, shape, 33, 2));
    }
  }
}

// One to eight tokens on one expert and nine to sixteen on the other: every count has its own way through
// the products.
void few_tokens() {
  constexpr int kTokens = 17;
  Random random(7);
  for (const Format& format : kFormats) {
    if (format.storage == Storage::fp32) continue;  // a LoRA's
    for (int rank : {0, 5})
      for (const auto& [hidden, inner] : {std::pair{70, 41}, {64, 32}}) {
        const Shape shape{hidden, inner, 2, rank, format};
        const Model model(random, shape);
        for (int few = 1; few <= kTokens / 2; ++few) {
          const check::Case name(std::string(format.name) + ", rank " + std::to_string(rank) + ", " +
                                 std::to_string(hidden) + " x " + std::to_string(inner) + ", " +
                                 std::to_string(few) + " tokens");
          Batch batch(random, shape, kTokens, 1);
          for (int t = 0; t < kTokens; ++t) batch.ids[t] = t < few ? 0 : 1;
          check_layer(model, batch);
        }
      }
  }
}

// bf16 rows where they lie, farther apart than they are long: gate and up fused in one tensor.
void fused_weights() {
  Random random(5);
  Shape shape{64, 96, 3, 8};
  const Model separate(random, shape);
  Model fused(random, shape);
  fused.lora = separate.lora;
  std::vector<AtPageEnd<std::uint8_t>> tensors;
  for (int e = 0; e < shape.experts; ++e) {
    const std::ptrdiff_t row = 2 * shape.hidden;
    std::vector<std::uint8_t> bytes(2 * shape.inner * row);
    for (int p : {kGate, kUp})
      for (int r = 0; r < shape.inner; ++r)
        std::memcpy(&bytes[(2 * r + p) * row],
                    static_cast<const char*>(separate.experts.weight[p][e].data) + r * row, row);
    tensors.emplace_back(bytes);
    for (int p : {kGate, kUp}) {
      fused.experts.weight[p][e].data = tensors.back().data() + p * row;
      fused.experts.weight[p][e].stride = 2 * row;
    }
    fused.experts.weight[kDown][e] = separate.experts.weight[kDown][e];
  }
  const Batch batch(random, shape, 40, 2);
  for (const std::string& each : tested_isas()) {
    const check::Case name(isa = each);
    CHECK(difference(run(machine(), fused, batch, Keep::retain),
                     run(machine(), separate, batch, Keep::retain)) == "");
  }
}

void dropped_inputs() {
  Random random(8);
  const int sizes[][2] = {{72, 41}, {1, 1}, {33, 31}, {64, 96}, {300, 130}};
  for (const auto& [hidden, inner] : sizes)
    for (double share : {0.1, 0.5, 0.99})
      for (int rank : {1, 8, 40}) {
        const check::Case name(std::to_string(hidden) + " x " + std::to_string(inner) + ", rank " +
                               std::to_string(rank) + ", " + std::to_string(share));
        const Shape shape{hidden, inner, 3, rank};
        const Model model(random, shape);
        // An expert with more than the strips that are copied at a time, and few tokens.
        for (int tokens : {1, 15, 150}) {
          const check::Case name(std::to_string(tokens) + " tokens");
          Batch batch(random, shape, tokens, tokens > 100 ? 2 : 1, tokens > 100 ? 0 : -1);
          batch.drop(random, share);
          check_layer(model, batch);
        }
      }
  // Where only some factors are there, and in order where nobody numbers the slots.
  const Shape shape{72, 41, 4, 8};
  for (int missing = 0; missing < 6; ++missing) {
    Present present = kAllPresent;
    present[missing] = false;
    Batch batch(random, shape, 40, 2);
    batch.drop(random, 0.3);
    batch.dropout.numbers = nullptr;
    check_layer(Model(random, shape, present), batch);
  }
}

void nothing_to_do() {
  Random random(6);
  for (int rank : {0, 8}) {
    Shape shape;
    shape.rank = rank;
    const Model model(random, shape);
    for (const auto& [tokens, top_k] : {std::pair{0, 2}, {0, 0}, {5, 0}}) {
      const check::Case name(std::to_string(tokens) + " tokens, top " + std::to_string(top_k));
      check_layer(model, Batch(random, shape, tokens, top_k));
    }
  }
}

}  // namespace

int main() {
  mallopt(M_PERTURB, 0x80);  // fresh memory is full of 0x7f: huge as bf16 and as float
  all_ranks_and_routings();
  sizes_of_all_kinds();
  subsets_of_lora();
  biases_and_limits();
  every_storage();
  few_tokens();
  fused_weights();
  dropped_inputs();
  nothing_to_do();
  return check::report();
}

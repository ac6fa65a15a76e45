// What a pass owes beside its formulas: the same bits from every pool and every time, nothing left over
// from earlier passes, gradients by the token, errors that leave the pool usable, callers taking turns.
#include <malloc.h>

#include <limits>
#include <new>
#include <thread>

#include "common/recycler.h"
#include "layer.h"

using namespace ktbridge;

namespace {

const Format kInt8 = {"int8", Storage::int8, 0, 30};

void pools_give_the_same_bits() {
  Random random(1);
  Pool one(crowd(1)), two(crowd(2)), three(crowd(3)), seven(crowd(7));
  for (const Shape& shape :
       {Shape{72, 41, 4, 8}, Shape{96, 160, 3, 40}, Shape{64, 96, 9, 0}, Shape{96, 64, 4, 8, kInt8}})
    for (int favourite : {-1, 1}) {
      const check::Case name(std::to_string(shape.experts) + " experts, favourite " +
                             std::to_string(favourite));
      const Model model(random, shape);
      Batch batch(random, shape, 70, 2, favourite);
      if (favourite < 0) batch.drop(random, 0.1);
      for_each_isa([&](const Kernels& kernels) {
        const Computed want = run({&kernels, &one}, model, batch, Keep::retain);
        for (Pool* pool : {&one, &two, &three, &seven})
          for (Keep keep : {Keep::retain, Keep::recompute})
            for (int again = 0; again < 2; ++again) {
              const check::Case name(std::to_string(pool->threads()) + " threads");
              CHECK(difference(run({&kernels, pool}, model, batch, keep), want) == "");
            }
      });
    }
}

// A pass in which everything is NaN leaves its workspaces and recycled buffers to the next one.
void nothing_is_left_over() {
  Random random(2);
  Pool pool(crowd(3));
  const Shape large{200, 130, 3, 70}, small{72, 41, 3, 8};
  const Model large_model(random, large), model(random, small);
  const Batch batch(random, small, 41, 2);
  Batch poison(random, large, 100, 2);
  std::fill(poison.weights.begin(), poison.weights.end(), std::numeric_limits<float>::quiet_NaN());
  poison.hidden = AtPageEnd<bf16>(std::vector<bf16>(100 * large.hidden, 0x7fc0));
  for_each_isa([&](const Kernels& kernels) {
    const Machine machine{&kernels, &pool};
    release_memory();
    const Computed want = run(machine, model, batch, Keep::retain);
    const Computed nans = run(machine, large_model, poison, Keep::retain);
    CHECK(error(nans.out, std::vector<double>(nans.out.size())) == 1e9);
    for (Keep keep : {Keep::retain, Keep::recompute})
      CHECK(difference(run(machine, model, batch, keep), want) == "");
  });
}

// More tokens than one block of them holds (moe/pass.h) are what the same tokens are a few at a time, or
// one by one as when they are decoded: bit for bit, but for the LoRA gradients' sums.
void tokens_do_not_see_each_other() {
  Random random(3);
  const Shape shape{2100, 33, 2, 8};
  constexpr int kTokens = 680;
  const Model model(random, shape);
  const Batch batch(random, shape, kTokens, 1, 1);
  Pool pool(crowd(2));
  const auto check = [&](const std::string& isa, int tokens, std::initializer_list<int> chunks) {
    const check::Case name(isa);
    const Machine machine{&kernels_for(isa), &pool};
    Computed all(model, batch), parts(model, batch);
    const auto run_chunk = [&](int first, int count, Computed& results) {
      const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(first) * shape.hidden;
      const std::unique_ptr<Saved> saved = forward(
          machine, model.experts, model.lora, count, 1, batch.hidden.data() + at, batch.ids.data() + first,
          batch.weights.data() + first, results.out.data() + at, Keep::recompute);
      backward(machine, model.experts, model.lora, *saved, batch.hidden.data() + at, batch.d_out.data() + at,
               results.d_hidden.data() + at, results.d_weights.data() + first, gradients(model, results));
    };
    run_chunk(0, tokens, all);
    for (int first = 0; first < tokens;)
      for (int chunk : chunks) {
        const int count = std::min(chunk, tokens - first);
        if (count > 0) run_chunk(first, count, parts);
        first += count;
      }
    CHECK(first_difference(parts.out, all.out) == -1);
    CHECK(first_difference(parts.d_hidden, all.d_hidden) == -1);
    CHECK(first_difference(parts.d_weights, all.d_weights) == -1);
    for (int i = 0; i < 6; ++i) {
      const check::Case name(kLoraNames[i]);
      CHECK(error(parts.d_lora[i], std::vector<double>(all.d_lora[i].begin(), all.d_lora[i].end())) < 0.01);
    }
  };
  check(available_isas().back(), kTokens, {85});
  for (const std::string& isa : tested_isas()) check(isa, 37, {1, 2, 3, 4, 5, 6, 7, 8, 1});
}

void refuses_an_unknown_expert() {
  Random random(4);
  const Shape shape{40, 33, 3, 8};
  const Model model(random, shape);
  const Batch good(random, shape, 20, 2);
  Pool pool(crowd(2));
  const Machine machine{&kernels_scalar(), &pool};
  const Computed want = run(machine, model, good, Keep::retain);
  for (std::int64_t id : {std::int64_t{-1}, std::int64_t{3}, std::numeric_limits<std::int64_t>::max()}) {
    Batch bad(random, shape, 20, 2);
    bad.ids[17] = id;
    Computed results(model, bad);
    CHECK_THROWS(run_forward(machine, model, bad, Keep::retain, results), std::out_of_range,
                 "topk_ids holds " + std::to_string(id) + " but there are 3");
    CHECK(difference(run(machine, model, good, Keep::retain), want) == "");
  }
}

// Out of memory in the middle of a pass, in whichever unit it comes.
std::atomic<int> calls_left;
void fail_after_some(const Matrix& w, int row, bf16* strip) {
  if (--calls_left == 0) throw std::bad_alloc();
  kernels_scalar().pack_left(w, row, strip);
}

void a_failed_pass_leaves_the_pool_usable() {
  Random random(5);
  const Shape shape{40, 65, 3, 8};
  const Model model(random, shape);
  const Batch batch(random, shape, 20, 2);
  Pool pool(crowd(3));
  Kernels failing = kernels_scalar();
  failing.pack_left = fail_after_some;
  const Computed want = run({&kernels_scalar(), &pool}, model, batch, Keep::retain);
  int failures = 0;
  for (int calls = 1; calls < 40; calls += 3) {
    calls_left = calls;
    Computed results(model, batch);
    CHECK_THROWS(run_forward({&failing, &pool}, model, batch, Keep::retain, results), std::bad_alloc, "");
    ++failures;
    CHECK(difference(run({&kernels_scalar(), &pool}, model, batch, Keep::retain), want) == "");
  }
  CHECK(failures == 13);
}

void callers_take_turns() {
  Random random(6);
  const Shape shapes[] = {{72, 41, 4, 8}, {96, 64, 3, 20, kInt8}};
  const Model models[] = {{random, shapes[0]}, {random, shapes[1]}};
  const Batch batches[] = {{random, shapes[0], 40, 2}, {random, shapes[1], 30, 3}};
  Pool pool(crowd(3));
  const Machine machine{&kernels_for(available_isas().back()), &pool};
  std::vector<std::thread> callers;
  for (int i = 0; i < 2; ++i)
    callers.emplace_back([&, i] {
      const Computed want = run(machine, models[i], batches[i], Keep::retain);
      for (int again = 0; again < 15; ++again)
        CHECK(difference(run(machine, models[i], batches[i], again % 2 ? Keep::retain : Keep::recompute),
                         want) == "");
    });
  for (std::thread& caller : callers) caller.join();
}

}  // namespace

int main() {
  mallopt(M_PERTURB, 0x80);  // fresh memory is full of 0x7f: huge as bf16 and as float
  pools_give_the_same_bits();
  nothing_is_left_over();
  tokens_do_not_see_each_other();
  refuses_an_unknown_expert();
  a_failed_pass_leaves_the_pool_usable();
  callers_take_turns();
  return check::report();
}

// The data flow of a pass (moe/schedule.h): everything once, nothing before what it waits for, errors to
// the caller; and on a machine of two nodes, each node's experts to its own threads first.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "layer.h"
#include "moe/schedule.h"

using namespace ktbridge;

namespace {

constexpr int kFirst = 9, kSecond = 7, kLast = 11;

// The experts' weights don't matter; three of them have tokens.
struct Passes {
  Passes() {
    experts.weight[kGate].resize(5);
    const std::vector<std::int64_t> ids = {3, 0, 3, 3, 0, 1};
    routing = route(5, 6, 1, ids.data(), std::vector<float>(6).data());
  }
  Experts experts;
  Routing routing;
};

void dawdle(int where) {
  if (where % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200 * (where % 4)));
}

void in_order_and_once() {
  Passes passes;
  const bool has_tokens[5] = {true, true, false, true, false};
  for (int threads : {1, 2, 3, 7})
    for (int nodes : {1, 2})
      for (int round = 0; round < 20; ++round) {
        const check::Case name(std::to_string(threads) + " threads on " + std::to_string(nodes) + " nodes");
        Pool pool(crowd(threads, nodes));
        passes.experts.node.assign(round % 2 ? 5 : 0, round % 4 == 1 ? 0 : -1);
        std::atomic<int> first[5][kFirst] = {}, second[5][kSecond] = {}, last[kLast] = {};
        std::atomic<int> firsts[5] = {}, between[5] = {}, seconds{0};
        Work work{kFirst, kSecond, kLast, {}, {}, {}, {}};
        work.first = [&](Unit unit) {
          for (int p = unit.begin; p < unit.end; ++p) ++first[unit.expert][p];
          dawdle(unit.begin + round);
          firsts[unit.expert] += unit.end - unit.begin;
        };
        work.between = [&](int expert) {
          CHECK(firsts[expert] == kFirst);
          dawdle(expert + round);
          ++between[expert];
        };
        work.second = [&](Unit unit) {
          CHECK(between[unit.expert] == 1);
          for (int p = unit.begin; p < unit.end; ++p) ++second[unit.expert][p];
          dawdle(unit.end + round);
          seconds += unit.end - unit.begin;
        };
        work.last = [&](int unit) {
          CHECK(seconds == 3 * kSecond);
          ++last[unit];
        };
        run_work({&kernels_scalar(), &pool}, passes.experts, passes.routing, work);
        for (int e = 0; e < 5; ++e) {
          for (const auto& times : first[e]) CHECK(times == has_tokens[e]);
          for (const auto& times : second[e]) CHECK(times == has_tokens[e]);
          CHECK(between[e] == has_tokens[e]);
        }
        for (const auto& times : last) CHECK(times == 1);
      }
}

void errors_reach_the_caller() {
  Passes passes;
  for (int threads : {1, 3}) {
    Pool pool(crowd(threads));
    for (int guilty = 0; guilty < 5; ++guilty) {  // nobody is, at last
      const auto act = [&](int part, int where) {
        if (part == guilty && where % 2 == 1) throw std::runtime_error("part " + std::to_string(part));
      };
      std::atomic<int> lasts{0};
      Work work{kFirst, kSecond, kLast, {}, {}, {}, {}};
      work.first = [&](Unit unit) { act(0, unit.expert); };
      work.between = [&](int expert) { act(1, expert); };
      work.second = [&](Unit unit) { act(2, unit.expert); };
      work.last = [&](int unit) {
        ++lasts;
        act(3, unit);
      };
      const auto go = [&] { run_work({&kernels_scalar(), &pool}, passes.experts, passes.routing, work); };
      if (guilty < 4)
        CHECK_THROWS(go(), std::runtime_error, "part " + std::to_string(guilty));
      else
        go();
      CHECK((lasts == kLast) == (guilty == 4));
    }
  }
}

// Records which thread packs which expert. The threads of a pass meet at their first one, so that each has
// work before any could be done with its own.
class Recorder {
 public:
  Recorder(Pool& pool, const Model& model) : pool_(pool) {
    for (const auto& projection : model.experts.weight)
      for (std::size_t e = 0; e < projection.size(); ++e) experts_[projection[e].data] = static_cast<int>(e);
    pool.run([](int thread) { thread_ = thread; });
    only_ = this;
  }
  // For each thread, the experts in the order in which it took them up.
  std::vector<std::vector<int>> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(taken_, std::vector<std::vector<int>>(pool_.threads()));
  }
  static Kernels kernels() {
    Kernels kernels = kernels_scalar();
    kernels.pack_left = [](const Matrix& w, int row, bf16* strip) {
      only_->record(w);
      kernels_scalar().pack_left(w, row, strip);
    };
    kernels.pack_right = [](const Matrix& w, int reduction, int column, Strips target) {
      only_->record(w);
      kernels_scalar().pack_right(w, reduction, column, target);
    };
    return kernels;
  }

 private:
  void record(const Matrix& w) {
    const auto found = experts_.find(w.data);
    if (found == experts_.end()) return;  // a LoRA factor
    std::unique_lock lock(mutex_);
    std::vector<int>& mine = taken_[thread_];
    const bool arriving = mine.empty();
    if (arriving || mine.back() != found->second) mine.push_back(found->second);
    if (!arriving) return;
    const auto all_here = [&] {
      return std::all_of(taken_.begin(), taken_.end(), [](const auto& some) { return !some.empty(); });
    };
    if (all_here()) arrived_.notify_all();
    CHECK(arrived_.wait_for(lock, std::chrono::seconds(20), all_here));
  }

  static inline Recorder* only_ = nullptr;
  static inline thread_local int thread_ = -1;
  Pool& pool_;
  std::map<const void*, int> experts_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<std::vector<int>> taken_ = std::vector<std::vector<int>>(pool_.threads());
};

// Own experts first, and none of them any more once the thread has begun to help.
void check_order(const Pool& pool, const std::vector<int>& node, const std::vector<std::vector<int>>& taken) {
  for (int thread = 0; thread < pool.threads(); ++thread) {
    const check::Case name("thread " + std::to_string(thread));
    const int own = pool.node_index(pool.node(thread));
    const bool has_own = std::find(node.begin(), node.end(), own) != node.end();
    bool helping = !has_own;
    CHECK(!taken[thread].empty());
    for (std::size_t i = 0; i < taken[thread].size(); ++i) {
      const bool foreign = node[taken[thread][i]] != own;
      CHECK(foreign || !helping);
      CHECK(!foreign || i > 0 || !has_own);
      helping = helping || foreign;
    }
  }
}

void own_node_first() {
  Random random(1);
  // Weights that are always packed, in many panels.
  const Shape shape{256, 256, 4, 8, {"int8", Storage::int8, 0, 30}};
  Model model(random, shape);
  const Batch batch(random, shape, 24, 4);
  Pool alone(crowd(4)), pool(crowd(4, 2));
  const Computed want = run({&kernels_scalar(), &alone}, model, batch, Keep::retain);
  Recorder recorder(pool, model);
  const Kernels kernels = Recorder::kernels();
  const Machine machine{&kernels, &pool};
  // Alternating, in halves, and all on one node: then the other node's threads have nothing but help to
  // give.
  for (const std::vector<int>& node :
       {std::vector<int>{0, 1, 0, 1}, {1, 1, 0, 0}, {1, 1, 1, 1}, {0, 0, 0, 0}})
    for (int again = 0; again < 5; ++again) {
      const check::Case name("nodes " + std::to_string(node[0]) + std::to_string(node[1]) +
                             std::to_string(node[2]));
      model.experts.node = node;
      Computed results(model, batch);
      const std::unique_ptr<Saved> saved = run_forward(machine, model, batch, Keep::retain, results);
      check_order(pool, node, recorder.take());
      backward(machine, model.experts, model.lora, *saved, batch.hidden.data(), batch.d_out.data(),
               results.d_hidden.data(), results.d_weights.data(), gradients(model, results));
      check_order(pool, node, recorder.take());
      CHECK(difference(results, want) == "");
    }
  model.experts.node = {-1, 1, -1, 0};  // where a page's node isn't known
  CHECK(difference(run({&kernels_scalar(), &pool}, model, batch, Keep::recompute), want) == "");
}

}  // namespace

int main() {
  in_order_and_once();
  errors_reach_the_caller();
  own_node_first();
  return check::report();
}

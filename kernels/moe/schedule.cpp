#include "moe/schedule.h"

#include <xmmintrin.h>

#include <algorithm>
#include <thread>

namespace ktbridge {
namespace {

// Units a thread gets on average: few enough that an expert's tokens are packed only once or twice, many
// enough that the last ones to finish don't keep the others waiting.
constexpr double kUnitsPerThread = 6;
// An expert's weights cost as much to read as this many of its tokens cost to compute.
constexpr int kReadCost = 64;

struct alignas(64) Counter {
  std::atomic<int> value{0};
};

// The units of the experts whose weights lie on one NUMA node. An expert that isn't cut is in `first` only:
// whoever has its first unit does the second as well, while what the first has made is in cache.
struct Queue {
  std::vector<Unit> first, second;
  Counter next;
};

// The state in which a thread computes: AMX tiles configured, and the default rounding without flushing
// subnormals to zero, whatever the caller's thread has set; results must not depend on who runs a unit.
class Arithmetic {
 public:
  explicit Arithmetic(const Kernels& kernels) : kernels_(kernels), control_(_mm_getcsr()) {
    _mm_setcsr(0x1f80);  // all exceptions masked
    kernels_.begin();
  }
  ~Arithmetic() {
    kernels_.end();
    _mm_setcsr(control_);
  }
  Arithmetic(const Arithmetic&) = delete;
  Arithmetic& operator=(const Arithmetic&) = delete;

 private:
  const Kernels& kernels_;
  const unsigned control_;
};

void cut(std::vector<Unit>& units, int expert, int panels, double pieces) {
  const int count = std::clamp(static_cast<int>(pieces + 0.999), 1, panels);
  for (int i = 0; i < count; ++i) units.push_back({expert, panels * i / count, panels * (i + 1) / count});
}

class Run {
 public:
  Run(const Machine& machine, const Experts& experts, const Routing& routing, const Work& work)
      : machine_(machine),
        work_(work),
        queues_(machine.pool->nodes()),
        pending_(experts.count()),
        ready_(experts.count()) {
    double total = 0;
    for (int expert : routing.active) total += routing.rows(expert) + kReadCost;
    for (int expert : routing.active) {
      const int node = experts.node.empty() ? -1 : experts.node[expert];
      Queue& queue = queues_[node >= 0 ? node : expert % queues_.size()];
      const double share = (routing.rows(expert) + kReadCost) / total;
      const double pieces = share * kUnitsPerThread * machine.pool->threads();
      const std::size_t before = queue.first.size();
      cut(queue.first, expert, work.first_panels, pieces);
      const int cuts = static_cast<int>(queue.first.size() - before);
      pending_[expert].value = cuts;
      if (work.second_panels == 0) continue;
      if (cuts == 1)
        ++left_.value;
      else
        cut(queue.second, expert, work.second_panels, pieces);
    }
    for (const Queue& queue : queues_) left_.value += static_cast<int>(queue.second.size());
  }

  void on_thread(int thread) {
    const Arithmetic arithmetic(*machine_.kernels);
    try {
      const Pool& pool = *machine_.pool;
      const int own = pool.node_index(pool.node(thread)), nodes = static_cast<int>(queues_.size());
      for (int i = 0; i < nodes; ++i) drain(queues_[(own + i) % nodes]);  // own node first, then help
      if (wait([&] { return left_.value.load(std::memory_order_acquire) == 0; }))
        for (int i; (i = last_.value.fetch_add(1, std::memory_order_relaxed)) < work_.last_units;)
          work_.last(i);
    } catch (...) {
      failed_.store(true, std::memory_order_relaxed);  // nobody must wait for what will not come
      throw;
    }
  }

 private:
  void drain(Queue& queue) {
    const int firsts = static_cast<int>(queue.first.size());
    const int all = firsts + static_cast<int>(queue.second.size());
    for (int i; (i = queue.next.value.fetch_add(1, std::memory_order_relaxed)) < all;) {
      if (i < firsts) {
        const Unit& unit = queue.first[i];
        work_.first(unit);
        // A locked instruction, which also makes streaming stores visible to whoever sees the count.
        if (pending_[unit.expert].value.fetch_sub(1, std::memory_order_acq_rel) == 1) {
          if (work_.between) work_.between(unit.expert);
          ready_[unit.expert].value.store(1, std::memory_order_release);
          if (work_.second_panels > 0 && unit.begin == 0 && unit.end == work_.first_panels) {
            work_.second({unit.expert, 0, work_.second_panels});
            left_.value.fetch_sub(1, std::memory_order_acq_rel);
          }
        }
      } else {
        const Unit& unit = queue.second[i - firsts];
        if (!wait([&] { return ready_[unit.expert].value.load(std::memory_order_acquire) == 1; })) return;
        work_.second(unit);
        left_.value.fetch_sub(1, std::memory_order_acq_rel);
      }
    }
  }

  template <class Ready>
  bool wait(Ready ready) {
    for (int spins = 1; !ready(); ++spins) {
      if (failed_.load(std::memory_order_relaxed)) return false;
      // Somebody else may need this CPU to finish what we wait for.
      if (spins % 1024 == 0) std::this_thread::yield();
      __builtin_ia32_pause();
    }
    return true;
  }

  const Machine& machine_;
  const Work& work_;
  std::vector<Queue> queues_;
  std::vector<Counter> pending_, ready_;
  Counter left_, last_;
  std::atomic<bool> failed_{false};
};

}  // namespace

void run_work(const Machine& machine, const Experts& experts, const Routing& routing, const Work& work) {
  Run run(machine, experts, routing, work);
  machine.pool->run([&](int thread) { run.on_thread(thread); });
}

}  // namespace ktbridge

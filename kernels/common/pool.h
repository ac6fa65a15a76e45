// A persistent pool of worker threads, each pinned to its CPU.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <compare>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace ktbridge {

// Where a thread belongs: a CPU and its NUMA node, as the kernel numbers them. ktbridge/machine.py reads
// them.
struct Place {
  int cpu = 0, node = 0;
  auto operator<=>(const Place&) const = default;
};

// NUMA node of the page that holds `address`; -1 if it isn't resident or the kernel won't say.
int node_of_page(const void* address);

// The thread that calls `run` is thread 0 of the pool and is never pinned: it is the user's. Where it sits
// on a worker's CPU, that worker takes thread 0's place meanwhile. One `run` at a time, and none from
// within a body. Workers wait for the next run spinning, for some tens of microseconds; then they sleep,
// for the cores are torch's between our layers.
class Pool {
 public:
  // Thread i belongs on places[i]. Throws std::invalid_argument if there is no place or the system
  // refuses that many threads.
  explicit Pool(std::vector<Place> places);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(places_.size()); }

  // NUMA node of a thread's place, as the kernel numbers it.
  int node(int thread) const { return places_[thread].node; }
  // How many distinct nodes the threads live on, and the number in [0, nodes()), by rising kernel number,
  // that a node has among them; -1 if no thread lives there.
  int nodes() const { return static_cast<int>(nodes_.size()); }
  int node_index(int kernel_node) const;

  // Calls body(thread) once on every thread in [0, threads()) and returns when all have ended. What the
  // first of them to throw throws is thrown here. Throws std::runtime_error in a forked child, where the
  // workers don't exist.
  void run(const std::function<void(int thread)>& body);

  // Held by a caller over a sequence of runs that share per-thread workspaces.
  std::mutex& guard() { return guard_; }

  // The process-wide pool of these places. Created on first use, never destroyed.
  static Pool& shared(const std::vector<Place>& places);

 private:
  // A word that threads wait on; alone on its cache line, for they poll it.
  struct alignas(64) Signal {
    std::atomic<std::uint32_t> value{0}, sleepers{0};
    template <class Ready>
    void wait(Ready ready);  // returns once ready(value)
    void wake();             // after a change of value
  };

  void work(int thread);
  void attempt(int thread);
  void stop();
  void make_way();

  const std::vector<Place> places_;
  std::vector<int> nodes_;
  std::vector<std::thread> workers_;
  const pid_t owner_;
  std::mutex guard_, failure_mutex_;
  std::exception_ptr failure_;
  // Plain: written before `turn_` changes and read after, or the other way about with `busy_`.
  const std::function<void(int)>* body_ = nullptr;
  bool stop_ = false;
  int caller_cpu_ = -1;  // where the last run was called
  int moved_ = 0;        // the worker that gave the caller its CPU; 0 for none
  Signal turn_;          // counts the runs
  Signal busy_;          // workers that have not ended the current run
};

}  // namespace ktbridge

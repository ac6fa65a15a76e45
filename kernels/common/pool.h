// A persistent pool of worker threads that shares out numbered tasks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <sys/types.h>

namespace ktbridge {

// One `run` at a time; the calling thread works too, so a pool of n has n - 1 workers. Tasks are
// handed out in order from one counter. A result must therefore not depend on which thread ran a
// task: every output element has exactly one task that writes it.
class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls task(index, thread) for every index in [0, count) and returns when all are done.
  // `thread` is in [0, threads()). What a task throws is thrown here after all have ended. Throws
  // std::runtime_error in a forked child, where the workers don't exist.
  void run(int count, const std::function<void(int index, int thread)>& task);

  // Held by a caller over a sequence of runs that share per-thread workspaces.
  std::mutex& guard() { return guard_; }

  // The process-wide pool of that size, created on first use. It outlives its users.
  static Pool& shared(int threads);

 private:
  void work(int thread);
  void drain(int thread);
  void attempt(int index, int thread);
  void stop();

  std::vector<std::thread> workers_;
  std::mutex guard_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(int, int)>* task_ = nullptr;
  int count_ = 0;
  std::atomic<int> next_{0};
  std::atomic<unsigned> generation_{0};
  std::atomic<int> busy_{0};
  std::atomic<bool> stop_{false};
  std::exception_ptr failure_;
  pid_t owner_;
};

// Threads to use for a wish: a positive wish as it is; 0 takes KTBRIDGE_THREADS if set, else the
// number of CPUs this process may run on. Throws std::invalid_argument for nonsense.
int choose_threads(int wish);

}  // namespace ktbridge

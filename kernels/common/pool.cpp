#include "common/pool.h"

#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

namespace ktbridge {
namespace {

// Phases of one layer follow each other within microseconds, so a waiting thread first spins; between
// layers the cores belong to torch, so it soon sleeps.
constexpr int kSpins = 2000;
constexpr int kMostThreads = 4096;

template <class Ready>
bool spin(Ready ready) {
  for (int i = 0; i < kSpins; ++i) {
    if (ready()) return true;
    __builtin_ia32_pause();
  }
  return false;
}

}  // namespace

Pool::Pool(int threads) : owner_(getpid()) {
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (const std::exception&) {
    const std::size_t started = workers_.size() + 1;
    stop();  // the workers there are must end before the members they wait on do
    throw std::invalid_argument("only " + std::to_string(started) + " of " + std::to_string(threads) +
                                " threads could be started");
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::attempt(int index, int thread) {
  try {
    (*task_)(index, thread);
  } catch (...) {  // out of memory, in practice; the other tasks still run, then the caller hears of it
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

void Pool::run(int count, const std::function<void(int, int)>& task) {
  if (getpid() != owner_)
    throw std::runtime_error(
        "the kernel threads don't survive fork(); start worker processes with the 'spawn' method");
  if (count <= 0) return;
  if (workers_.empty() || count == 1) {
    for (int i = 0; i < count; ++i) task(i, 0);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    failure_ = nullptr;
    task_ = &task;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  drain(0);
  const auto all_done = [this] { return busy_.load(std::memory_order_acquire) == 0; };
  if (!spin(all_done)) {
    std::unique_lock lock(mutex_);
    done_.wait(lock, all_done);
  }
  if (failure_) std::rethrow_exception(failure_);
}

void Pool::drain(int thread) {
  for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) attempt(i, thread);
}

void Pool::work(int thread) {
  unsigned seen = 0;
  const auto ready = [&] {
    return stop_.load(std::memory_order_relaxed) || generation_.load(std::memory_order_acquire) != seen;
  };
  for (;;) {
    if (!spin(ready)) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, ready);
    }
    if (stop_) return;
    seen = generation_.load(std::memory_order_acquire);
    drain(thread);
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      std::lock_guard lock(mutex_);
      done_.notify_one();
    }
  }
}

Pool& Pool::shared(int threads) {
  static std::mutex mutex;
  // Never destroyed: joining threads while the interpreter unloads libraries can hang.
  static auto& pools = *new std::map<int, std::unique_ptr<Pool>>;
  std::lock_guard lock(mutex);
  std::unique_ptr<Pool>& pool = pools[threads];
  if (!pool) pool = std::make_unique<Pool>(threads);
  return *pool;
}

int choose_threads(int wish) {
  if (wish < 0 || wish > kMostThreads)
    throw std::invalid_argument("threads must be 0 (automatic) or at most " + std::to_string(kMostThreads) +
                                ", not " + std::to_string(wish));
  if (wish > 0) return wish;
  if (const char* text = std::getenv("KTBRIDGE_THREADS"); text != nullptr && *text != '\0') {
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (*end != '\0' || value < 1 || value > kMostThreads)
      throw std::invalid_argument(std::string("KTBRIDGE_THREADS must be a number from 1 to 4096, not '") +
                                  text + "'");
    return static_cast<int>(value);
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace ktbridge

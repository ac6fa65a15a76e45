#include "common/pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace ktbridge {
namespace {

// By the clock, for a pause takes from 10 to 140 cycles. Longer than the gap between a layer's phases.
constexpr auto kSpin = std::chrono::microseconds(80);

// A bare futex: one system call wakes all, and they meet at no mutex on their way out. std::atomic's wait
// gives its CPU away before it sleeps, which on a busy machine makes wake-ups several times as slow.
void futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value) {
  static_assert(sizeof word == sizeof(std::uint32_t) && std::atomic<std::uint32_t>::is_always_lock_free);
  syscall(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
}

// A pin that fails (a CPU gone offline, a sandbox) costs speed only.
void pin(std::thread& thread, const Place& place) {
  cpu_set_t mask[8] = {};  // 8192 CPUs, for 1024 are not enough everywhere
  CPU_SET_S(place.cpu, sizeof mask, mask);
  pthread_setaffinity_np(thread.native_handle(), sizeof mask, mask);
}

}  // namespace

int node_of_page(const void* address) {
  const auto offset = reinterpret_cast<std::uintptr_t>(address) % sysconf(_SC_PAGESIZE);
  const void* page = static_cast<const char*>(address) - offset;
  int node = -1;
  // Without target nodes the call moves nothing and tells each page's node, or -ENOENT and its like.
  return syscall(SYS_move_pages, 0, 1UL, &page, nullptr, &node, 0) == 0 ? std::max(node, -1) : -1;
}

template <class Ready>
void Pool::Signal::wait(Ready ready) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (ready(value.load(std::memory_order_acquire))) return;
      __builtin_ia32_pause();
    }
  } while (Clock::now() < end);
  // Sequentially consistent, as in wake(): either wake() sees this sleeper or the futex sees its change.
  sleepers.fetch_add(1);
  for (std::uint32_t seen; !ready(seen = value.load());) futex(value, FUTEX_WAIT_PRIVATE, seen);
  sleepers.fetch_sub(1);
}

void Pool::Signal::wake() {
  if (sleepers.load() > 0) futex(value, FUTEX_WAKE_PRIVATE, INT_MAX);
}

Pool::Pool(std::vector<Place> places) : places_(std::move(places)), owner_(getpid()) {
  if (places_.empty()) throw std::invalid_argument("a pool needs a CPU for each thread, and at least one");
  for (const Place& place : places_) nodes_.push_back(place.node);
  std::sort(nodes_.begin(), nodes_.end());
  nodes_.erase(std::unique(nodes_.begin(), nodes_.end()), nodes_.end());
  try {
    for (int i = 1; i < threads(); ++i) {
      workers_.emplace_back([this, i] { work(i); });
      pin(workers_.back(), places_[i]);
    }
  } catch (const std::exception&) {
    const std::size_t started = workers_.size() + 1;
    stop();  // the workers there are must end before the members they wait on do
    throw std::invalid_argument("only " + std::to_string(started) + " of " + std::to_string(threads()) +
                                " threads could be started");
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stop_ = true;
  turn_.value.fetch_add(1);
  turn_.wake();
  for (std::thread& worker : workers_) worker.join();
}

int Pool::node_index(int kernel_node) const {
  const auto at = std::lower_bound(nodes_.begin(), nodes_.end(), kernel_node);
  return at != nodes_.end() && *at == kernel_node ? static_cast<int>(at - nodes_.begin()) : -1;
}

void Pool::attempt(int thread) {
  try {
    (*body_)(thread);
  } catch (...) {  // out of memory, in practice; the other threads still end, then the caller hears of it
    std::lock_guard lock(failure_mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

// The kernel can leave the caller on a worker's CPU for hundreds of runs, each as slow as two bodies in a
// row, while thread 0's place idles. That worker takes the idle place until the caller has moved on.
void Pool::make_way() {
  const int here = sched_getcpu();
  if (here == caller_cpu_) return;
  caller_cpu_ = here;
  if (moved_ != 0) pin(workers_[moved_ - 1], places_[moved_]);
  for (moved_ = threads() - 1; moved_ > 0 && places_[moved_].cpu != here;) --moved_;
  if (moved_ != 0) pin(workers_[moved_ - 1], places_[0]);
}

void Pool::run(const std::function<void(int)>& body) {
  if (workers_.empty()) return body(0);
  if (getpid() != owner_)
    throw std::runtime_error(
        "the kernel threads don't survive fork(); start worker processes with the 'spawn' method");
  make_way();
  body_ = &body;
  busy_.value.store(static_cast<std::uint32_t>(workers_.size()), std::memory_order_relaxed);
  turn_.value.fetch_add(1);
  turn_.wake();
  attempt(0);
  busy_.wait([](std::uint32_t left) { return left == 0; });
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Pool::work(int thread) {
  for (std::uint32_t turn = 0;; ++turn) {
    turn_.wait([turn](std::uint32_t current) { return current != turn; });
    if (stop_) return;
    attempt(thread);
    if (busy_.value.fetch_sub(1) == 1) busy_.wake();
  }
}

Pool& Pool::shared(const std::vector<Place>& places) {
  static std::mutex mutex;
  // Never destroyed: joining threads while the interpreter unloads libraries can hang.
  // By process too: a forked child can't use its parent's.
  static auto& pools = *new std::map<std::pair<pid_t, std::vector<Place>>, std::unique_ptr<Pool>>;
  std::lock_guard lock(mutex);
  std::unique_ptr<Pool>& pool = pools[{getpid(), places}];
  if (!pool) pool = std::make_unique<Pool>(places);
  return *pool;
}

}  // namespace ktbridge

// A pass that is run at once, or by a CUDA stream when it comes to it, so that Python can queue what follows
// meanwhile.
//
// cuLaunchHostFunc (its address is given: this library links no CUDA) calls back on a thread of the
// driver, which may use neither CUDA nor Python. So a pass keeps its result, its failure and its duration
// here.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "moe/layer.h"

namespace ktbridge {

class Job : public std::enable_shared_from_this<Job> {
 public:
  using Launch = int (*)(void* stream, void (*function)(void*), void* data);

  explicit Job(std::function<void(Job&)> pass) : pass_(std::move(pass)) {}

  // Queues the job; it stays alive until it has run. Throws std::runtime_error with CUDA's error number.
  void launch(std::uintptr_t launch, std::uintptr_t stream) {
    auto self = std::make_unique<std::shared_ptr<Job>>(shared_from_this());
    const int error =
        reinterpret_cast<Launch>(launch)(reinterpret_cast<void*>(stream), &Job::run_queued, self.get());
    if (error != 0) throw std::runtime_error("cuLaunchHostFunc failed with error " + std::to_string(error));
    self.release();  // `run_queued` has it now
  }

  // Runs it now. Throws what the pass throws.
  void run() {
    perform();
    check();
  }

  bool done() const { return done_.load(std::memory_order_acquire); }
  // 0 until it is done.
  double seconds() const { return done() ? seconds_ : 0; }
  std::size_t bytes() const { return done() ? bytes_ : 0; }

  // Throws what the pass threw, if it did. Only of a job that is done.
  void check() const {
    if (failure_) std::rethrow_exception(failure_);
  }

  // What a forward pass keeps for a backward pass of the same stream.
  std::unique_ptr<Saved> saved;
  std::ptrdiff_t tokens = 0, top_k = 0;  // of a forward

 private:
  static void run_queued(void* data) {
    const std::unique_ptr<std::shared_ptr<Job>> self(static_cast<std::shared_ptr<Job>*>(data));
    (*self)->perform();
  }

  void perform() {
    const auto started = std::chrono::steady_clock::now();
    try {
      pass_(*this);
      if (saved) bytes_ = saved->bytes();
    } catch (...) {
      failure_ = std::current_exception();
    }
    pass_ = nullptr;
    seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    done_.store(true, std::memory_order_release);
  }

  std::function<void(Job&)> pass_;
  std::exception_ptr failure_;
  double seconds_ = 0;
  std::size_t bytes_ = 0;
  std::atomic<bool> done_ = false;
};

}  // namespace ktbridge
